// Rings that are kept between engines: pinned once, used by whoever fits, let go on request, and never what may be in use.
#include "support.hpp"

#include <sys/wait.h>
#include <unistd.h>
#include <fstream>
#include <sstream>
#include <thread>

namespace {

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint64_t kSlot = 256u << 10;
constexpr std::uint64_t kStride = kSlot + 4096;  // with the page to shift bytes in

const char *entry(const StandIn &device, const char *cuda, const char *hip) {
    return device.kind == TL_DEVICE_CUDA ? cuda : hip;
}

std::uint64_t registrations(const StandIn &device) {
    return device.calls(entry(device, "cuMemHostRegister_v2", "hipHostRegister"));
}

tl_options keeping(int kind, std::uint64_t slots = 4, std::uint32_t flags = TL_OPTION_KEEP) {
    tl_options options = options_for(kind);
    options.pinned_bytes = slots * options.slot_bytes;
    options.flags = flags;
    return options;
}

std::uint64_t release() {
    tl_error error = no_error();
    std::uint64_t nbytes = ~0ull;
    REQUIRE_SAYING(tl_pinned_release(&nbytes, &error) == TL_OK, error.message);
    return nbytes;
}

// A file with a checked way to memory, as large as many slots.
struct Source {
    Folder folder;
    Bytes content;
    explicit Source(std::size_t nbytes = 4 * kMiB) : content(random_bytes(nbytes, nbytes)) {
        write_file(folder.file("data"), content);
    }

