// Digests and traces of an engine's work: right for every way of reading, whatever else goes on.
#include "support.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace {

using Digests = std::vector<std::uint8_t>;
constexpr std::size_t kDigestBytes = 16;

constexpr int kKinds[] = {TL_DEVICE_CPU, TL_DEVICE_CUDA, TL_DEVICE_HIP};

// Every piece to be digested but each third, and rows.
void mark(Plan *plan) {
    for (std::size_t i = 0; i < plan->pieces.size(); ++i) {
        if (i % 3 != 1 && plan->pieces[i].rows == 0) {
            plan->pieces[i].flags |= TL_PIECE_DIGEST;
        }
    }
}

Digests digests_of(Engine &engine, std::uint64_t first, std::uint64_t count) {
    Digests made(count * kDigestBytes, 0xEE);
    const tl_status status = tl_engine_digests(engine.get(), first, count, made.data(), &engine.error);
    REQUIRE_SAYING(status == TL_OK, engine.error.message);
    return made;
}

// The pieces [first, first + count) have the digests of their files' bytes, or zeros.
void require_digests(const Plan &plan, const Digests &made, std::size_t first) {
    for (std::size_t i = 0; i < made.size() / kDigestBytes; ++i) {
        const tl_piece &piece = plan.pieces[first + i];
        std::uint8_t expected[kDigestBytes] = {};
        if ((piece.flags & TL_PIECE_DIGEST) && piece.nbytes > 0) {
            const Bytes &content = plan.contents[static_cast<std::size_t>(piece.file)];
            tl_digest(content.data() + piece.file_offset, piece.nbytes, expected);
        }
        REQUIRE_SAYING(std::memcmp(&made[i * kDigestBytes], expected, kDigestBytes) == 0,
                       "piece " + std::to_string(first + i) + " of " + std::to_string(piece.nbytes));
    }
}

tl_options small_slots(int kind, std::uint32_t backend, std::uint64_t seed) {
    tl_options options = options_for(kind, {backend});
    options.chunk_bytes = 4096u << (seed % 4);
    options.slot_bytes = 32u << 10;
    options.pinned_bytes = 2 * options.slot_bytes;
    options.flags = TL_OPTION_TRACE;
    return options;
}

}  // namespace

TEST(every_way_of_reading_digests_the_same) {
    Folder folder;
    for (const int kind : kKinds) {
        for (const std::uint32_t backend : kBackends) {
            for (std::uint64_t seed = 0; seed < 4; ++seed) {
                Random random(seed + 40);
                tl_options options = small_slots(kind, backend, seed);
                // No piece is larger than a slot.
                Plan plan = random_plan(folder, random, 1 + random() % 150, options.slot_bytes - 2);
                mark(&plan);
                if (!refusal(backend, plan.paths[0]).empty()) {
                    continue;
                }
                const StandIn *device = kind == TL_DEVICE_CPU ? nullptr : &standin(kind);
                if (device != nullptr) {
                    device->set_copy_jitter_us(500, seed);
                }
                Bytes memory(plan.memory_bytes, kCanary);
                Engine engine(options);
                const auto files = add_files(engine, plan);
                std::size_t done = 0;
                while (done < plan.pieces.size()) {
                    const std::size_t next = std::min(plan.pieces.size(), done + 1 + random() % 40);
                    REQUIRE_SAYING(engine.submit(placed(plan, memory, done, next, files)) == TL_OK,
                                   engine.error.message);
                    done = next;
                    // What has landed by now can be asked for while the rest is read.
                    const std::uint64_t landed =
                        __atomic_load_n(tl_engine_landed(engine.get()), __ATOMIC_ACQUIRE);
                    require_digests(plan, digests_of(engine, 0, landed), 0);
                }
                REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
                const std::uint64_t first = plan.pieces.size() / 2;
                require_digests(plan, digests_of(engine, first, plan.pieces.size() - first), first);
                engine.destroy();
                if (device != nullptr) {
                    device->require_clean();
                }
            }
        }
    }
}

TEST(pieces_that_are_not_digested_come_with_those_that_are) {
    Folder folder;
    const Bytes content = random_bytes(30000, 3);
    write_file(folder.file("data"), content);
    for (const std::uint32_t backend : kBackends) {
        if (!refusal(backend, folder.file("data")).empty()) continue;
        for (const std::uint32_t flags : {1u, 2u, 3u, 4u, 5u, 6u}) {  // bit i: whether piece i is digested
            Engine engine(options_for(TL_DEVICE_CPU, {backend}));
            const std::int32_t file = engine.add(folder.file("data"), content.size());
            Bytes memory(content.size(), kCanary);
            std::vector<tl_piece> pieces;
            for (std::uint64_t i = 0; i < 3; ++i) {
                pieces.push_back({i * 10000, 10000,
                                  reinterpret_cast<std::uintptr_t>(memory.data()) + i * 10000, file,
                                  (flags >> i) & 1 ? TL_PIECE_DIGEST : 0u, 0, 0});
            }
            REQUIRE_EQ(engine.submit(pieces), TL_OK);
            REQUIRE_EQ(engine.wait(), TL_OK);
            engine.destroy();
            REQUIRE_SAYING(memory == content, backend_name(backend));
        }
    }
}

