// Pieces of rows that lie apart in the file: right bytes in every back end, no more read than they touch, no memory for each
// row, and an ordinary error for what makes no sense.
#include "support.hpp"

#include <malloc.h>
#include <algorithm>
#include <numeric>

namespace {

constexpr int kKinds[] = {TL_DEVICE_CPU, TL_DEVICE_CUDA};

struct Rows {
    std::uint64_t offset;
    std::uint64_t row;
    std::uint64_t stride;
    std::uint64_t count;

    std::uint64_t nbytes() const {
        return row * count;
    }
    std::uint64_t span() const {
        return (count - 1) * stride + row;
    }
    Bytes of(const Bytes &content) const {
        Bytes bytes;
        for (std::uint64_t i = 0; i < count; ++i) {
            const auto begin = content.begin() + static_cast<std::ptrdiff_t>(offset + i * stride);
            bytes.insert(bytes.end(), begin, begin + static_cast<std::ptrdiff_t>(row));
        }
        return bytes;
    }
    tl_piece piece(const Bytes &memory, std::int32_t file) const {
        return {offset, nbytes(), reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, count, stride};
    }
};

// Gaps of none, of a byte, around a page and of many; rows shorter and longer than a chunk (64 KiB) and a slot (256 KiB).
constexpr Rows kShapes[] = {
    {7, 1, 2, 100000},      {4096, 3000, 3000, 200},   {11, 512, 4607, 150},    {13, 512, 4608, 150},
    {100, 512, 4609, 150},  {8192, 4096, 65536, 20},   {1, 7000, 57000, 20},    {0, 65536, 131072, 8},
    {5, 65537, 70000, 12},  {4096, 70000, 140000, 7},  {77, 300000, 300007, 3}, {12288, 409600, 500000, 2},
    {3, 1, 100000, 9},      {999, 1000, 123456789, 1}, {8, 8, 4096, 200},       {4095, 2, 8192, 120},
    {0, 262144, 300000, 3}, {16, 40, 41, 20000},
};
constexpr std::size_t kFileBytes = 1400000;

std::string name_of(const Rows &rows) {
    return std::to_string(rows.count) + " rows of " + std::to_string(rows.row) + " every " +
           std::to_string(rows.stride);
}

std::uint64_t sum(const std::uint64_t (&by_path)[TL_PATH_COUNT]) {
    return std::accumulate(std::begin(by_path), std::end(by_path), std::uint64_t{0});
}

struct Fixture {
    Folder folder;
    std::string path = folder.file("data");
    Bytes content = random_bytes(kFileBytes, 9);

    Fixture() {
        write_file(path, content);
    }

    tl_stats load(const Rows &rows, const tl_options &options) const {
        const StandIn *device =
            options.device_kind == TL_DEVICE_CPU ? nullptr : &standin(options.device_kind);
        Bytes memory(rows.nbytes(), kCanary);
        Engine engine(options);
        const tl_status given = engine.submit({rows.piece(memory, engine.add(path, kFileBytes))});
        REQUIRE_SAYING(given == TL_OK && engine.wait() == TL_OK, engine.error.message);
        const tl_stats stats = engine.stats();
        engine.destroy();
        REQUIRE(memory == rows.of(content));
        REQUIRE_EQ(sum(stats.bytes_by_path), rows.nbytes());
        if (device != nullptr) {
            device->require_clean();
        }
        return stats;
    }
};

template <class Run>
void for_each_usable(const Fixture &f, Run run) {
    for (const std::uint32_t backend : kBackends) {
        if (!refusal(backend, f.path).empty()) {
            std::printf("  skipped %s\n", backend_name(backend));
            continue;
        }
        for (const Rows &rows : kShapes) {
            try {
                run(backend, rows);
            } catch (const std::exception &error) {
                throw check::Failure(std::string(backend_name(backend)) + ", " + name_of(rows) + ": " +
                                     error.what());
            }
        }
    }
}

bool is_direct(std::uint32_t backend) {
    return backend == TL_BACKEND_URING || backend == TL_BACKEND_AIO;
}

}  // namespace

TEST(every_back_end_and_shape) {
    Fixture f;
    for (const int kind : kKinds) {
        for (const bool cold : {false, true}) {
            for_each_usable(f, [&](std::uint32_t backend, const Rows &rows) {
                if (cold) drop_cache(f.path);
                f.load(rows, options_for(kind, {backend}));
            });
        }
    }
}

