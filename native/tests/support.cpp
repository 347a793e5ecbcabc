#include "support.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

Folder::Folder() {
    std::string pattern = "tl-test-XXXXXX";
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = std::filesystem::absolute(pattern).string();
}

Folder::~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

Bytes random_bytes(std::size_t nbytes, std::uint64_t seed) {
    Bytes bytes(nbytes);
    Random random(seed);
    std::size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) {
        const std::uint64_t word = random();
        std::memcpy(bytes.data() + i, &word, 8);
    }
    for (; i < nbytes; ++i) {
        bytes[i] = static_cast<std::uint8_t>(random());
    }
    return bytes;
}

void write_file(const std::string &path, const Bytes &bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char *>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    out.close();
    REQUIRE(out.good());
}

void truncate_file(const std::string &path, std::uint64_t nbytes) {
    REQUIRE_EQ(::truncate(path.c_str(), static_cast<off_t>(nbytes)), 0);
}

void drop_cache(const std::string &path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(fd >= 0);
    ::fsync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
}

std::size_t cached_pages(const std::string &path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat about {};
    REQUIRE(fd >= 0 && fstat(fd, &about) == 0);
    const auto nbytes = static_cast<std::size_t>(about.st_size);
    void *map = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    REQUIRE(map != MAP_FAILED);
    std::vector<unsigned char> pages(nbytes / static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + 1);
    REQUIRE_EQ(mincore(map, nbytes, pages.data()), 0);
    munmap(map, nbytes);
    ::close(fd);
    return static_cast<std::size_t>(
        std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; }));
}

static int count_entries(const char *folder) {
    DIR *dir = opendir(folder);
    REQUIRE(dir != nullptr);
    int count = 0;
    while (const dirent *entry = readdir(dir)) {
        count += entry->d_name[0] != '.' ? 1 : 0;
    }
    closedir(dir);
    return count;
}

int count_open_files() {
    return count_entries("/proc/self/fd");
}
int count_threads() {
    return count_entries("/proc/self/task");
}

bool threads_come_back_to(int count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (count_threads() > count) {
        if (std::chrono::steady_clock::now() > deadline) {
            return false;
        }
        std::this_thread::yield();
    }
    return true;
}

static StandIn load_standin(int kind) {
    const char *path = kind == TL_DEVICE_CUDA ? STANDIN_CUDA : STANDIN_HIP;
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    check::holds(library != nullptr, "the stand-in loads", path, 0);
    StandIn s{};
    s.kind = kind;
#define CONTROL(name) s.name = reinterpret_cast<decltype(s.name)>(dlsym(library, "standin_" #name))
    CONTROL(reset);
    CONTROL(ready);
    CONTROL(set_copy_delay_us);
    CONTROL(set_copy_jitter_us);
    CONTROL(set_allocation_bytes);
    CONTROL(set_busy);
    CONTROL(fail);
    CONTROL(fail_at_random);
    CONTROL(calls);
    CONTROL(entry);
    CONTROL(registered_bytes);
    CONTROL(registered_peak_bytes);
    CONTROL(live_streams);
    CONTROL(live_events);
    CONTROL(retained_contexts);
    CONTROL(mapped_allocations);
    CONTROL(unpinned_copies);
    CONTROL(lost_copies);
    CONTROL(blocking_streams);
    CONTROL(stream);
    CONTROL(stream_free);
    CONTROL(stream_sync);
    CONTROL(memset);
    CONTROL(copy);
    CONTROL(hold);
    CONTROL(release);
    CONTROL(settle);
    CONTROL(drain);
#undef CONTROL
    return s;
}

const StandIn &standin(int kind) {
    static const StandIn cuda = load_standin(TL_DEVICE_CUDA);
    static const StandIn hip = load_standin(TL_DEVICE_HIP);
    const StandIn &s = kind == TL_DEVICE_CUDA ? cuda : hip;
    s.reset();
    s.ready();
    return s;
}

