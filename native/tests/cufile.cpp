// GPUDirect Storage through the stand-ins for libcuda and libcufile: bytes, refusals at each of its calls, slots of which a
// part came another way, and nothing left behind. The order against the consumer's stream is a test of fences.cpp.
#include "support.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <algorithm>

namespace {

constexpr std::size_t kBytes = 1500000;
constexpr int kNotSupported = 5008;

struct Load {
    tl_status status = TL_OK;
    tl_error error = no_error();
    tl_stats stats{};
    std::string fallback;
    bool right = false;
};

std::string fallback_of(const Engine &engine, std::int32_t file) {
    tl_file_info info{};
    info.struct_size = sizeof info;
    tl_error problem = no_error();
    REQUIRE_EQ(tl_engine_file_info(engine.get(), file, &info, &problem), TL_OK);
    return info.fallback;
}

struct Fixture {
    Folder folder;
    Bytes content = random_bytes(kBytes, 5);
    const StandIn &device = standin(TL_DEVICE_CUDA);
    const CufileStandIn &cufile = cufile_standin();
    int files_before = count_open_files();

    Fixture() {
        write_file(path(), content);
    }
    std::string path() const {
        return folder.file("data");
    }

    // In two submissions with all landed between them, so that the file is opened twice.
    Load load(const tl_options &options, std::uint32_t flags = 0) const {
        Load load;
        Bytes memory(kBytes, kCanary);
        Engine engine(options);
        const std::int32_t file = engine.add(path(), kBytes);
        const std::uint64_t half = kBytes / 2 + 13;
        std::vector<tl_piece> pieces;
        for (std::uint64_t at = 0; at < kBytes; at += half / 8) {
            pieces.push_back({at, std::min(half / 8, kBytes - at),
                              reinterpret_cast<std::uintptr_t>(memory.data()) + at, file, flags, 0, 0});
        }
        const auto middle = pieces.begin() + static_cast<std::ptrdiff_t>(pieces.size() / 2);
        for (const auto &part :
             {std::vector<tl_piece>(pieces.begin(), middle), std::vector<tl_piece>(middle, pieces.end())}) {
            load.status = engine.submit(part);
            load.status = load.status == TL_OK ? engine.wait() : load.status;
            if (load.status != TL_OK) {
                break;
            }
        }
        load.error = engine.error;
        load.stats = engine.stats();
        load.fallback = fallback_of(engine, file);
        REQUIRE_EQ(engine.destroy(), TL_OK);
        load.right = memory == content;
        require_nothing_left();
        return load;
    }

