// Right bytes on a device: through the stand-in, under both drivers' names, with copies that come late.
#include "support.hpp"

#include <dlfcn.h>
#include <chrono>
#include <thread>

namespace {

// Whole slots, at least two, each with a page on top to shift its bytes in.
std::uint64_t most_pinned(const tl_options &options) {
    return std::max<std::uint64_t>(2, options.pinned_bytes / options.slot_bytes) *
           (options.slot_bytes + 4096);
}

// Loads a plan in parts of random size and takes each arena's bytes in the order of the consumer's stream.
void load(const StandIn &device, const Plan &plan, const tl_options &options, Random &random) {
    const std::uint64_t consumer = device.stream();
    Bytes memory(plan.memory_bytes, kCanary);
    Bytes taken(plan.memory_bytes);
    {
        Engine engine(options);
        const auto files = add_files(engine, plan);
        std::size_t done = 0;
        while (done < plan.pieces.size()) {
            const std::size_t next = std::min(plan.pieces.size(), done + 1 + random() % 80);
            REQUIRE_SAYING(engine.submit(placed(plan, memory, done, next, files), consumer) == TL_OK,
                           engine.error.message);
            done = next;
        }
        REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        REQUIRE_SAYING(tl_engine_stream_wait(engine.get(), consumer, &engine.error) == TL_OK,
                       engine.error.message);
        device.copy(consumer, taken.data(), memory.data(), memory.size());
        device.stream_sync(consumer);
        const tl_stats stats = engine.stats();
        REQUIRE(stats.pinned_peak_bytes <= most_pinned(options));
        REQUIRE_EQ(stats.copies, device.calls(device.kind == TL_DEVICE_CUDA ? "cuMemcpyHtoDAsync_v2"
                                                                            : "hipMemcpyHtoDAsync"));
    }
    require_expected(plan, taken);
    REQUIRE(device.registered_peak_bytes() <= most_pinned(options));
    device.stream_free(consumer);
    device.require_clean();
}

}  // namespace

TEST(random_plans_with_late_copies) {
    Folder folder;
    for (const int kind : kDevices) {
        for (const std::uint32_t backend : kBackends) {
            for (std::uint64_t seed = 0; seed < 6; ++seed) {
                const StandIn &device = standin(kind);
                device.set_copy_delay_us(seed % 3 == 2 ? 1000 : 0);
                device.set_copy_jitter_us(seed % 2 ? 800 : 0, seed);
                Random random(seed + 100);
                const Plan plan = random_plan(folder, random, 1 + random() % 150, 1 + random() % 500000);
                if (!refusal(backend, plan.paths[0]).empty()) {
                    continue;
                }
                tl_options options = options_for(kind, {backend});
                options.slot_bytes = options.chunk_bytes << (random() % 3);
                options.pinned_bytes = options.slot_bytes * (2 + random() % 4);
                options.flags = seed % 2 ? TL_OPTION_WARM : 0;
                try {
                    load(device, plan, options, random);
                } catch (const std::exception &error) {
                    throw check::Failure(std::string(backend_name(backend)) + ", seed " +
                                         std::to_string(seed) + ": " + error.what());
                }
            }
        }
    }
}

TEST(joined_pieces_share_a_copy) {
    Folder folder;
    const std::size_t count = 20000;
    const Bytes content = random_bytes(count * 6, 3);
    write_file(folder.file("data"), content);
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        Bytes memory(count * 16, kCanary);
        {
            Engine engine(options_for(kind));
            const std::int32_t file = engine.add(folder.file("data"), content.size());
            std::vector<tl_piece> pieces;
            for (std::size_t i = 0; i < count; ++i) {
                pieces.push_back({i * 6, 6, reinterpret_cast<std::uintptr_t>(memory.data()) + i * 16, file,
                                  i ? TL_PIECE_JOIN : 0u, 0, 0});
            }
            engine.submit(pieces);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            const tl_stats stats = engine.stats();
            REQUIRE_SAYING(stats.copies <= 4, std::to_string(stats.copies) + " copies for 320 KB");
        }
        for (std::size_t i = 0; i < count; ++i) {
            REQUIRE(std::memcmp(&memory[i * 16], &content[i * 6], 6) == 0);
        }
        device.require_clean();
    }
}

