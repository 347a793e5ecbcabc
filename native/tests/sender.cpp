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

    explicit Seed(std::uint64_t rate = 0, int kind = TL_DEVICE_CPU) {
        for (std::size_t size : {3 * kMiB + 5, std::uint64_t{0}, kMiB, 13 * kMiB + 9})
            regions.push_back(random_bytes(size, size));
        std::vector<tl_region> places;
        for (const Bytes &bytes : regions)
            places.push_back({reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size(), kind, 0});
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

tl_status fetch(int fd, tl_chunk &chunk, Bytes &to, tl_staging *staging = nullptr,
                const tl_origin *origin = nullptr) {
    to.assign(chunk.nbytes, 0);
    const tl_place place{0, chunk.nbytes, reinterpret_cast<std::uintptr_t>(to.data())};
    return tl_chunk_fetch(fd, &chunk, &place, 1, staging, origin, nullptr);
}

// Memory that a fork reaches in one of the ways; this process is its own seed.
struct Reached {
    tl_origin origin{};
    int fd = -1;
    std::uint64_t address = 0, mapped = 0, nbytes = 0;

    Reached(std::int32_t kind, const Bytes &bytes, bool in_a_file = false) {
        origin = {kind, 0, reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size()};
        if (kind == TL_ORIGIN_PROCESS) origin.handle = getpid();
        if (!in_a_file) return;
        tl_error error = no_error();
        REQUIRE_SAYING(tl_shared_create(bytes.size() + 5, &fd, &address, &error) == TL_OK, error.message);
        std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char *>(address) + 5);
        REQUIRE_SAYING(tl_shared_map(fd, &mapped, &nbytes, &error) == TL_OK, error.message);
        REQUIRE_EQ(nbytes, bytes.size() + 5);
        origin.address = mapped + 5;
    }
    ~Reached() {
        if (mapped) tl_shared_release(-1, mapped, nbytes);
        if (fd >= 0) tl_shared_release(fd, address, origin.nbytes + 5);
    }
};

constexpr std::pair<std::int32_t, bool> kWays[] = {
    {TL_ORIGIN_HERE, false}, {TL_ORIGIN_HERE, true}, {TL_ORIGIN_PROCESS, false}};

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

TEST(readers_that_copy_for_themselves) {
    const int files = count_open_files();
    {
        Seed seed;
        const Bytes &region = seed.regions[0];
        for (const auto &[kind, in_a_file] : kWays) {
            const Reached reached(kind, region, in_a_file);
            std::atomic<int> right{0};
            std::vector<std::thread> readers;
            for (int k = 0; k < 4; k++) {
                readers.emplace_back([&, fd = seed.connect(), k] {
                    for (std::uint64_t at = 0; at < 8; at++) {
                        tl_chunk chunk = chunk_of(0, at + k, 2 * kMiB, 0);
                        Bytes got;
                        if (fetch(fd, chunk, got, nullptr, &reached.origin) == TL_OK &&
                            chunk.outcome == TL_CHUNK_OK && chunk.verified &&
                            std::equal(got.begin(), got.end(), region.begin() + static_cast<long>(at + k)))
                            right++;
                    }
                });
            }
            for (std::thread &reader : readers) reader.join();
            REQUIRE_EQ(right.load(), 32);
        }
    }
    REQUIRE_EQ(count_open_files(), files);
}

TEST(an_origin_gives_nothing_beside_its_bytes) {
    const Bytes bytes = random_bytes(100, 1);
    char to[100];
    for (const auto &[kind, in_a_file] : kWays) {
        const Reached reached(kind, bytes, in_a_file);
        REQUIRE_EQ(tl_origin_copy(&reached.origin, 60, to, 40, nullptr), TL_OK);
        REQUIRE(std::equal(to, to + 40, reinterpret_cast<const char *>(bytes.data()) + 60));
        REQUIRE_EQ(tl_origin_copy(&reached.origin, 61, to, 40, nullptr), TL_ERR_READ);
        REQUIRE_EQ(tl_origin_copy(&reached.origin, ~std::uint64_t{0}, to, 2, nullptr), TL_ERR_READ);
        REQUIRE_EQ(tl_origin_copy(&reached.origin, 100, to, 0, nullptr), TL_OK);
    }
    tl_origin nowhere{TL_ORIGIN_PROCESS, getpid(), 16, 100};
    REQUIRE_EQ(tl_origin_copy(&nowhere, 0, to, 1, nullptr), TL_ERR_READ);
    nowhere.kind = 9;
    REQUIRE_EQ(tl_origin_copy(&nowhere, 0, to, 1, nullptr), TL_ERR_ARGUMENT);
}

