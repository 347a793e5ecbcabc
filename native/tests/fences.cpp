// One test a fence. Each fails when the library is built without that fence (see src/mutants.hpp), which the Python
// tests show: a fence that no test would miss is a fence nobody can rely on.
#include "support.hpp"

namespace {

constexpr std::size_t kBytes = 2u << 20;  // eight slots
constexpr std::uint64_t kLate = 5000;     // microseconds; longer than refilling a slot takes

struct Fixture {
    Folder folder;
    Bytes content = random_bytes(kBytes, 1);
    Fixture() {
        write_file(path(), content);
    }
    std::string path() const {
        return folder.file("data");
    }
    tl_piece whole(const Bytes &memory, std::int32_t file) const {
        return {0, kBytes, reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0};
    }
};

}  // namespace

TEST(arrival_the_consumer_sees_what_it_waited_for) {
    Fixture f;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.set_copy_delay_us(kLate);
        const std::uint64_t consumer = device.stream();
        Bytes memory(kBytes, kCanary);
        Bytes taken(kBytes);
        tl_options options = options_for(kind);
        options.pinned_bytes =
            16 * options.slot_bytes;  // all copies fit in the ring: none has to run for landing
        {
            Engine engine(options);
            engine.submit({f.whole(memory, engine.add(f.path(), kBytes))}, consumer);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            REQUIRE_EQ(tl_engine_stream_wait(engine.get(), consumer, &engine.error), TL_OK);
            device.copy(consumer, taken.data(), memory.data(), kBytes);
            device.stream_sync(consumer);
        }
        REQUIRE(taken == f.content);
        device.stream_free(consumer);
        device.require_clean();
    }
}

TEST(consumer_work_queued_before_a_submission_comes_first) {
    Fixture f;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        const std::uint64_t consumer = device.stream();
        Bytes memory(kBytes, 7);
        const Bytes before = memory;
        Bytes taken(kBytes);
        tl_options options = options_for(kind);
        options.pinned_bytes = 16 * options.slot_bytes;
        {
            Engine engine(options);
            // The consumer still reads what was in this memory, as it does with a block that was just given back.
            const std::uint64_t gate = device.hold(consumer);
            device.copy(consumer, taken.data(), memory.data(), kBytes);
            engine.submit({f.whole(memory, engine.add(f.path(), kBytes))}, consumer);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            device.settle();
            device.release(gate);
            REQUIRE_EQ(tl_engine_stream_wait(engine.get(), consumer, &engine.error), TL_OK);
            device.stream_sync(consumer);
        }
        REQUIRE(taken == before);
        REQUIRE(memory == f.content);
        device.stream_free(consumer);
        device.require_clean();
    }
}

TEST(straight_reads_come_after_the_consumers_work) {
    // As the test before, but what is read past the stream can only come when the work is done.
    Fixture f;
    const StandIn &device = standin(TL_DEVICE_CUDA);
    const CufileStandIn &cufile = cufile_standin();
    for (int round = 0; round < 2; ++round) {
        const std::uint64_t consumer = device.stream();
        Bytes memory(kBytes, 7);
        const Bytes before = memory;
        Bytes taken(kBytes);
        {
            Engine engine(options_for(TL_DEVICE_CUDA, {TL_BACKEND_CUFILE}));
            const std::int32_t file = engine.add(f.path(), kBytes);
            Bytes other(kBytes);
            if (round > 0) {  // a fence that was passed before says nothing about the next
                REQUIRE_EQ(engine.submit({f.whole(other, file)}, consumer), TL_OK);
                REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
            }
            const std::uint64_t gate = device.hold(consumer);
            device.copy(consumer, taken.data(), memory.data(), kBytes);
            REQUIRE_EQ(engine.submit({f.whole(memory, file)}, consumer), TL_OK);
            tl_engine_wait(engine.get(), engine.ticket, 100, &engine.error);
            device.release(gate);
            device.stream_sync(consumer);
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        }
        REQUIRE(taken == before);
        REQUIRE(memory == f.content);
        device.stream_free(consumer);
        device.require_clean();
        cufile.require_clean();
    }
}

TEST(slot_is_not_filled_before_its_copy) {
    Fixture f;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.set_copy_delay_us(kLate);
        Bytes memory(kBytes, kCanary);
        tl_options options = options_for(kind);
        options.pinned_bytes = 2 * options.slot_bytes;
        {
            Engine engine(options);
            engine.submit({f.whole(memory, engine.add(f.path(), kBytes))});
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        }
        device.drain();
        REQUIRE(memory == f.content);
        device.require_clean();
    }
}

TEST(drain_nothing_is_written_after_destroy) {
    Fixture f;
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.set_copy_delay_us(kLate);
        Bytes memory(kBytes, kCanary);
        tl_options options = options_for(kind);
        options.pinned_bytes = 16 * options.slot_bytes;
        Engine engine(options);
        engine.submit({f.whole(memory, engine.add(f.path(), kBytes))});
        REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        REQUIRE_EQ(engine.destroy(), TL_OK);
        const Bytes after = memory;
        device.drain();
        REQUIRE_EQ(device.lost_copies(), 0u);
        REQUIRE(after == memory);
        REQUIRE(memory == f.content);
        device.require_clean();
    }
}

TEST(drain_covers_copies_whose_event_failed) {
    // Such a copy is in the stream, but no event tells when it is over.
    Fixture f;
    for (const int kind : kDevices) {
        for (const int turn : {2, 3, 5}) {
            const StandIn &device = standin(kind);
            device.set_copy_delay_us(kLate);
            device.fail(kind == TL_DEVICE_CUDA ? "cuEventRecord" : "hipEventRecord", turn, 999);
            Bytes memory(kBytes, kCanary);
            Engine engine(options_for(kind));
            engine.submit({f.whole(memory, engine.add(f.path(), kBytes))});
            REQUIRE_EQ(engine.wait(), TL_ERR_DRIVER);
            engine.destroy();
            const Bytes after = memory;
            device.drain();
            REQUIRE_EQ(device.lost_copies(), 0u);
            REQUIRE(after == memory);
            device.require_clean();
        }
    }
}

TEST_MAIN
