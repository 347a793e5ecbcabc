// The sender and its connections, with the sanitizers watching: readers at once, epochs that move, ends in the middle.
#include "support.hpp"
#include "tensorlift_fork.h"

#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <thread>

namespace {

constexpr std::uint64_t kMiB = 1u << 20;

struct Seed {
    std::vector<Bytes> regions;
    tl_sender *sender = nullptr;
    std::vector<int> ends;

    explicit Seed(std::uint64_t rate = 0) {
        for (std::size_t size : {3 * kMiB + 5, std::uint64_t{0}, kMiB})
            regions.push_back(random_bytes(size, size));
        std::vector<tl_region> places;
        for (const Bytes &bytes : regions)
            places.push_back({reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size()});
        tl_error error = no_error();
        REQUIRE_SAYING(
            tl_sender_create(places.data(), places.size(), rate, kMiB, 60000, &sender, &error) == TL_OK,
            error.message);
    }
    ~Seed() {
        destroy();
        for (int fd : ends) close(fd);
    }
    void destroy() {
        tl_sender_destroy(sender, nullptr);
        sender = nullptr;
    }
    int connect() {
        int pair[2];
        REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        ends.push_back(pair[0]);
        REQUIRE_EQ(tl_sender_serve(sender, pair[1], nullptr), TL_OK);
        return pair[0];
    }
};

tl_chunk chunk_of(std::uint32_t region, std::uint64_t offset, std::uint64_t nbytes, std::uint64_t epoch) {
    tl_chunk chunk{};
    chunk.struct_size = sizeof chunk;
    chunk.region = region;
    chunk.offset = offset;
    chunk.nbytes = nbytes;
    chunk.epoch = epoch;
    chunk.digest = 1;
    chunk.milliseconds = 60000;
    return chunk;
}

tl_status fetch(int fd, tl_chunk &chunk, Bytes &to) {
    to.assign(chunk.nbytes, 0);
    const tl_place place{0, chunk.nbytes, reinterpret_cast<std::uintptr_t>(to.data())};
    return tl_chunk_fetch(fd, &chunk, &place, 1, nullptr);
}

}  // namespace

TEST(readers_at_once) {
    std::thread([] {}).join();  // a sanitizer starts one of its own with the first
    const int threads = count_threads();
    Seed seed;
    std::atomic<int> right{0};
    std::vector<std::thread> readers;
    for (int k = 0; k < 4; k++) {
        const int fd = seed.connect();
        readers.emplace_back([&, fd, k] {
            for (std::uint64_t at = 0; at < 8; at++) {
                tl_chunk chunk = chunk_of(0, at + k, 2 * kMiB, 0);
                Bytes got;
                if (fetch(fd, chunk, got) == TL_OK && chunk.outcome == TL_CHUNK_OK && chunk.verified &&
                    std::equal(got.begin(), got.end(), seed.regions[0].begin() + static_cast<long>(at + k)))
                    right++;
            }
        });
    }
    for (std::thread &reader : readers) reader.join();
    REQUIRE_EQ(right.load(), 32);
    seed.destroy();
    REQUIRE(threads_come_back_to(threads));
}

TEST(epochs_that_move_while_readers_read) {
    Seed seed;
    std::atomic<std::uint64_t> epoch{0};
    std::atomic<bool> stop{false};
    std::atomic<int> failed{0}, right{0};
    std::vector<std::thread> readers;
    for (int k = 0; k < 2; k++) {
        const int fd = seed.connect();
        readers.emplace_back([&, fd] {
            while (!stop) {
                tl_chunk chunk = chunk_of(0, 0, 3 * kMiB, epoch);
                Bytes got;
                if (fetch(fd, chunk, got) != TL_OK) failed++;
                if (chunk.outcome == TL_CHUNK_OK &&
                    std::equal(got.begin(), got.end(), seed.regions[0].begin()))
                    right++;
            }
        });
    }
    while (epoch < 60) {
        const std::uint64_t next = epoch + 1;
        REQUIRE_EQ(tl_sender_set_epoch(seed.sender, next, next % 3 != 0, nullptr), TL_OK);
        epoch = next;
        // Now and then it rests until somebody got through, however slow that is.
        const int before = right;
        while (epoch % 6 == 1 && right == before) usleep(1000);
        usleep(1000);
    }
    stop = true;
    for (std::thread &reader : readers) reader.join();
    REQUIRE_EQ(failed.load(), 0);
    tl_sender_stats stats{};
    stats.struct_size = sizeof stats;
    REQUIRE_EQ(tl_sender_stats_of(seed.sender, &stats, nullptr), TL_OK);
    REQUIRE(stats.refused_chunks > 0);
}

TEST(an_end_while_bytes_wait_for_their_turn) {
    Seed seed(1);  // one byte a second, behind the first MiB
    std::vector<std::thread> readers;
    std::atomic<int> failed{0};
    for (int k = 0; k < 3; k++) {
        const int fd = seed.connect();
        readers.emplace_back([&, fd] {
            tl_chunk chunk = chunk_of(0, 0, 3 * kMiB, 0);
            Bytes got;
            if (fetch(fd, chunk, got) == TL_ERR_READ) failed++;
        });
    }
    usleep(20000);
    seed.destroy();
    for (std::thread &reader : readers) reader.join();
    REQUIRE_EQ(failed.load(), 3);
}

TEST(connections_that_come_and_go) {
    const int threads = count_threads(), files = count_open_files();
    {
        Seed seed;
        for (int k = 0; k < 50; k++) {
            const int fd = seed.connect();
            tl_chunk chunk = chunk_of(2, 5, 1000, 0);
            Bytes got;
            REQUIRE_EQ(fetch(fd, chunk, got), TL_OK);
            shutdown(fd, SHUT_RDWR);
        }
        tl_sender_stats stats{};
        stats.struct_size = sizeof stats;
        do {
            usleep(1000);
            REQUIRE_EQ(tl_sender_stats_of(seed.sender, &stats, nullptr), TL_OK);
        } while (stats.connections > 0);
        REQUIRE_EQ(stats.sent_chunks, 50u);
        REQUIRE(threads_come_back_to(threads));
    }
    REQUIRE_EQ(count_open_files(), files);
}

TEST_MAIN
