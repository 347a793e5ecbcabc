// Right bytes on a CPU: every back end, every shape of a plan.
#include "support.hpp"

#include <map>
#include <thread>

namespace {

void load_in_parts(const Plan &plan, Engine &engine, Random &random) {
    Bytes memory(plan.memory_bytes, kCanary);
    const auto files = add_files(engine, plan);
    std::size_t done = 0;
    while (done < plan.pieces.size()) {
        const std::size_t next = std::min(plan.pieces.size(), done + 1 + random() % 50);
        REQUIRE_SAYING(engine.submit(placed(plan, memory, done, next, files)) == TL_OK, engine.error.message);
        REQUIRE_EQ(engine.ticket, next);
        done = next;
    }
    REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
    REQUIRE_EQ(__atomic_load_n(tl_engine_landed(engine.get()), __ATOMIC_ACQUIRE), plan.pieces.size());
    // Across calls nothing is joined, so what is padding inside one call may matter in another: the test that follows
    // from here is the weaker one, that only padding differs.
    require_expected(plan, memory);
}

std::uint64_t wanted_bytes(const Plan &plan) {
    std::uint64_t sum = 0;
    for (const tl_piece &piece : plan.pieces) {
        sum += piece.nbytes;
    }
    return sum;
}

template <class Run>
void for_each_backend(const Folder &folder, Run run) {
    const std::string probe = folder.file("probe");
    write_file(probe, random_bytes(20000, 1));
    for (const std::uint32_t backend : kBackends) {
        const std::string reason = refusal(backend, probe);
        if (!reason.empty()) {
            std::printf("  skipped %s: %s\n", backend_name(backend), reason.c_str());
            continue;
        }
        try {
            run(backend);
        } catch (const std::exception &error) {
            throw check::Failure(std::string(backend_name(backend)) + ": " + error.what());
        }
    }
}

}  // namespace

TEST(random_plans_give_the_files_bytes) {
    Folder folder;
    for_each_backend(folder, [&](std::uint32_t backend) {
        for (std::uint64_t seed = 0; seed < 12; ++seed) {
            Random random(seed);
            const Plan plan = random_plan(folder, random, 1 + random() % 200, 1 + random() % 400000);
            if (seed % 3 == 1) {
                for (const std::string &path : plan.paths) {
                    drop_cache(path);
                }
            }
            tl_options options = options_for(TL_DEVICE_CPU, {backend});
            options.threads = static_cast<std::uint32_t>(1 + random() % 4);
            options.io_depth = static_cast<std::uint32_t>(1 + random() % 16);
            options.chunk_bytes = 4096u << (random() % 6);
            Engine engine(options);
            load_in_parts(plan, engine, random);
            const tl_stats stats = engine.stats();
            std::uint64_t bytes = 0;
            for (const std::uint64_t part : stats.bytes_by_path) {
                bytes += part;
            }
            REQUIRE_EQ(bytes, wanted_bytes(plan));
            REQUIRE_EQ(stats.copies, 0u);
            REQUIRE_EQ(stats.pinned_peak_bytes, 0u);
            REQUIRE_EQ(stats.open_files, 0u);
        }
    });
}

