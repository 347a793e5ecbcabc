// Each call of the driver fails once, at each of its turns: an ordinary error, nothing left behind, no waiting.
#include "support.hpp"

#include <algorithm>

namespace {

constexpr int kInjected = 999;

struct Load {
    tl_status status = TL_OK;
    tl_error error = no_error();
    bool right = false;
    std::string notes;
};

// The life of an engine up to its end, whatever fails on the way.
Load run(const StandIn &device, const std::string &path, const Bytes &content) {
    Load load;
    tl_options options = options_for(device.kind);
    options.pinned_bytes = 2 * options.slot_bytes;
    tl_engine *engine = nullptr;
    const auto note = [&](tl_status status, const tl_error &error) {
        if (load.status == TL_OK && status != TL_OK) {
            load.status = status;
            load.error = error;
        }
        return status == TL_OK;
    };
    tl_error error = no_error();
    if (!note(tl_engine_create(&options, &engine, &error), error)) {
        REQUIRE(engine == nullptr);
        return load;
    }
    const std::uint64_t consumer = device.stream();
    Bytes memory(content.size(), kCanary);
    Bytes taken(content.size());
    std::int32_t file = 0;
    std::uint64_t ticket = 0;
    note(tl_engine_add_file(engine, path.c_str(), 0, 0, content.size(), &file, &error), error);
    const std::size_t half = content.size() / 2;
    for (const std::size_t at : {std::size_t{0}, half}) {
        const tl_piece piece{at,
                             at ? content.size() - half : half,
                             reinterpret_cast<std::uintptr_t>(memory.data()) + at,
                             file,
                             0,
                             0,
                             0};
        note(tl_engine_submit(engine, &piece, 1, consumer, &ticket, &error), error);
        const tl_status status = tl_engine_wait(engine, ticket, 30000, &error);
        REQUIRE(status != TL_PENDING);
        note(status, error);
        note(tl_engine_stream_wait(engine, consumer, &error), error);
    }
    if (load.status == TL_OK) {
        device.copy(consumer, taken.data(), memory.data(), memory.size());
        device.stream_sync(consumer);
    }
    load.right = taken == content;
    tl_stats stats{};
    stats.struct_size = sizeof stats;
    REQUIRE_EQ(tl_engine_stats(engine, &stats, nullptr), TL_OK);
    load.notes = stats.notes;
    note(tl_engine_destroy(engine, &error), error);
    const Bytes after = memory;
    device.drain();
    REQUIRE(after == memory);
    device.stream_free(consumer);
    return load;
}

void fail_each_call(int kind) {
    Folder folder;
    const std::string path = folder.file("data");
    const Bytes content = random_bytes(1500000, 4);
    write_file(path, content);
    std::vector<std::pair<std::string, std::uint64_t>> calls;
    {
        const StandIn &device = standin(kind);
        REQUIRE(run(device, path, content).right);
        for (std::uint32_t i = 0; const char *entry = device.entry(i); ++i) {
            calls.emplace_back(entry, device.calls(entry));
        }
        device.require_clean();
    }
    const int files_before = count_open_files();
    const int threads_before = count_threads();
    int failed = 0;
    for (const auto &[entry, count] : calls) {
        std::vector<std::int64_t> turns;
        for (std::uint64_t i = 1; i <= count; i += 1 + i / 4) {
            turns.push_back(static_cast<std::int64_t>(i));
        }
        if (count > 0) {
            turns.push_back(static_cast<std::int64_t>(count));
            turns.push_back(-1);  // every call
        }
        for (const std::int64_t turn : turns) {
            const std::string what = entry + " call " + std::to_string(turn) + ": ";
            const StandIn &device = standin(kind);
            device.fail(entry.c_str(), turn, kInjected);
            try {
                const Load load = run(device, path, content);
                if (load.status == TL_OK) {
                    REQUIRE(load.right);
                    // Pinning is refused on machines with a small limit: then copies go without, and it is said.
                    const bool unpinned = device.unpinned_copies() > 0;
                    REQUIRE_EQ(unpinned, load.notes.find("pin") != std::string::npos);
                    REQUIRE(!unpinned || entry.find("Register") != std::string::npos);
                } else {
                    ++failed;
                    REQUIRE_EQ(load.status, TL_ERR_DRIVER);
                    REQUIRE_EQ(load.error.driver_code, kInjected);
                    const std::string bare = entry.substr(0, entry.find("_v2"));
                    REQUIRE_SAYING(std::string(load.error.message).find(bare) != std::string::npos,
                                   load.error.message);
                }
                device.fail(entry.c_str(), 0, 0);
                device.require_clean(entry.find("HostRegister") != std::string::npos);
                REQUIRE(threads_come_back_to(threads_before));
                REQUIRE_EQ(count_open_files(), files_before);
            } catch (const std::exception &error) {
                throw check::Failure(what + error.what());
            }
        }
    }
    REQUIRE_SAYING(failed > 20, std::to_string(failed) + " runs saw an error");
}

}  // namespace

TEST(each_call_of_cuda_fails) {
    fail_each_call(TL_DEVICE_CUDA);
}
TEST(each_call_of_hip_fails) {
    fail_each_call(TL_DEVICE_HIP);
}

TEST(a_driver_that_does_not_start) {
    for (const int kind : kDevices) {
        const StandIn &device = standin(kind);
        device.fail(kind == TL_DEVICE_CUDA ? "cuDeviceGetCount" : "hipGetDeviceCount", -1, 100);
        tl_error error = no_error();
        std::int32_t count = 0;
        REQUIRE_EQ(tl_driver_probe(kind, &count, &error), TL_ERR_DRIVER);
        REQUIRE_EQ(error.driver_code, 100);
        REQUIRE(error.message[0] != 0);
    }
}

TEST_MAIN