    void require_nothing_left() const {
        device.require_clean();
        cufile.require_clean();
        REQUIRE_EQ(count_open_files(), files_before);
    }
};

tl_options cufile_options(std::vector<std::uint32_t> others = {}) {
    others.insert(others.begin(), TL_BACKEND_CUFILE);
    return options_for(TL_DEVICE_CUDA, others);
}

bool says(const std::string &text, const std::string &part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

// The first test: later the driver is open for good.
TEST(a_driver_that_does_not_open) {
    Fixture f;
    f.cufile.fail("cuFileDriverOpen", -1, 5010);
    const Load alone = f.load(cufile_options());
    REQUIRE_EQ(alone.status, TL_ERR_BACKEND);
    REQUIRE_SAYING(says(alone.error.message, "cuFileDriverOpen answered CU_FILE_NVFS_DRIVER_ERROR (5010)"),
                   alone.error.message);
    const Load helped = f.load(cufile_options({TL_BACKEND_PREAD}));
    REQUIRE_SAYING(helped.right, helped.error.message);
    REQUIRE(says(helped.fallback, "CUFILE: cuFileDriverOpen"));
    REQUIRE(says(refusal(TL_BACKEND_CUFILE, f.path()), "5010"));
    f.cufile.fail("cuFileDriverOpen", 0, 0);
    REQUIRE_EQ(refusal(TL_BACKEND_CUFILE, f.path()), "");
    REQUIRE(f.load(cufile_options()).right);
}

TEST(everything_comes_straight) {
    Fixture f;
    for (const std::uint64_t most : {0u, 5000u}) {
        f.cufile.set_most(most);
        const Load load = f.load(cufile_options());
        REQUIRE_SAYING(load.right, load.error.message);
        REQUIRE_EQ(load.stats.bytes_by_path[TL_PATH_CUFILE], kBytes);
        REQUIRE_EQ(load.stats.copies, 0u);
        REQUIRE_EQ(load.stats.pinned_peak_bytes, 0u);
        REQUIRE(load.stats.reads_by_path[TL_PATH_CUFILE] >= (most ? kBytes / most : 1));
        if (access("/proc/driver/nvidia-fs", F_OK) != 0) {
            REQUIRE(says(load.fallback, "compatibility mode"));
        }
    }
    REQUIRE_EQ(f.cufile.calls("cuFileDriverOpen"), 0u);  // by the test before, for this one too
}

TEST(random_plans) {
    Folder folder;
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
        const StandIn &device = standin(TL_DEVICE_CUDA);
        const CufileStandIn &cufile = cufile_standin();
        Random random(seed + 7);
        const Plan plan = random_plan(folder, random, 1 + random() % 150, 1 + random() % 500000);
        cufile.set_delay_us(seed % 2 ? 300 : 0);
        cufile.set_most(seed % 3 ? 0 : 30011);
        // Of some files a part comes by the next of the list, for the rest of that file.
        cufile.fail("cuFileRead", static_cast<std::int64_t>(seed < 2 ? 0 : 1 + random() % 40), kNotSupported);
        Bytes memory(plan.memory_bytes, kCanary);
        {
            Engine engine(
                cufile_options({seed % 2 ? TL_BACKEND_PREAD : TL_BACKEND_AIO, TL_BACKEND_BUFFERED}));
            const auto files = add_files(engine, plan);
            for (std::size_t done = 0; done < plan.pieces.size();) {
                const std::size_t next = std::min(plan.pieces.size(), done + 1 + random() % 80);
                REQUIRE_EQ(engine.submit(placed(plan, memory, done, next, files)), TL_OK);
                done = next;
            }
            REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        }
        device.drain();
        require_expected(plan, memory);
        device.require_clean();
        cufile.require_clean();
    }
}

TEST(each_read_is_refused) {
    Fixture f;
    for (const int code : {kNotSupported, 5011, EIO, EINVAL}) {
        for (const std::int64_t turn : {1, 2, 3, 7, 15, -1, -9}) {
            f.cufile.fail("cuFileRead", turn, code);
            const Load load = f.load(cufile_options({TL_BACKEND_AUTO}));
            REQUIRE_SAYING(load.right, std::to_string(turn) + ": " + load.error.message);
            REQUIRE(says(load.fallback, "CUFILE: cuFile refused: cuFileRead answered"));
            REQUIRE_EQ(load.stats.bytes_by_path[TL_PATH_CUFILE] == 0, turn == -1);
            REQUIRE(load.stats.copies > 0);
            f.cufile.fail("cuFileRead", 0, 0);
        }
    }
}

TEST(a_mixed_slot_copies_what_came_through_it) {
    Fixture f;
    f.cufile.fail("cuFileRead", 4, kNotSupported);
    tl_options options = cufile_options({TL_BACKEND_BUFFERED});
    options.threads = options.io_depth = 1;
    const std::size_t nbytes = options.slot_bytes;  // one slot of four chunks
    Bytes memory(nbytes, kCanary);
    Engine engine(options);
    const std::int32_t file = engine.add(f.path(), kBytes);
    REQUIRE_EQ(engine.submit({{0, nbytes, reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}}),
               TL_OK);
    REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
    const tl_stats stats = engine.stats();
    REQUIRE_EQ(stats.copies, 1u);
    // With one thread the fourth read is that of the last chunk.
    REQUIRE_EQ(stats.bytes_by_path[TL_PATH_CUFILE], 3 * options.chunk_bytes);
    REQUIRE_EQ(stats.bytes_by_path[TL_PATH_PREAD_BUFFERED], options.chunk_bytes);
    REQUIRE_EQ(engine.destroy(), TL_OK);
    f.device.drain();
    REQUIRE(std::equal(memory.begin(), memory.end(), f.content.begin()));
    f.require_nothing_left();
}

TEST(a_refusal_with_nothing_left_says_where) {
    Fixture f;
    for (const auto &[code, text] :
         {std::pair{5029, "CU_FILE_DEVICE_NOT_FOUND (5029)"}, std::pair{5999, "error (5999)"},
          std::pair{EIO, "-1: Input/output error"}}) {
        f.cufile.fail("cuFileRead", 3, code);
        const Load load = f.load(cufile_options());
        REQUIRE_EQ(load.status, TL_ERR_BACKEND);
        REQUIRE_SAYING(says(load.error.message, std::string("cuFileRead answered ") + text),
                       load.error.message);
        REQUIRE_EQ(load.error.file, 0);
        REQUIRE(load.error.wanted > 0);
        REQUIRE_EQ(load.error.got, 0u);
    }
    // After a part of a read: that part does not count, but is told.
    f.cufile.set_most(1000);
    f.cufile.fail("cuFileRead", 2, EIO);
    tl_options options = cufile_options();
    options.threads = options.io_depth = 1;
    const Load load = f.load(options);
    REQUIRE_EQ(load.status, TL_ERR_BACKEND);
    REQUIRE_EQ(load.error.offset, 0u);
    REQUIRE_EQ(load.error.got, 1000u);
}

TEST(a_file_that_is_not_registered) {
    Fixture f;
    for (const std::int64_t turn : {1, 2}) {  // at the routing, and when the file is opened again
        f.cufile.fail("cuFileHandleRegister", turn, 5018);
        const Load alone = f.load(cufile_options());
        REQUIRE_EQ(alone.status, TL_ERR_BACKEND);
        REQUIRE(says(alone.error.message, "cuFileHandleRegister answered CU_FILE_INVALID_FILE_TYPE (5018)"));
        f.cufile.fail("cuFileHandleRegister", turn, 5018);
        const Load helped = f.load(cufile_options({TL_BACKEND_PREAD}));
        REQUIRE_SAYING(helped.right, helped.error.message);
        REQUIRE_EQ(helped.stats.bytes_by_path[TL_PATH_CUFILE] == 0, turn == 1);
    }
    f.cufile.fail("cuFileHandleRegister", 0, 0);
}

TEST(a_file_that_is_cut_short) {
    Fixture f;
    for (const std::uint64_t most : {0u, 7000u}) {
        write_file(f.path(), f.content);
        f.cufile.set_most(most);
        Bytes memory(kBytes, kCanary);
        Engine engine(cufile_options({TL_BACKEND_PREAD}));
        const std::int32_t file = engine.add(f.path(), kBytes);
        const auto to = reinterpret_cast<std::uintptr_t>(memory.data());
        // The first chunk opens the file, which stays open while reads of it are under way.
        f.cufile.set_delay_us(300000);
        REQUIRE_EQ(engine.submit({{0, kBytes, to, file, 0, 0, 0}}), TL_OK);
        while (f.cufile.calls("cuFileRead") == 0) {
            usleep(1000);
        }
        truncate_file(f.path(), 100000);
        f.cufile.set_delay_us(0);
        REQUIRE_EQ(engine.wait(), TL_ERR_TRUNCATED);
        REQUIRE_EQ(engine.error.file, file);
        REQUIRE(engine.error.wanted > engine.error.got);
        REQUIRE(engine.error.offset + engine.error.wanted > 100000);
        REQUIRE_EQ(engine.destroy(), TL_OK);
        f.require_nothing_left();
        f.cufile.reset();
    }
}

TEST(what_is_digested_goes_through_host_memory) {
    Fixture f;
    const Load load = f.load(cufile_options(), TL_PIECE_DIGEST);
    if (load.status == TL_ERR_ARGUMENT) {
        return;  // built without digests
    }
    REQUIRE_SAYING(load.right, load.error.message);
    REQUIRE_EQ(load.stats.bytes_by_path[TL_PATH_CUFILE], 0u);
    REQUIRE_EQ(load.stats.bytes_by_path[TL_PATH_PREAD_BUFFERED], kBytes);
    const std::string note = "digests are made in host memory";
    REQUIRE(says(load.fallback, note));
    REQUIRE_EQ(load.fallback.find(note), load.fallback.rfind(note));
}

TEST(other_devices_are_refused) {
    Fixture f;
    const StandIn &hip = standin(TL_DEVICE_HIP);
    for (const int kind : {TL_DEVICE_CPU, TL_DEVICE_HIP}) {
        const Load alone = f.load(options_for(kind, {TL_BACKEND_CUFILE}));
        REQUIRE_EQ(alone.status, TL_ERR_BACKEND);
        REQUIRE_SAYING(says(alone.error.message, "CUFILE: cuFile reads to the memory of CUDA devices alone"),
                       alone.error.message);
        const Load helped = f.load(options_for(kind, {TL_BACKEND_CUFILE, TL_BACKEND_BUFFERED}));
        REQUIRE_SAYING(helped.right, helped.error.message);
    }
    hip.require_clean();
    REQUIRE_EQ(f.cufile.calls("cuFileHandleRegister"), 0u);
}

TEST(automatic_does_not_take_it) {
    Fixture f;
    REQUIRE(f.load(options_for(TL_DEVICE_CUDA)).right);
    REQUIRE_EQ(f.cufile.calls("cuFileHandleRegister"), 0u);
}

TEST(descriptors_of_stdin_and_others_stay_free) {
    Fixture f;
    const int kept = fcntl(0, F_DUPFD_CLOEXEC, 10);
    ::close(0);
    f.files_before = count_open_files();
    const Load load = f.load(cufile_options());
    const int taken = fcntl(0, F_GETFD);
    if (kept >= 0) {
        dup2(kept, 0);
        ::close(kept);
    }
    REQUIRE_SAYING(load.right, load.error.message);
    REQUIRE_EQ(taken, -1);
}

TEST(ending_early_waits_for_reads) {
    Fixture f;
    f.cufile.set_delay_us(3000);
    Bytes memory(kBytes, kCanary);
    Engine engine(cufile_options());
    const auto to = reinterpret_cast<std::uintptr_t>(memory.data());
    REQUIRE_EQ(engine.submit({{0, kBytes, to, engine.add(f.path(), kBytes), 0, 0, 0}}), TL_OK);
    while (f.cufile.calls("cuFileRead") < 3) {
        usleep(100);
    }
    REQUIRE_EQ(engine.destroy(), TL_OK);
    const Bytes after = memory;
    usleep(10000);
    REQUIRE(memory == after);
    f.require_nothing_left();
}

TEST_MAIN