    tl_status start(Engine &engine, const Bytes &memory) const {
        const std::int32_t file = engine.add(folder.file("data"), content.size());
        return engine.submit(
            {{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
    }

    // Loads all of it; what the engine said just before its end.
    tl_stats load(const tl_options &options) const {
        Bytes memory(content.size(), kCanary);
        Engine engine(options);
        REQUIRE_EQ(start(engine, memory), TL_OK);
        REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        const tl_stats stats = engine.stats();
        REQUIRE_EQ(engine.destroy(), TL_OK);
        REQUIRE(memory == content);
        return stats;
    }
};

}  // namespace

TEST(a_kept_ring_is_registered_once) {
    const Source source;
    for (const int kind : kDevices) {
        for (const std::uint32_t warm : {0u, TL_OPTION_WARM}) {
            const StandIn &device = standin(kind);
            device.set_copy_jitter_us(300, 1);
            REQUIRE_EQ(source.load(keeping(kind, 4, TL_OPTION_KEEP | warm)).pinned_reused_bytes, 0u);
            const std::uint64_t kept = device.registered_bytes();
            REQUIRE(kept > 0 && kept <= 4 * kStride);
            REQUIRE_EQ(device.retained_contexts(), kind == TL_DEVICE_CUDA ? 1 : 0);
            REQUIRE_EQ(device.live_streams(), 0u);
            for (int again = 0; again < 5; ++again) {
                // Whether it asks for that or not: what was kept stays.
                const tl_stats stats =
                    source.load(keeping(kind, 4, (again % 2 ? TL_OPTION_KEEP : 0u) | warm));
                REQUIRE(stats.pinned_reused_bytes >= kept);
                REQUIRE(stats.pinned_peak_bytes <= 4 * kStride);
                REQUIRE_EQ(stats.pinned_bytes, stats.pinned_peak_bytes);
            }
            REQUIRE(registrations(device) <= 4);
            REQUIRE_EQ(release(), registrations(device) * kStride);
            REQUIRE_EQ(release(), 0u);
            device.require_clean();
        }
    }
}

TEST(nothing_is_kept_where_nobody_asks) {
    const Source source;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        for (int again = 0; again < 2; ++again) {
            REQUIRE_EQ(source.load(keeping(kind, 4, 0)).pinned_reused_bytes, 0u);
            device.require_clean();
        }
        { Engine without_work(keeping(kind)); }
        device.require_clean();
        REQUIRE_EQ(release(), 0u);
    }
}

TEST(a_smaller_engine_takes_it_and_a_larger_one_makes_its_own) {
    const Source source;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.set_copy_delay_us(500);
        source.load(keeping(kind, 6, TL_OPTION_KEEP | TL_OPTION_WARM));
        const std::uint64_t kept = device.registered_bytes();
        tl_options small = keeping(kind, 2);
        small.slot_bytes = small.chunk_bytes;
        small.pinned_bytes = 3 * small.slot_bytes;
        REQUIRE_EQ(source.load(small).pinned_reused_bytes, kept);
        REQUIRE_EQ(source.load(keeping(kind, 2)).pinned_reused_bytes, kept);
        for (int way = 0; way < 2; ++way) {  // more slots, then larger ones
            tl_options more = keeping(kind, 6 + 2 * (way + 1));
            more.slot_bytes *= 1 + static_cast<std::uint64_t>(way);
            const std::uint64_t most = more.pinned_bytes / more.slot_bytes * (more.slot_bytes + 4096);
            REQUIRE_EQ(source.load(more).pinned_reused_bytes, 0u);
            REQUIRE(device.registered_peak_bytes() <= std::max(most, kept));
        }
        release();
        // One that keeps nothing leaves nothing, where it had to make room.
        source.load(keeping(kind, 2));
        source.load(keeping(kind, 8, 0));
        device.require_clean();
    }
}

TEST(of_two_at_once_the_larger_is_kept) {
    const Source source;
    for (const int kind : kDevices) {
        for (const bool larger_first : {true, false}) {
            const StandIn &device = standin(kind);
            const tl_options large = keeping(kind, 4, TL_OPTION_KEEP | TL_OPTION_WARM);
            const tl_options small = keeping(kind, 2, TL_OPTION_KEEP | TL_OPTION_WARM);
            Bytes one(source.content.size()), two(source.content.size());
            Engine a(larger_first ? large : small), b(larger_first ? small : large);
            REQUIRE_EQ(source.start(a, one), TL_OK);
            REQUIRE_EQ(source.start(b, two), TL_OK);
            REQUIRE_SAYING(a.wait() == TL_OK && b.wait() == TL_OK, a.error.message);
            const std::uint64_t most = std::max(a.stats().pinned_bytes, b.stats().pinned_bytes);
            REQUIRE_EQ(a.destroy(), TL_OK);
            REQUIRE_EQ(b.destroy(), TL_OK);
            REQUIRE(one == source.content && two == source.content);
            REQUIRE_EQ(device.registered_bytes(), most);
            REQUIRE_EQ(device.retained_contexts(), kind == TL_DEVICE_CUDA ? 1 : 0);
            REQUIRE_EQ(release(), most);
            device.require_clean();
        }
    }
}

TEST(each_device_has_its_own) {
    const Source source;
    const StandIn &cuda = standin(TL_DEVICE_CUDA);
    const StandIn &hip = standin(TL_DEVICE_HIP);
    std::uint64_t pinned = 0;
    for (const bool again : {false, true}) {
        for (const int kind : kDevices) {
            for (const int ordinal : {0, 1}) {
                tl_options options = keeping(kind, 2, TL_OPTION_KEEP | TL_OPTION_WARM);
                options.device_index = ordinal;
                const tl_stats stats = source.load(options);
                REQUIRE_EQ(stats.pinned_reused_bytes, again ? stats.pinned_bytes : 0u);
                pinned += again ? 0 : stats.pinned_bytes;
            }
        }
    }
    REQUIRE_EQ(cuda.registered_bytes() + hip.registered_bytes(), pinned);
    REQUIRE_EQ(release(), pinned);
    cuda.require_clean();
    hip.require_clean();
}

TEST(memory_that_could_not_be_pinned_is_not_kept) {
    const Source source;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        const char *call = entry(device, "cuMemHostRegister_v2", "hipHostRegister");
        for (const int turn : {1, 2, -1}) {
            device.fail(call, turn, 2);
            const tl_stats stats = source.load(keeping(kind, 2, TL_OPTION_KEEP | TL_OPTION_WARM));
            REQUIRE(std::string(stats.notes).find("could not be pinned") != std::string::npos);
            device.fail(call, 0, 0);
            device.require_clean(true);
        }
        // The next one tries again, and a kept one that could not be completed goes.
        Source small(4096);
        REQUIRE_EQ(small.load(keeping(kind, 2)).pinned_bytes, kStride);
        device.fail(call, 1, 2);
        REQUIRE_EQ(source.load(keeping(kind, 2, TL_OPTION_KEEP | TL_OPTION_WARM)).pinned_reused_bytes,
                   kStride);
        device.require_clean(true);
        REQUIRE_EQ(release(), 0u);
    }
}