TEST(no_more_is_read_than_the_rows_touch) {
    Fixture f;
    for_each_usable(f, [&](std::uint32_t backend, const Rows &rows) {
        if (!is_direct(backend)) return;
        const tl_stats stats = f.load(rows, options_for(TL_DEVICE_CPU, {backend}));
        const bool sparse = rows.stride - rows.row >= 4096 && rows.count > 1;
        // Whole blocks; those at the edges of chunks, which are cut between rows, are read for both.
        const std::uint64_t chunks = rows.span() / (64 << 10) + 3;
        const std::uint64_t most =
            sparse ? rows.count * ((rows.row + 4095) / 4096 + 1) * 4096 : rows.span() + 2 * 4096 * chunks;
        REQUIRE_SAYING(stats.direct_bytes_read <= most,
                       std::to_string(stats.direct_bytes_read) + " > " + std::to_string(most));
        REQUIRE(stats.direct_bytes_read >= rows.nbytes());
    });
}

TEST(what_is_not_read_is_not_cached) {
    Fixture f;
    // Nothing is read ahead of reads that do not follow each other, as far as the kernel can tell.
    drop_cache(f.path);
    if (cached_pages(f.path) > 0) return;  // a file system that is memory
    f.load({4096, 4096, 131072, 8}, options_for(TL_DEVICE_CPU, {TL_BACKEND_URING, TL_BACKEND_AIO}));
    REQUIRE(cached_pages(f.path) <= 1);
}

TEST(half_of_it_is_cached) {
    Fixture f;
    for (const std::uint32_t backend : {TL_BACKEND_AUTO, TL_BACKEND_PREAD}) {
        for (const Rows &rows : kShapes) {
            drop_cache(f.path);
            Bytes memory(kFileBytes);
            {
                Engine engine(options_for(TL_DEVICE_CPU, {TL_BACKEND_MMAP, TL_BACKEND_BUFFERED}));
                const Rows half{40000, 40000, 80000, 10};
                engine.submit({half.piece(memory, engine.add(f.path, kFileBytes))});
                REQUIRE_EQ(engine.wait(), TL_OK);
            }
            f.load(rows, options_for(TL_DEVICE_CPU, {backend}));
        }
    }
}

TEST(a_plan_has_no_memory_for_each_row) {
    Folder folder;
    const std::uint64_t tensors = 18000, row = 64;
    const Rows rows{0, row, 57344, 2048};
    const std::string path = folder.file("holes");
    write_file(path, {});
    truncate_file(path, rows.span());
    const StandIn &device = standin(TL_DEVICE_CUDA);
    Bytes memory(rows.nbytes());
    const std::uint64_t consumer = device.stream();
    // The ring's copies wait for this, so that nearly all of the plan is still there.
    const std::uint64_t gate = device.hold(consumer);
    {
        tl_options options = options_for(TL_DEVICE_CUDA, {TL_BACKEND_BUFFERED});
        options.chunk_bytes = 1u << 20;
        options.slot_bytes = 4u << 20;
        options.pinned_bytes = 8u << 20;
        Engine engine(options);
        const std::vector<tl_piece> pieces(tensors, rows.piece(memory, engine.add(path, rows.span())));
        const std::size_t before = mallinfo2().uordblks;
        REQUIRE_EQ(engine.submit(pieces, consumer), TL_OK);
        const std::size_t each = (mallinfo2().uordblks - before) / tensors;
        tl_error error = no_error();
        REQUIRE_EQ(tl_engine_cancel(engine.get(), &error), TL_OK);
        device.release(gate);
        // By chunks, of some hundred rows each.
        REQUIRE_SAYING(each < 2 * rows.count, std::to_string(each) + " bytes a piece");
    }
    device.stream_sync(consumer);
    device.stream_free(consumer);
    device.require_clean();
}

