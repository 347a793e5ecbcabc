#include "failing.hpp"

#include <signal.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>

namespace {

constexpr unsigned kHangs = 60;  // seconds

std::uint64_t plans_asked() {
    const char *asked = std::getenv("TENSORLIFT_TEST_FAULTS");
    return asked ? std::strtoull(asked, nullptr, 10) : 0;
}

const char *running = "";

void hangs(int) {
    for (const char *text : {"FAILED hangs: ", running, "; last: ", calls_last(), "\n"}) {
        if (write(STDOUT_FILENO, text, std::strlen(text)) < 0) break;
    }
    std::abort();
}

// What is left behind where it should not be.
struct Held {
    int files = count_open_files();
    int threads = count_threads();
    std::int64_t mapped = calls_mapped_bytes();

    void require_back(const std::string &what) const {
        REQUIRE_SAYING(threads_come_back_to(threads), what);
        check::equal(count_open_files(), files, ("open files: " + what).c_str(), __FILE__, __LINE__);
        check::equal(calls_mapped_bytes(), mapped, ("mapped bytes: " + what).c_str(), __FILE__, __LINE__);
    }
};

// Undisturbed. Starts what is started once a process.
void require_done(const char *what, const Work &work) {
    const std::string said = work();
    REQUIRE_SAYING(said.empty(), std::string(what) + ": " + said);
}

// Whether the work succeeded; arrange: what is to fail; more: of what is not counted here too.
bool once(const Work &work, const Held &held, const std::string &what, const std::function<void()> &arrange,
          bool more = false) {
    running = what.c_str();
    calls_reset();
    arrange();
    alarm(kHangs);
    std::string said, wrong;
    try {
        said = work();
    } catch (const std::exception &error) {
        wrong = error.what();
    }
    alarm(0);
    const bool failed = calls_failed() > 0;
    const std::string last = what + " (last: " + calls_last() + ")";
    calls_reset();
    REQUIRE_SAYING(wrong.empty(), last + ": " + wrong);
    REQUIRE_SAYING(said.empty() || failed || more, last + ": an error without a cause: " + said);
    held.require_back(last);
    return said.empty();
}

}  // namespace

void fail_each_turn(const char *what, const Work &work) {
    signal(SIGALRM, hangs);
    calls_reset();
    require_done(what, work);
    const Held held;
    REQUIRE(once(work, held, what, [] {}));
    std::uint64_t runs = 0, succeeded = 0;
    for (std::uint32_t call = 0; calls_name(call); ++call) {
        std::vector<std::int32_t> codes;
        for (std::uint32_t k = 0; const std::int32_t code = calls_code(call, k); ++k) codes.push_back(code);
        // Until a turn that was not reached. A run ends with the call that fails where that is an error.
        for (std::uint64_t turn = 1, reached = 0; reached + 1 >= turn; ++turn) {
            for (std::size_t k = 0; k < codes.size(); ++k) {
                if (!plans_asked() && k != turn % codes.size()) continue;
                const std::string name = std::string(what) + ": " + calls_name(call) + ", call " +
                                         std::to_string(turn) + ", code " + std::to_string(codes[k]);
                std::uint64_t seen = 0;
                const auto counted = [&] {
                    std::string said = work();
                    seen = calls_count(call);
                    return said;
                };
                succeeded += once(counted, held, name, [&] { calls_fail(call, turn, codes[k]); });
                ++runs;
                reached = k == 0 || !plans_asked() ? seen : std::max(reached, seen);
            }
        }
    }
    std::printf("  %s: %llu runs, %llu succeeded\n", what, static_cast<unsigned long long>(runs),
                static_cast<unsigned long long>(succeeded));
    std::fflush(stdout);
}

void fail_at_random(const char *what, const Work &work, std::uint64_t plans, const Also &also) {
    signal(SIGALRM, hangs);
    calls_reset();
    require_done(what, work);
    const Held held;
    plans = std::max(plans, plans_asked());
    std::uint64_t succeeded = 0;
    for (std::uint64_t seed = 0; seed < plans; ++seed) {
        // From one call in a thousand to one in four.
        const std::uint32_t rate = 1000u << seed % 9;
        const std::string name = std::string(what) + ": seed " + std::to_string(seed);
        succeeded += once(
            work, held, name,
            [&] {
                calls_fail_at_random(seed, rate);
                if (also) also(seed, rate);
            },
            also != nullptr);
    }
    std::printf("  %s: %llu random plans, %llu succeeded\n", what, static_cast<unsigned long long>(plans),
                static_cast<unsigned long long>(succeeded));
    std::fflush(stdout);
}