TEST(what_a_failed_driver_may_still_read_is_not_kept) {
    const Source source;
    for (const int kind : kDevices) {
        const char *const calls[][2] = {{"cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"},
                                        {"cuEventRecord", "hipEventRecord"},
                                        {"cuEventSynchronize", "hipEventSynchronize"},
                                        {"cuStreamSynchronize", "hipStreamSynchronize"},
                                        {"cuStreamDestroy_v2", "hipStreamDestroy"}};
        for (const auto &names : calls) {
            const StandIn &device = standin(kind);
            device.set_copy_delay_us(1000);
            source.load(keeping(kind));
            // The first record of an event is the fence of the submission; streams are waited for at the end alone.
            const bool at_end = std::strstr(names[0], "Stream") != nullptr;
            device.fail(entry(device, names[0], names[1]), at_end ? -1 : -2, 999);
            for (int again = 0; again < 2; ++again) {
                Bytes memory(source.content.size());
                Engine engine(keeping(kind));
                if (again == 1) {
                    REQUIRE_EQ(engine.stats().pinned_reused_bytes, 0u);
                }
                source.start(engine, memory);
                engine.wait();
                engine.destroy();
                device.drain();
            }
            device.fail(entry(device, names[0], names[1]), 0, 0);
            device.require_clean();
            REQUIRE_EQ(release(), 0u);
        }
    }
}

TEST(the_next_engine_does_not_fill_what_is_still_copied) {
    const Source one, two(3 * kMiB);
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.set_copy_delay_us(5000);  // longer than refilling a slot takes
        const tl_options options = keeping(kind, 16);
        Bytes first(one.content.size(), kCanary), second(two.content.size(), kCanary);
        for (const auto &[source, memory] : {std::pair(&one, &first), std::pair(&two, &second)}) {
            Engine engine(options);
            REQUIRE_EQ(source->start(engine, *memory), TL_OK);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);  // issued, not yet moved
        }
        device.drain();
        REQUIRE(first == one.content);
        REQUIRE(second == two.content);
        REQUIRE(release() > 0);
        device.require_clean();
    }
}

TEST(a_load_that_was_cancelled_leaves_a_ring_that_is_right) {
    const Source source;
    Random random(3);
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        for (int seed = 0; seed < 10; ++seed) {
            device.set_copy_delay_us(seed % 2 ? 700 : 0);
            Bytes memory(source.content.size(), kCanary);
            Engine engine(keeping(kind, 2 + random() % 3));
            REQUIRE_EQ(source.start(engine, memory), TL_OK);
            for (std::uint64_t i = random() % 2000; i > 0; --i) {
                std::this_thread::yield();
            }
            REQUIRE_EQ(engine.destroy(), TL_OK);
            const Bytes after = memory;
            source.load(keeping(kind, 4));
            device.drain();
            REQUIRE(after == memory);
        }
        release();
        device.require_clean();
    }
}

TEST(rings_at_work_are_not_kept_after_a_release) {
    const Source source;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        {
            Bytes memory(source.content.size());
            Engine engine(keeping(kind));
            REQUIRE_EQ(source.start(engine, memory), TL_OK);
            REQUIRE_EQ(release(), 0u);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            REQUIRE(engine.stats().pinned_bytes > 0);
            tl_engine_stream_wait(engine.get(), 0, &engine.error);
            source.load(keeping(kind, 2));  // begun after it: this one is kept
            REQUIRE_EQ(engine.destroy(), TL_OK);
            REQUIRE(memory == source.content);
        }
        REQUIRE(device.registered_bytes() > 0 && device.registered_bytes() <= 2 * kStride);
        REQUIRE_EQ(release(), device.registered_bytes());
        device.require_clean();
    }
}