TEST(a_load_without_digests_has_zeros) {
    Folder folder;
    Random random(3);
    const Plan plan = random_plan(folder, random, 20, 10000);
    Bytes memory(plan.memory_bytes, kCanary);
    Engine engine(options_for(TL_DEVICE_CPU));
    engine.submit(placed(plan, memory, 0, plan.pieces.size(), add_files(engine, plan)));
    REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
    require_digests(plan, digests_of(engine, 0, plan.pieces.size()), 0);
}

TEST(cancelled_in_the_middle) {
    const StandIn &device = standin(TL_DEVICE_CUDA);
    Folder folder;
    Random random(8);
    tl_options options = small_slots(TL_DEVICE_CUDA, TL_BACKEND_AUTO, 1);
    Plan plan = random_plan(folder, random, 120, options.slot_bytes - 2);
    mark(&plan);
    Bytes memory(plan.memory_bytes, kCanary);
    const std::uint64_t consumer = device.stream();
    // The ring has two slots, and their copies wait for this.
    const std::uint64_t gate = device.hold(consumer);
    {
        Engine engine(options);
        // Before the engine is destroyed, which waits for its copies, also where a check below fails.
        const auto let_go = [&](const std::uint64_t *held) { device.release(*held); };
        const std::unique_ptr<const std::uint64_t, decltype(let_go)> guard(&gate, let_go);
        const auto files = add_files(engine, plan);
        engine.submit(placed(plan, memory, 0, plan.pieces.size(), files), consumer);
        tl_error error = no_error();
        REQUIRE_EQ(tl_engine_wait(engine.get(), engine.ticket, 20, &error), TL_PENDING);
        REQUIRE_EQ(tl_engine_cancel(engine.get(), &error), TL_OK);
        const std::uint64_t landed = __atomic_load_n(tl_engine_landed(engine.get()), __ATOMIC_ACQUIRE);
        REQUIRE(landed < plan.pieces.size());
        require_digests(plan, digests_of(engine, 0, landed), 0);
        Digests more(plan.pieces.size() * kDigestBytes);
        const tl_status status = tl_engine_digests(engine.get(), 0, plan.pieces.size(), more.data(), &error);
        REQUIRE_EQ(status, TL_ERR_ARGUMENT);
    }
    device.stream_sync(consumer);
    device.stream_free(consumer);
    device.require_clean();
}

TEST(what_cannot_be_digested_is_refused) {
    Folder folder;
    const std::string path = folder.file("data");
    write_file(path, random_bytes(100000, 2));
    Engine engine(small_slots(TL_DEVICE_CPU, TL_BACKEND_AUTO, 0));
    const std::int32_t file = engine.add(path, 100000);
    Bytes memory(100000);
    const auto to = reinterpret_cast<std::uintptr_t>(memory.data());
    REQUIRE_EQ(engine.submit({{0, (32u << 10) + 1, to, file, TL_PIECE_DIGEST, 0, 0}}), TL_ERR_ARGUMENT);
    REQUIRE(std::string(engine.error.message).find("slot") != std::string::npos);
    std::uint8_t digest[kDigestBytes];
    REQUIRE_EQ(tl_engine_digests(engine.get(), 0, 1, digest, &engine.error), TL_ERR_ARGUMENT);
    REQUIRE_EQ(tl_engine_digests(engine.get(), UINT64_MAX, 2, digest, &engine.error), TL_ERR_ARGUMENT);
    REQUIRE_EQ(tl_engine_digests(engine.get(), 0, 0, nullptr, &engine.error), TL_OK);
}

TEST(a_trace_tells_all_reads_and_copies) {
    Folder folder;
    const std::string path = folder.file("data");
    const Bytes content = random_bytes(1000000, 2);
    write_file(path, content);
    for (const int kind : kKinds) {
        for (const std::uint32_t backend : kBackends) {
            if (!refusal(backend, path).empty()) {
                continue;
            }
            const StandIn *device = kind == TL_DEVICE_CPU ? nullptr : &standin(kind);
            Bytes memory(content.size());
            Engine engine(small_slots(kind, backend, 2));
            const std::int32_t file = engine.add(path, content.size());
            engine.submit(
                {{0, content.size(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            std::uint64_t count = 0;
            REQUIRE_EQ(tl_engine_trace(engine.get(), 0, nullptr, 0, &count, &engine.error), TL_OK);
            std::vector<tl_trace_event> events(count + 1);
            std::uint64_t again = 0;
            REQUIRE_EQ(tl_engine_trace(engine.get(), 1, events.data(), count - 1, &again, &engine.error),
                       TL_OK);
            REQUIRE(again >= count);
            REQUIRE_EQ(tl_engine_trace(engine.get(), 0, events.data(), 1, &again, &engine.error), TL_OK);
            REQUIRE_EQ(tl_engine_trace(engine.get(), 0, events.data(), count, &again, &engine.error), TL_OK);
            events.resize(count);
            std::uint64_t bytes = 0;
            for (const tl_trace_event &event : events) {
                REQUIRE(event.begin_ns <= event.end_ns && event.thread != 0);
                bytes += event.stage == TL_STAGE_READ ? event.nbytes : 0;
                REQUIRE(event.stage != TL_STAGE_READ || event.file == file);
            }
            REQUIRE_EQ(bytes, content.size());
            engine.destroy();
            if (device != nullptr) {
                device->require_clean();
            }
        }
    }
}

TEST_MAIN
