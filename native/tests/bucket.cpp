// The token bucket under a clock of the test's: over any time no more goes out than its rate and a burst.
#include "fork/bucket.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

constexpr std::uint64_t kSecond = 1000000000;

TEST(a_full_bucket_lets_a_burst_go_and_then_its_rate) {
    tl::Bucket bucket(100, 50, 10 * kSecond);
    REQUIRE_EQ(bucket.take(50, 10 * kSecond), 0u);
    REQUIRE_EQ(bucket.take(100, 10 * kSecond), 0u);  // nothing is owed yet
    REQUIRE_EQ(bucket.take(100, 10 * kSecond), kSecond);
    REQUIRE_EQ(bucket.take(1, 12 * kSecond), 0u);
}

TEST(what_is_not_taken_does_not_add_up) {
    tl::Bucket bucket(100, 50, 0);
    REQUIRE_EQ(bucket.take(50, 1000 * kSecond), 0u);
    REQUIRE_EQ(bucket.take(10, 1000 * kSecond), 0u);
    REQUIRE_EQ(bucket.take(10, 1000 * kSecond), kSecond / 10);
}

TEST(a_clock_that_goes_back_gives_nothing_away) {
    tl::Bucket bucket(100, 0, 100 * kSecond);
    REQUIRE_EQ(bucket.take(100, 100 * kSecond), 0u);
    REQUIRE_EQ(bucket.take(1, 50 * kSecond), kSecond);
    REQUIRE_EQ(bucket.take(1, 101 * kSecond), kSecond / 100);
}

TEST(without_a_limit_nobody_waits) {
    tl::Bucket bucket(0, 0, 0);
    for (int k = 0; k < 10; k++) REQUIRE_EQ(bucket.take(~std::uint64_t{0}, 0), 0u);
}

// Each sender waits as long as it is told, then sends.
TEST(never_more_than_rate_and_burst) {
    std::mt19937_64 random(7);
    for (int k = 0; k < 500; k++) {
        const std::uint64_t rate = 1 + random() % 1000000, burst = random() % 1000000;
        tl::Bucket bucket(rate, burst, 0);
        std::uint64_t now = 0, sent = 0, largest = 0;
        for (int at = 0; at < 50; at++) {
            const std::uint64_t nbytes = 1 + random() % 1000000;
            now += random() % 4 ? 0 : random() % (10 * kSecond);
            now += bucket.take(nbytes, now);
            sent += nbytes;
            largest = std::max(largest, nbytes);
            const double most = static_cast<double>(now) * 1e-9 * static_cast<double>(rate) +
                                static_cast<double>(burst + largest);
            REQUIRE(static_cast<double>(sent) <= most * (1 + 1e-9) + 1);
        }
    }
}

TEST(threads_share_one_rate) {
    tl::Bucket bucket(1000, 0, 0);
    std::atomic<std::uint64_t> longest{0};
    std::vector<std::thread> threads;
    for (int k = 0; k < 4; k++) {
        threads.emplace_back([&] {
            for (int at = 0; at < 250; at++) {
                const std::uint64_t wait = bucket.take(10, 0);
                std::uint64_t before = longest;
                while (before < wait && !longest.compare_exchange_weak(before, wait)) {
                }
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    // The last of a thousand waits for all those before it.
    REQUIRE_EQ(longest.load(), 9990 * kSecond / 1000);
}

}  // namespace

TEST_MAIN