TEST(a_small_load_pins_little) {
    Folder folder;
    const Bytes content = random_bytes(4096, 3);
    write_file(folder.file("data"), content);
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        Bytes memory(content.size());
        tl_options options = options_for(kind);
        options.slot_bytes = 8u << 20;
        options.pinned_bytes = 64u << 20;
        {
            Engine engine(options);
            REQUIRE_EQ(device.registered_bytes(), 0u);
            REQUIRE_EQ(device.live_streams(), 0u);
            const std::int32_t file = engine.add(folder.file("data"), content.size());
            engine.submit(
                {{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        }
        REQUIRE_SAYING(device.registered_peak_bytes() <= options.slot_bytes + 4096,
                       std::to_string(device.registered_peak_bytes()) + " pinned for 4096 bytes");
        REQUIRE(memory == content);
        device.require_clean();
    }
}

TEST(the_callers_current_device_stays) {
    Folder folder;
    const Bytes content = random_bytes(400000, 3);
    write_file(folder.file("data"), content);
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        void *hip = dlopen("libamdhip64.so", RTLD_NOW | RTLD_NOLOAD);
        auto context = reinterpret_cast<int (*)(std::uintptr_t *)>(dlsym(cuda, "cuCtxGetCurrent"));
        auto current = reinterpret_cast<int (*)(int *)>(dlsym(hip, "hipGetDevice"));
        const auto now = [&] {
            std::uintptr_t c = 0;
            int d = 0;
            kind == TL_DEVICE_CUDA ? context(&c) : current(&d);
            return kind == TL_DEVICE_CUDA ? c : static_cast<std::uintptr_t>(d);
        };
        const std::uintptr_t before = now();
        Bytes memory(content.size());
        tl_options options = options_for(kind);
        options.device_index = 1;
        {
            Engine engine(options);
            REQUIRE_EQ(now(), before);
            const std::int32_t file = engine.add(folder.file("data"), content.size());
            engine.submit(
                {{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
            REQUIRE_EQ(now(), before);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            REQUIRE_EQ(tl_engine_stream_wait(engine.get(), 0, &engine.error), TL_OK);
            REQUIRE_EQ(now(), before);
        }
        REQUIRE_EQ(now(), before);
        REQUIRE(memory == content);
        device.require_clean();
    }
}

TEST(a_device_that_is_not_there) {
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        tl_error error = no_error();
        std::int32_t count = 0;
        REQUIRE_EQ(tl_driver_probe(kind, &count, &error), TL_OK);
        REQUIRE_EQ(count, 2);
        tl_options options = options_for(kind);
        for (const std::int32_t ordinal : {2, -1}) {
            options.device_index = ordinal;
            tl_engine *engine = nullptr;
            const tl_status status = tl_engine_create(&options, &engine, &error);
            REQUIRE_SAYING(status == TL_ERR_DRIVER || status == TL_ERR_ARGUMENT, std::to_string(status));
            REQUIRE(engine == nullptr);
            REQUIRE(error.message[0] != 0);
        }
        device.require_clean();
    }
}

TEST(ring_options_are_checked) {
    standin(TL_DEVICE_CUDA);
    const auto refused = [](auto change) {
        tl_options options = options_for(TL_DEVICE_CUDA);
        change(options);
        tl_engine *engine = nullptr;
        tl_error error = no_error();
        return tl_engine_create(&options, &engine, &error) == TL_ERR_ARGUMENT && engine == nullptr;
    };
    REQUIRE(refused([](tl_options &o) { o.slot_bytes = 0; }));
    REQUIRE(refused([](tl_options &o) { o.slot_bytes = o.chunk_bytes + 4096; }));
}

TEST(a_warm_engine_makes_its_ring_before_the_first_piece) {
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        const int threads_before = count_threads();
        tl_options options = options_for(kind);
        options.slot_bytes = 8u << 20;
        options.pinned_bytes = 32u << 20;
        options.flags = TL_OPTION_WARM;
        {
            Engine engine(options);
            const auto begin = std::chrono::steady_clock::now();
            while (device.registered_bytes() < options.pinned_bytes) {
                REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
                std::this_thread::yield();
            }
        }
        device.require_clean();
        for (int i = 0; i < 20; ++i) {
            Engine ended_at_once(options);
        }
        device.require_clean();
        REQUIRE(threads_come_back_to(threads_before));
    }
}

TEST(cancel_and_destroy_at_random_moments) {
    Folder folder;
    Random random(16);
    const Plan plan = random_plan(folder, random, 300, 400000);
    for (const int kind : kDevices) {
        for (const std::uint32_t backend : kBackends) {
            if (!refusal(backend, plan.paths[0]).empty()) {
                continue;
            }
            const StandIn &device = standin(kind);
            const int threads_before = count_threads();
            const int files_before = count_open_files();
            for (std::uint64_t seed = 0; seed < 6; ++seed) {
                device.set_copy_delay_us(seed % 2 ? 500 : 0);
                const std::uint64_t consumer = device.stream();
                Bytes memory(plan.memory_bytes, kCanary);
                tl_options options = options_for(kind, {backend});
                options.flags = seed % 2 ? TL_OPTION_WARM : 0;
                Engine engine(options);
                const auto files = add_files(engine, plan);
                engine.submit(placed(plan, memory, 0, plan.pieces.size(), files), consumer);
                const std::uint64_t until = random() % (plan.pieces.size() + 1);
                const std::uint64_t *landed = tl_engine_landed(engine.get());
                while (seed % 3 != 0 && __atomic_load_n(landed, __ATOMIC_ACQUIRE) < until) {
                    std::this_thread::yield();
                }
                if (seed % 2) {
                    tl_engine_stream_wait(engine.get(), consumer, &engine.error);
                }
                REQUIRE_EQ(engine.destroy(), TL_OK);
                const Bytes after = memory;
                device.stream_sync(consumer);
                device.stream_free(consumer);
                device.require_clean();
                REQUIRE(after == memory);
                REQUIRE_EQ(count_open_files(), files_before);
                REQUIRE(threads_come_back_to(threads_before));
            }
        }
    }
}

TEST(two_engines_and_two_kinds_at_once) {
    Folder folder;
    const Bytes content = random_bytes(1500000, 3);
    write_file(folder.file("data"), content);
    const StandIn &cuda = standin(TL_DEVICE_CUDA);
    const StandIn &hip = standin(TL_DEVICE_HIP);
    cuda.set_copy_jitter_us(500, 1);
    hip.set_copy_jitter_us(500, 2);
    std::vector<std::string> problems(4);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < problems.size(); ++i) {
        threads.emplace_back([&, i] {
            try {
                Bytes memory(content.size());
                Engine engine(options_for(kDevices[i % 2]));
                const std::int32_t file = engine.add(folder.file("data"), content.size());
                engine.submit(
                    {{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
                REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
                engine.destroy();
                REQUIRE(memory == content);
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
    cuda.require_clean();
    hip.require_clean();
}

TEST_MAIN