TEST(threads_that_load_and_let_go_at_once) {
    const Source source(kMiB);
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.set_copy_jitter_us(200, 4);
        std::vector<std::string> problems(4);
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < problems.size(); ++i) {
            threads.emplace_back([&, i] {
                try {
                    for (std::uint64_t round = 0; round < 8; ++round) {
                        tl_options options = keeping(kind, 2 + (round + i) % 3, i % 4 ? TL_OPTION_KEEP : 0u);
                        options.device_index = static_cast<std::int32_t>(round % 2);
                        source.load(options);
                        if ((round + i) % 5 == 4) {
                            release();
                        }
                    }
                } catch (const std::exception &error) {
                    problems[i] = error.what();
                }
            });
        }
        for (std::thread &thread : threads) {
            thread.join();
        }
        for (const std::string &problem : problems) {
            REQUIRE_EQ(problem, "");
        }
        device.drain();
        REQUIRE(device.registered_bytes() <= 2 * 4 * kStride);  // one ring for each of two devices
        release();
        device.require_clean();
    }
}

TEST(a_forked_child_has_none_of_its_parents) {
    const Source source;
    const StandIn &device = standin(TL_DEVICE_CUDA);
    source.load(keeping(TL_DEVICE_CUDA, 4, TL_OPTION_KEEP | TL_OPTION_WARM));
    device.drain();
    const std::uint64_t kept = device.registered_bytes();
    const pid_t child = fork();
    if (child == 0) {
        std::uint64_t nbytes = 1;
        int wrong = tl_pinned_release(&nbytes, nullptr) == TL_OK && nbytes == 0 ? 0 : 1;
        wrong |= device.registered_bytes() == kept ? 0 : 2;
        try {
            wrong |= Engine(keeping(TL_DEVICE_CUDA)).stats().pinned_reused_bytes == 0 ? 0 : 4;
        } catch (const std::exception &) {
            wrong |= 8;
        }
        _exit(wrong);
    }
    int status = 0;
    REQUIRE_EQ(waitpid(child, &status, 0), child);
    REQUIRE(WIFEXITED(status));
    REQUIRE_EQ(WEXITSTATUS(status), 0);
    REQUIRE(source.load(keeping(TL_DEVICE_CUDA)).pinned_reused_bytes == kept);
    REQUIRE_EQ(release(), kept);
    device.require_clean();
}

TEST(what_is_kept_is_not_copied_by_a_fork) {
    const Source source;
    const StandIn &device = standin(TL_DEVICE_CUDA);
    tl_options options = keeping(TL_DEVICE_CUDA);
    options.slot_bytes = options.pinned_bytes = 8 * kMiB;  // two slots, as no other map is large
    source.load(options);
    const std::uint64_t nbytes = 2 * (8 * kMiB + 4096);
    std::ifstream maps("/proc/self/smaps");
    std::string line;
    bool found = false, there = false;
    while (std::getline(maps, line)) {
        std::istringstream words(line);
        std::string name;
        std::uint64_t kilobytes = 0;
        words >> name;
        if (name == "Size:") {
            words >> kilobytes;
            there = kilobytes == nbytes >> 10;
        }
        found = found || (there && name == "VmFlags:" && line.find(" dc") != std::string::npos);
    }
    release();
    REQUIRE(found);
    device.require_clean();
}

// The last one: a process may end with a ring that is kept. The leak sanitizer sees that it is not lost.
TEST(what_is_kept_goes_with_the_process) {
    const Source source;
    const StandIn &device = standin(TL_DEVICE_CUDA);
    REQUIRE(source.load(keeping(TL_DEVICE_CUDA)).pinned_bytes > 0);
    device.drain();
}

TEST_MAIN