const CufileStandIn &cufile_standin() {
    static const CufileStandIn loaded = [] {
        void *library = dlopen(STANDIN_CUFILE, RTLD_NOW | RTLD_GLOBAL);
        check::holds(library != nullptr, "the stand-in loads", STANDIN_CUFILE, 0);
        CufileStandIn s{};
#define CONTROL(field, name) s.field = reinterpret_cast<decltype(s.field)>(dlsym(library, "standin_" #name))
        CONTROL(reset, cufile_reset);
        CONTROL(set_most, cufile_set_most);
        CONTROL(handles, cufile_handles);
        CONTROL(misuses, cufile_misuses);
        CONTROL(set_delay_us, set_copy_delay_us);
        CONTROL(fail, fail);
        CONTROL(calls, calls);
#undef CONTROL
        return s;
    }();
    loaded.reset();
    return loaded;
}

void CufileStandIn::require_clean() const {
    REQUIRE_EQ(handles(), 0u);
    REQUIRE_EQ(misuses(), 0u);
}

void StandIn::require_clean(bool may_be_unpinned) const {
    drain();
    REQUIRE_EQ(registered_bytes(), 0u);
    REQUIRE_EQ(live_streams(), 0u);
    REQUIRE_EQ(live_events(), 0u);
    REQUIRE_EQ(retained_contexts(), 0);
    REQUIRE_EQ(mapped_allocations(), 0u);
    REQUIRE(may_be_unpinned || unpinned_copies() == 0);
    REQUIRE_EQ(lost_copies(), 0u);
    REQUIRE_EQ(blocking_streams(), 0u);
}

tl_options options_for(int kind, std::vector<std::uint32_t> backends) {
    tl_options options{};
    options.struct_size = sizeof options;
    options.abi_version = TL_ABI_VERSION;
    options.device_kind = kind;
    options.chunk_bytes = 64 << 10;
    options.slot_bytes = 256 << 10;
    options.pinned_bytes = 1 << 20;
    options.threads = 3;
    options.io_depth = 8;
    options.backend_count = static_cast<std::uint32_t>(backends.size());
    std::copy(backends.begin(), backends.end(), options.backends);
    return options;
}

tl_error no_error() {
    tl_error error{};
    error.struct_size = sizeof error;
    return error;
}

std::string refusal(std::uint32_t backend, const std::string &path) {
    if (const char *reason = tl_backend_not_built(backend)) {
        return reason;
    }
    tl_error error = no_error();
    return tl_backend_probe(backend, path.c_str(), &error) == TL_OK ? "" : error.message;
}

const char *backend_name(std::uint32_t backend) {
    static const char *const names[] = {"AUTO", "PREAD",        "URING",    "MMAP",  "URING_BUFFERED",
                                        "AIO",  "AIO_BUFFERED", "BUFFERED", "CUFILE"};
    return names[backend];
}

Engine::Engine(const tl_options &options) {
    const tl_status status = tl_engine_create(&options, &engine_, &error);
    REQUIRE_SAYING(status == TL_OK, error.message);
}

Engine::~Engine() {
    destroy();
}

std::int32_t Engine::add(const std::string &path, std::uint64_t nbytes) {
    struct stat about {};
    std::int32_t file = -1;
    const bool found = ::stat(path.c_str(), &about) == 0;
    const tl_status status = tl_engine_add_file(engine_, path.c_str(), found ? about.st_dev : 0,
                                                found ? about.st_ino : 0, nbytes, &file, &error);
    REQUIRE_SAYING(status == TL_OK, error.message);
    return file;
}

tl_status Engine::submit(const std::vector<tl_piece> &pieces, std::uint64_t stream) {
    return tl_engine_submit(engine_, pieces.data(), pieces.size(), stream, &ticket, &error);
}

tl_status Engine::wait() {
    for (int i = 0; i < 600; ++i) {
        const tl_status status = tl_engine_wait(engine_, ticket, 100, &error);
        if (status != TL_PENDING) {
            return status;
        }
    }
    throw check::Failure("an engine did not answer in 60 s");
}

tl_stats Engine::stats() const {
    tl_stats stats{};
    stats.struct_size = sizeof stats;
    tl_error problem = no_error();
    const tl_status status = tl_engine_stats(engine_, &stats, &problem);
    REQUIRE_SAYING(status == TL_OK, problem.message);
    return stats;
}

tl_status Engine::destroy() {
    if (engine_ == nullptr) {
        return TL_OK;
    }
    tl_error problem = no_error();
    const tl_status status = tl_engine_destroy(engine_, &problem);
    engine_ = nullptr;
    return status;
}

