// Ends at any moment: nothing is left behind, nothing is written afterwards, nobody waits for ever.
#include "support.hpp"

#include <sys/wait.h>
#include <unistd.h>
#include <thread>

TEST(cancel_and_destroy_at_random_moments) {
    Folder folder;
    Random random(6);
    const Plan plan = random_plan(folder, random, 400, 400000);
    for (const std::uint32_t backend : kBackends) {
        if (!refusal(backend, plan.paths[0]).empty()) {
            continue;
        }
        { Engine warm(options_for(TL_DEVICE_CPU, {backend})); }
        const int files_before = count_open_files();
        const int threads_before = count_threads();
        for (std::uint64_t seed = 0; seed < 15; ++seed) {
            Bytes memory(plan.memory_bytes, kCanary);
            Engine engine(options_for(TL_DEVICE_CPU, {backend}));
            const auto files = add_files(engine, plan);
            REQUIRE_EQ(engine.submit(placed(plan, memory, 0, plan.pieces.size(), files)), TL_OK);
            const std::uint64_t until = random() % (plan.pieces.size() + 1);
            const std::uint64_t *landed = tl_engine_landed(engine.get());
            tl_status seen = TL_OK;
            std::thread waiter([&] { seen = engine.wait(); });
            while (seed % 3 != 0 && __atomic_load_n(landed, __ATOMIC_ACQUIRE) < until) {
                std::this_thread::yield();
            }
            tl_error error = no_error();
            REQUIRE_EQ(tl_engine_cancel(engine.get(), &error), TL_OK);
            waiter.join();
            REQUIRE(seen == TL_OK || seen == TL_ERR_CANCELLED);
            REQUIRE_EQ(engine.destroy(), TL_OK);
            const Bytes after = memory;
            REQUIRE(threads_come_back_to(threads_before));
            REQUIRE_EQ(count_open_files(), files_before);
            REQUIRE(after == memory);
        }
    }
}

TEST(destroy_without_waiting) {
    Folder folder;
    Random random(7);
    const Plan plan = random_plan(folder, random, 300, 400000);
    const int files_before = count_open_files();
    for (int i = 0; i < 20; ++i) {
        Bytes memory(plan.memory_bytes, kCanary);
        Engine engine(options_for(TL_DEVICE_CPU));
        engine.submit(placed(plan, memory, 0, plan.pieces.size(), add_files(engine, plan)));
        REQUIRE_EQ(engine.destroy(), TL_OK);
    }
    REQUIRE_EQ(count_open_files(), files_before);
}

TEST(files_are_closed_when_nothing_is_left_of_them) {
    Folder folder;
    const Bytes content = random_bytes(100000, 1);
    write_file(folder.file("data"), content);
    const int before = count_open_files();
    Engine engine(options_for(TL_DEVICE_CPU, {TL_BACKEND_PREAD}));
    const std::int32_t file = engine.add(folder.file("data"), content.size());
    REQUIRE_EQ(count_open_files(), before);
    Bytes memory(content.size());
    for (int round = 0; round < 3; ++round) {
        engine.submit({{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
        REQUIRE_EQ(engine.wait(), TL_OK);
        REQUIRE_EQ(engine.stats().open_files, 0u);
        REQUIRE(memory == content);
    }
}

TEST(a_forked_child_gets_an_error) {
    Folder folder;
    const Bytes content = random_bytes(100000, 1);
    write_file(folder.file("data"), content);
    Engine engine(options_for(TL_DEVICE_CPU));
    const std::int32_t file = engine.add(folder.file("data"), content.size());
    Bytes memory(content.size());
    const tl_piece piece{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0};
    engine.submit({piece});
    REQUIRE_EQ(engine.wait(), TL_OK);
    const pid_t child = fork();
    if (child == 0) {
        // Only plain calls here: a forked child of a process with threads must not allocate.
        tl_error error = no_error();
        std::uint64_t ticket = 0;
        std::int32_t other = 0;
        int wrong = 0;
        wrong |= tl_engine_submit(engine.get(), &piece, 1, 0, &ticket, &error) != TL_ERR_FORKED ? 1 : 0;
        wrong |= tl_engine_wait(engine.get(), 1, 1000, &error) != TL_ERR_FORKED ? 2 : 0;
        wrong |= tl_engine_add_file(engine.get(), "x", 0, 0, 1, &other, &error) != TL_ERR_FORKED ? 4 : 0;
        wrong |= tl_engine_cancel(engine.get(), &error) != TL_ERR_FORKED ? 8 : 0;
        wrong |= tl_engine_stream_wait(engine.get(), 0, &error) != TL_ERR_FORKED ? 16 : 0;
        tl_engine_destroy(engine.get(), &error);  // must return
        _exit(wrong);
    }
    int status = 0;
    REQUIRE_EQ(waitpid(child, &status, 0), child);
    REQUIRE(WIFEXITED(status));
    REQUIRE_EQ(WEXITSTATUS(status), 0);
    engine.submit({piece});
    REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
}

TEST(large_arenas_are_aligned_and_given_back) {
    tl_error error = no_error();
    const std::uint64_t before = tl_arena_live();
    tl_arena *arena = nullptr;
    std::uint64_t address = 0;
    REQUIRE_EQ(tl_arena_host(5u << 20, &arena, &address, &error), TL_OK);
    REQUIRE_EQ(address % (2u << 20), 0u);
    reinterpret_cast<char *>(address)[(5u << 20) - 1] = 1;
    std::thread elsewhere([&] { tl_arena_release(arena); });
    elsewhere.join();
    REQUIRE_EQ(tl_arena_live(), before);
}

// dlpack.h: the fields that an arena looks at.
struct ManagedTensor {
    void *data;
    std::int32_t device_type, device_id, ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
    void *context;
    void (*deleter)(ManagedTensor *);
};

TEST(adopted_memory_is_given_back_once) {
    static int deleted = 0;
    alignas(64) char memory[64];
    std::int64_t shape = 64;
    ManagedTensor tensor{memory, 1,      0,       1,  1,       8,
                         1,      &shape, nullptr, 16, nullptr, [](ManagedTensor *) { ++deleted; }};
    tl_error error = no_error();
    tl_arena *arena = nullptr;
    std::uint64_t address = 0;
    REQUIRE_EQ(tl_arena_adopt(&tensor, TL_DEVICE_CPU, 0, 0, &arena, &address, &error), TL_OK);
    REQUIRE_EQ(tl_arena_record_stream(address, 1, &error), TL_ERR_ARGUMENT);  // it is on no device
    REQUIRE_EQ(address, reinterpret_cast<std::uintptr_t>(memory) + 16);
    REQUIRE_EQ(deleted, 0);
    tl_arena_release(arena);
    REQUIRE_EQ(deleted, 1);
}

TEST_MAIN