TEST(what_makes_no_sense_is_refused) {
    Fixture f;
    Engine engine(options_for(TL_DEVICE_CPU));
    const std::int32_t file = engine.add(f.path, kFileBytes);
    Bytes memory(4096, kCanary);
    const tl_piece good = Rows{0, 8, 16, 100}.piece(memory, file);
    struct Case {
        const char *says;
        std::uint64_t file_offset, nbytes, rows, stride;
        std::uint32_t flags;
    };
    const std::uint64_t most = UINT64_MAX;
    const Case cases[] = {
        {"a stride but no rows", 0, 800, 0, 16, 0},
        {"0 bytes in 100 rows", 0, 0, 100, 16, 0},
        {"801 bytes in 100 rows", 0, 801, 100, 16, 0},
        {"800 bytes in 801 rows", 0, 800, 801, 16, 0},
        {"they overlap", 0, 800, 100, 7, 0},
        {"they overlap", 0, 800, 100, 0, 0},
        {"past the end", 0, 800, 100, kFileBytes / 99 + 1, 0},
        {"past the end", kFileBytes - 799, 800, 100, 8, 0},
        {"past the end", 0, 800, 100, most, 0},
        {"past the end", 0, 800, 100, most / 99, 0},
        {"past the end", 1u << 30, 800, 100, most / 99 - 8, 0},
        {"past the end", kFileBytes, 800, 1, most, 0},
        {"wraps around", most - 8, 800, 100, 16, 0},
        {"not digested", 0, 800, 100, 16, TL_PIECE_DIGEST},
    };
    for (const Case &wrong : cases) {
        tl_piece piece = good;
        piece.file_offset = wrong.file_offset;
        piece.nbytes = wrong.nbytes;
        piece.rows = wrong.rows;
        piece.stride = wrong.stride;
        piece.flags = wrong.flags;
        REQUIRE_EQ(engine.submit({good, piece}), TL_ERR_ARGUMENT);
        const std::string text = engine.error.message;
        REQUIRE_SAYING(text.find(wrong.says) != std::string::npos, text);
        REQUIRE_SAYING(text.find("piece 1 ") == 0, text);
    }
    // A row alone has no distance to another.
    tl_piece alone = good;
    alone.nbytes = 100;
    alone.rows = 1;
    alone.stride = most;
    REQUIRE_EQ(engine.submit({alone}), TL_OK);
    REQUIRE_EQ(engine.wait(), TL_OK);
    engine.destroy();
    REQUIRE(std::equal(memory.begin(), memory.begin() + 100, f.content.begin()));
    REQUIRE_EQ(memory[100], kCanary);
}

TEST(a_file_that_is_cut_while_it_is_read) {
    // A held consumer stops a ring of two slots, so the file is open and half read when it is cut.
    const StandIn &device = standin(TL_DEVICE_CUDA);
    for (const Rows rows : {Rows{0, 600, 1000, 1000}, Rows{0, 900, 1000, 1000}, Rows{0, 20000, 27000, 40}}) {
        Fixture f;
        for (const std::uint32_t backend : kBackends) {
            write_file(f.path, f.content);
            if (!refusal(backend, f.path).empty()) continue;
            tl_options options = options_for(TL_DEVICE_CUDA, {backend});
            options.pinned_bytes = 2 * options.slot_bytes;
            const std::uint64_t consumer = device.stream();
            const std::uint64_t gate = device.hold(consumer);
            Bytes memory(rows.nbytes());
            {
                Engine engine(options);
                const std::int32_t file = engine.add(f.path, kFileBytes);
                engine.submit({rows.piece(memory, file)}, consumer);
                tl_error error = no_error();
                REQUIRE_EQ(tl_engine_wait(engine.get(), engine.ticket, 30, &error), TL_PENDING);
                truncate_file(f.path, 990000);
                device.release(gate);
                REQUIRE_EQ(engine.wait(), TL_ERR_TRUNCATED);
                REQUIRE_EQ(engine.error.file, file);
                REQUIRE(engine.error.wanted > engine.error.got);
                // Whether it was opened before it was cut, a busy machine decides.
                const std::string said = engine.error.message;
                REQUIRE(said == "ended while it was read" ||
                        said == "is shorter than when its header was read");
            }
            device.stream_sync(consumer);
            device.stream_free(consumer);
            device.require_clean();
        }
    }
}

TEST(cufile_leaves_rows_to_the_ring) {
    Fixture f;
    const StandIn &device = standin(TL_DEVICE_CUDA);
    const CufileStandIn &cufile = cufile_standin();
    const Rows rows{5, 1000, 9000, 90};
    Bytes memory(rows.nbytes() + 100000, kCanary);
    Bytes expected = rows.of(f.content);
    expected.insert(expected.end(), f.content.begin(), f.content.begin() + 100000);
    {
        Engine engine(options_for(TL_DEVICE_CUDA, {TL_BACKEND_CUFILE}));
        const std::int32_t file = engine.add(f.path, kFileBytes);
        const tl_piece range{
            0, 100000, reinterpret_cast<std::uintptr_t>(memory.data()) + rows.nbytes(), file, 0, 0, 0};
        engine.submit({rows.piece(memory, file), range});
        REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        const tl_stats stats = engine.stats();
        REQUIRE_EQ(stats.bytes_by_path[TL_PATH_CUFILE], 100000u);
        REQUIRE_EQ(stats.bytes_by_path[TL_PATH_PREAD_BUFFERED], rows.nbytes());
        tl_file_info info{};
        info.struct_size = sizeof info;
        tl_error problem = no_error();
        REQUIRE_EQ(tl_engine_file_info(engine.get(), file, &info, &problem), TL_OK);
        REQUIRE_SAYING(
            std::string(info.fallback).find("columns are packed in host memory") != std::string::npos,
            info.fallback);
    }
    device.drain();
    REQUIRE(memory == expected);
    device.require_clean();
    cufile.require_clean();
}

TEST_MAIN