TEST(a_named_reader_uses_its_own_path_only) {
    Folder folder;
    const std::string path = folder.file("data");
    const Bytes content = random_bytes(3000001, 5);
    write_file(path, content);
    for_each_backend(folder, [&](std::uint32_t backend) {
        for (const bool cold : {false, true}) {
            if (cold) {
                drop_cache(path);
            }
            Engine engine(options_for(TL_DEVICE_CPU, {backend}));
            Bytes memory(content.size());
            const std::int32_t file = engine.add(path, content.size());
            engine.submit(
                {{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            REQUIRE(memory == content);
            const tl_stats stats = engine.stats();
            const std::uint64_t all = content.size();
            const std::uint64_t by_pread =
                stats.bytes_by_path[TL_PATH_PREAD_BUFFERED] + stats.bytes_by_path[TL_PATH_PREAD_DIRECT];
            if (backend == TL_BACKEND_PREAD) {
                REQUIRE_EQ(by_pread, all);
            }
            static const std::map<std::uint32_t, int> paths = {
                {TL_BACKEND_URING, TL_PATH_URING_DIRECT},
                {TL_BACKEND_MMAP, TL_PATH_MMAP},
                {TL_BACKEND_URING_BUFFERED, TL_PATH_URING_BUFFERED},
                {TL_BACKEND_AIO, TL_PATH_AIO_DIRECT},
                {TL_BACKEND_AIO_BUFFERED, TL_PATH_AIO_BUFFERED},
                {TL_BACKEND_BUFFERED, TL_PATH_PREAD_BUFFERED}};
            if (const auto path_of = paths.find(backend); path_of != paths.end()) {
                REQUIRE_EQ(stats.bytes_by_path[path_of->second], all);
            }
            tl_file_info info{};
            info.struct_size = sizeof info;
            tl_error error = no_error();
            REQUIRE_EQ(tl_engine_file_info(engine.get(), file, &info, &error), TL_OK);
            REQUIRE_EQ(info.backend, static_cast<std::int32_t>(backend));
            REQUIRE_EQ(std::string(info.fallback), "");
        }
    });
}

TEST(a_cold_file_stays_cold) {
    Folder folder;
    const std::string path = folder.file("data");
    const Bytes content = random_bytes(4u << 20, 5);
    write_file(path, content);
    drop_cache(path);
    if (cached_pages(path) != 0) {
        std::printf("  skipped: the file system of this folder keeps its cache\n");
        return;
    }
    Engine engine(options_for(TL_DEVICE_CPU));
    Bytes memory(1u << 20);
    const std::int32_t file = engine.add(path, content.size());
    engine.submit(
        {{2u << 20, memory.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
    REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
    REQUIRE(std::memcmp(memory.data(), &content[2u << 20], memory.size()) == 0);
    // One page is read to learn whether the kernel tells the truth about the cache.
    REQUIRE_SAYING(cached_pages(path) <= 1, std::to_string(cached_pages(path)) + " pages cached");
}

TEST(a_hundred_thousand_tiny_pieces) {
    Folder folder;
    const std::string path = folder.file("data");
    const std::size_t count = 100000;
    const Bytes content = random_bytes(count * 7, 9);
    write_file(path, content);
    for_each_backend(folder, [&](std::uint32_t backend) {
        for (const bool join : {true, false}) {
            Engine engine(options_for(TL_DEVICE_CPU, {backend}));
            const std::int32_t file = engine.add(path, content.size());
            Bytes memory(count * 16, kCanary);
            std::vector<tl_piece> pieces;
            for (std::size_t i = 0; i < count; ++i) {
                const std::uint64_t to = reinterpret_cast<std::uintptr_t>(memory.data()) + i * 16;
                pieces.push_back({i * 7, 7, to, file, join && i ? TL_PIECE_JOIN : 0u, 0, 0});
            }
            engine.submit(pieces);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            for (std::size_t i = 0; i < count; ++i) {
                REQUIRE(std::memcmp(&memory[i * 16], &content[i * 7], 7) == 0);
                REQUIRE(join || memory[i * 16 + 7] == kCanary);
            }
            const tl_stats stats = engine.stats();
            std::uint64_t reads = 0;
            for (const std::uint64_t part : stats.reads_by_path) {
                reads += part;
            }
            REQUIRE_SAYING(reads <= count / 20, std::to_string(reads) + " reads for 100,000 neighbours");
        }
    });
}

TEST(an_ordered_list_takes_the_first_that_works) {
    Folder folder;
    const std::string path = folder.file("data");
    const Bytes content = random_bytes(100000, 3);
    write_file(path, content);
    Engine engine(options_for(TL_DEVICE_CPU, {TL_BACKEND_MMAP, TL_BACKEND_PREAD}));
    Bytes memory(content.size());
    const std::int32_t file = engine.add(path, content.size());
    engine.submit({{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
    REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
    REQUIRE(memory == content);
    REQUIRE_EQ(engine.stats().bytes_by_path[TL_PATH_MMAP], content.size());
}

TEST(several_engines_at_once) {
    Folder folder;
    Random random(4);
    const Plan plan = random_plan(folder, random, 150, 300000);
    std::vector<std::string> problems(4);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < problems.size(); ++i) {
        const std::uint32_t backend = kBackends[i];
        if (!refusal(backend, plan.paths[0]).empty()) {
            continue;
        }
        threads.emplace_back([&, i, backend] {
            try {
                for (std::uint64_t round = 0; round < 4; ++round) {
                    Random mine(round * 10 + i);
                    Engine engine(options_for(TL_DEVICE_CPU, {backend}));
                    load_in_parts(plan, engine, mine);
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
}

TEST(an_engine_is_used_from_several_threads) {
    Folder folder;
    const Bytes content = random_bytes(2000000, 8);
    const std::string path = folder.file("data");
    write_file(path, content);
    Engine engine(options_for(TL_DEVICE_CPU));
    const std::int32_t file = engine.add(path, content.size());
    Bytes memory(content.size());
    const std::size_t each = content.size() / 4;
    std::vector<std::string> problems(4);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] {
            tl_error error = no_error();
            for (std::size_t at = i * each; at < (i + 1) * each; at += 50000) {
                const tl_piece piece{at,
                                     std::min<std::uint64_t>(50000, (i + 1) * each - at),
                                     reinterpret_cast<std::uintptr_t>(memory.data()) + at,
                                     file,
                                     0,
                                     0,
                                     0};
                std::uint64_t ticket = 0;
                if (tl_engine_submit(engine.get(), &piece, 1, 0, &ticket, &error) != TL_OK ||
                    tl_engine_wait(engine.get(), ticket, 60000, &error) != TL_OK ||
                    std::memcmp(&memory[at], &content[at], piece.nbytes) != 0) {
                    problems[i] = "wrong at " + std::to_string(at) + ": " + error.message;
                    return;
                }
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (const std::string &problem : problems) {
        REQUIRE_EQ(problem, "");
    }
}

TEST_MAIN