TEST(copies_of_every_size_and_alignment) {
    const Bytes bytes = random_bytes(400, 1);
    const tl_origin origin = Reached(TL_ORIGIN_HERE, bytes).origin;
    for (std::uint64_t from = 0; from < 3; from++) {
        for (std::uint64_t at = 0; at < 33; at++) {
            for (std::uint64_t nbytes : {0, 1, 15, 16, 63, 64, 79, 80, 95, 200, 321}) {
                Bytes to(400), wanted(400);
                std::copy_n(bytes.begin() + static_cast<long>(from), nbytes,
                            wanted.begin() + static_cast<long>(at));
                REQUIRE_EQ(tl_origin_copy(&origin, from, to.data() + at, nbytes, nullptr), TL_OK);
                REQUIRE(to == wanted);
            }
        }
    }
}

TEST(epochs_that_move_while_readers_read) {
    Seed seed;
    const Reached reached(TL_ORIGIN_PROCESS, seed.regions[0]);
    std::atomic<std::uint64_t> epoch{0};
    std::atomic<bool> stop{false};
    std::atomic<int> failed{0}, right{0};
    std::vector<std::thread> readers;
    for (int k = 0; k < 2; k++) {
        const int fd = seed.connect();
        readers.emplace_back([&, fd, k] {
            while (!stop) {
                tl_chunk chunk = chunk_of(0, 0, 3 * kMiB, epoch);
                Bytes got;
                if (fetch(fd, chunk, got, nullptr, k ? &reached.origin : nullptr) != TL_OK) failed++;
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

// The device's memory is the host's with the stand-in, whose copies come late.
TEST(from_one_device_to_another) {
    for (const int kind : {TL_DEVICE_CUDA, TL_DEVICE_HIP}) {
        const StandIn &device = standin(kind);
        device.set_copy_delay_us(300);
        {
            Seed seed(0, kind);
            // A driver refuses a copy from one allocation into the next.
            device.set_allocation_bytes(kMiB / 2);
            const int fd = seed.connect();
            tl_staging *staging = nullptr;
            REQUIRE_EQ(tl_staging_create(kind, 1, &staging, nullptr), TL_OK);
            for (std::uint64_t at = 0; at < 6; at++) {
                tl_chunk chunk = chunk_of(3, at, 13 * kMiB - 7, 0);
                Bytes got;
                REQUIRE_EQ(fetch(fd, chunk, got, staging), TL_OK);
                REQUIRE_EQ(chunk.outcome, TL_CHUNK_OK);
                REQUIRE(std::equal(got.begin(), got.end(), seed.regions[3].begin() + static_cast<long>(at)));
            }
            tl_staging_destroy(staging, nullptr);
        }
        device.require_clean();
    }
}

// Each call of the driver fails once, on either side: an error, nothing left, and no byte that comes later.
TEST(a_driver_that_fails) {
    const std::vector<Bytes> regions{random_bytes(9 * kMiB, 1)};
    for (const int kind : {TL_DEVICE_CUDA, TL_DEVICE_HIP}) {
        const StandIn &device = standin(kind);
        for (std::uint32_t entry = 0; device.entry(entry); entry++) {
            for (std::int64_t nth : {1, 5}) {
                device.reset();
                device.ready();
                device.fail(device.entry(entry), nth, 999);
                {
                    tl_sender *sender = nullptr;
                    const tl_region region{reinterpret_cast<std::uintptr_t>(regions[0].data()),
                                           regions[0].size(), kind, 0};
                    tl_error error = no_error();
                    const tl_status made = tl_sender_create(&region, 1, 0, kMiB, 60000, &sender, &error);
                    tl_staging *staging = nullptr;
                    int pair[2];
                    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
                    if (made == TL_OK && tl_staging_create(kind, 1, &staging, &error) == TL_OK) {
                        REQUIRE_EQ(tl_sender_serve(sender, pair[1], nullptr), TL_OK);
                        pair[1] = -1;
                        tl_chunk chunk = chunk_of(0, 0, 9 * kMiB, 0);
                        Bytes got;
                        if (fetch(pair[0], chunk, got, staging) == TL_OK && chunk.outcome == TL_CHUNK_OK) {
                            REQUIRE(got == regions[0]);
                        }
                    } else {
                        REQUIRE(error.message[0] != '\0');
                    }
                    tl_staging_destroy(staging, nullptr);
                    tl_sender_destroy(sender, nullptr);
                    close(pair[0]);
                    if (pair[1] >= 0) close(pair[1]);
                }
                // Slots that could not be registered are pageable, which is right.
                device.require_clean(true);
            }
        }
    }
}

TEST(an_end_while_bytes_wait_for_their_turn) {
    Seed seed(1);  // one byte a second, behind the first MiB
    std::vector<std::thread> readers;
    std::atomic<int> failed{0};
    const Reached reached(TL_ORIGIN_HERE, seed.regions[0]);
    for (int k = 0; k < 3; k++) {
        const int fd = seed.connect();
        readers.emplace_back([&, fd, k] {
            tl_chunk chunk = chunk_of(0, 0, 3 * kMiB, 0);
            Bytes got;
            if (fetch(fd, chunk, got, nullptr, k ? &reached.origin : nullptr) == TL_ERR_READ) failed++;
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