static void append_rows(Bytes *to, const Bytes &content, const tl_piece &piece) {
    const std::uint64_t rows = std::max<std::uint64_t>(piece.rows, 1), row = piece.nbytes / rows;
    for (std::uint64_t i = 0; i < rows; ++i) {
        const auto begin =
            content.begin() + static_cast<std::ptrdiff_t>(piece.file_offset + i * piece.stride);
        to->insert(to->end(), begin, begin + static_cast<std::ptrdiff_t>(row));
    }
}

// Makes rows of a range, with gaps of all magnitudes, as many as the file has.
static void cut_into_rows(tl_piece *piece, Random &random, std::uint64_t file_bytes) {
    const std::uint64_t row = 1 + random() % ((piece->nbytes >> (random() % 12)) + 1);
    const std::uint64_t stride = row + random() % ((32u << 10 >> (random() % 15)) + 1);
    const std::uint64_t there = file_bytes - piece->file_offset;
    if (row > there) return;
    const std::uint64_t most = std::min((there - row) / stride + 1, piece->nbytes / row + 1);
    piece->rows = 1 + random() % most;
    piece->stride = stride;
    piece->nbytes = piece->rows * row;
}

Plan random_plan(const Folder &folder, Random &random, std::size_t pieces, std::size_t largest) {
    Plan plan;
    for (int i = 0; i < 3; ++i) {
        plan.paths.push_back(folder.file("random" + std::to_string(i)));
        plan.contents.push_back(random_bytes(largest + random() % (2 * largest), random()));
        write_file(plan.paths.back(), plan.contents.back());
    }
    std::uint64_t at = random() % 4096;
    for (std::size_t i = 0; i < pieces; ++i) {
        // Sizes over all magnitudes, often 0 or a few bytes.
        const std::uint64_t nbytes = random() % 8 == 0 ? 0 : random() % ((largest >> (random() % 16)) + 2);
        const std::size_t file = random() % plan.paths.size();
        const Bytes &content = plan.contents[file];
        const std::uint64_t offset =
            random() % (content.size() - std::min<std::uint64_t>(nbytes, content.size()) + 1);
        const std::uint64_t size = std::min<std::uint64_t>(nbytes, content.size() - offset);
        const std::uint64_t gap = random() % 3 == 0 ? 0 : random() % 700;
        const bool join = i > 0 && random() % 2 == 0;
        plan.padding.resize(at, false);
        plan.padding.resize(at + gap, join);
        at += gap;
        plan.expected.resize(at, kCanary);
        tl_piece piece{offset, size, at, static_cast<std::int32_t>(file), join ? TL_PIECE_JOIN : 0u, 0, 0};
        if (size > 0 && random() % 3 == 0) {
            cut_into_rows(&piece, random, content.size());
        }
        append_rows(&plan.expected, content, piece);
        plan.pieces.push_back(piece);
        at += piece.nbytes;
    }
    plan.memory_bytes = at + 4096;
    plan.padding.resize(plan.memory_bytes, false);
    plan.expected.resize(plan.memory_bytes, kCanary);
    return plan;
}

std::vector<tl_piece> placed(const Plan &plan, const Bytes &memory, std::size_t first, std::size_t last,
                             const std::vector<std::int32_t> &files) {
    std::vector<tl_piece> pieces(plan.pieces.begin() + static_cast<std::ptrdiff_t>(first),
                                 plan.pieces.begin() + static_cast<std::ptrdiff_t>(last));
    for (tl_piece &piece : pieces) {
        piece.destination += reinterpret_cast<std::uintptr_t>(memory.data());
        piece.file = files[static_cast<std::size_t>(piece.file)];
    }
    if (!pieces.empty()) {
        pieces[0].flags &= ~TL_PIECE_JOIN;  // it joins a piece of the same call only
    }
    return pieces;
}

void require_expected(const Plan &plan, const Bytes &memory) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
        if (memory[i] != plan.expected[i] && !plan.padding[i]) {
            throw check::Failure("byte " + std::to_string(i) + " of " + std::to_string(memory.size()) +
                                 " is " + std::to_string(memory[i]) + ", expected " +
                                 std::to_string(plan.expected[i]));
        }
    }
}

std::vector<std::int32_t> add_files(Engine &engine, const Plan &plan) {
    std::vector<std::int32_t> files;
    for (std::size_t i = 0; i < plan.paths.size(); ++i) {
        files.push_back(engine.add(plan.paths[i], plan.contents[i].size()));
    }
    return files;
}
