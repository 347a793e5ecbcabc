// Loads whose system calls and driver calls fail: an ordinary error or a reported fallback, right bytes, nothing left, no
// waiting; and what the kernel still had to write is not written later.
#include "failing.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint8_t kPoison = 0x3C;

// Memory at the begin of a page, so that direct reads land in place.
struct Memory {
    explicit Memory(std::size_t nbytes)
        : nbytes(nbytes),
          bytes(static_cast<std::uint8_t *>(std::aligned_alloc(kPage, (nbytes / kPage + 1) * kPage))) {
        fill(kCanary);
    }
    ~Memory() {
        std::free(bytes);
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    void fill(std::uint8_t value) {
        std::memset(bytes, value, nbytes);
    }
    bool is(std::uint8_t value) const {
        return std::all_of(bytes, bytes + nbytes, [&](std::uint8_t byte) { return byte == value; });
    }
    const std::size_t nbytes;
    std::uint8_t *const bytes;
};

// What becomes of the pinned memory at a load's end.
enum class Ring { kGone, kKept, kAside };

// A small file that is read in each way of a plan: blocks in place, through a buffer, rows that are packed, a digest.
class Loads {
public:
    Loads(std::vector<std::uint32_t> backends, int kind, bool cold, Ring ring) : cold_(cold), ring_(ring) {
        options_ = options_for(kind, backends);
        options_.threads = 2;
        options_.io_depth = 4;
        options_.pinned_bytes = 2 * options_.slot_bytes;
        options_.flags = TL_OPTION_TRACE | (ring == Ring::kKept ? TL_OPTION_KEEP : 0);
        options_.cpus[0] = 1;  // so that threads are kept there
        if (kind != TL_DEVICE_CPU) driver_ = &standin(kind);
        path_ = folder_.file("data");
        write_file(path_, content_);
        add(0, 250001);
        pieces_.push_back({260000, 64000, size_, 0, 0, 64, 3000});
        for (std::uint64_t row = 0; row < 64; ++row) expect(260000 + row * 3000, 1000);
        add(460001, 139999, TL_PIECE_DIGEST);
    }
    const std::string &path() const {
        return path_;
    }
    // See Work.
    std::string run() {
        if (cold_) drop_cache(path_);
        auto memory = std::make_unique<Memory>(size_);
        tl_engine *engine = nullptr;
        error_ = no_error();
        status_ = TL_OK;
        tl_error error = no_error();
        if (note(tl_engine_create(&options_, &engine, &error), error)) use(engine, *memory);
        if (engine && ring_ == Ring::kAside) note(tl_engine_set_aside(engine, &error), error);
        if (engine) note(tl_engine_destroy(engine, &error), error);
        std::uint64_t given_back = 0;
        if (ring_ != Ring::kGone) note(tl_pinned_release(&given_back, &error), error);
        const bool right = std::equal(expected_.begin(), expected_.end(), memory->bytes);
        // What comes now is too late: it would be another owner's memory.
        memory->fill(kPoison);
        REQUIRE(!last_ || last_->is(kPoison));
        last_ = std::move(memory);
        if (status_ == TL_OK) {
            REQUIRE(right);
            return {};
        }
        constexpr tl_status ordinary[] = {TL_ERR_OPEN, TL_ERR_READ, TL_ERR_BACKEND, TL_ERR_DRIVER,
                                          TL_ERR_MEMORY};
        REQUIRE_SAYING(std::find(std::begin(ordinary), std::end(ordinary), status_) != std::end(ordinary),
                       std::to_string(status_) + " " + error_.message);
        REQUIRE(error_.message[0] != 0);
        return error_.message;
    }

private:
    void expect(std::uint64_t offset, std::uint64_t nbytes) {
        expected_.insert(expected_.end(), content_.begin() + static_cast<long>(offset),
                         content_.begin() + static_cast<long>(offset + nbytes));
        size_ = expected_.size();
    }
    void add(std::uint64_t offset, std::uint64_t nbytes, std::uint32_t flags = 0) {
        pieces_.push_back({offset, nbytes, size_, 0, flags, 0, 0});
        expect(offset, nbytes);
    }
    bool note(tl_status status, const tl_error &error) {
        if (status_ == TL_OK && status != TL_OK) {
            status_ = status;
            error_ = error;
        }
        return status == TL_OK;
    }
    void use(tl_engine *engine, const Memory &memory) {
        tl_error error = no_error();
        const std::uint64_t consumer = driver_ ? driver_->stream() : 0;
        std::int32_t file = 0;
        note(tl_engine_add_file(engine, path_.c_str(), 0, 0, content_.size(), &file, &error), error);
        std::uint64_t ticket = 0;
        for (tl_piece piece : pieces_) {
            piece.destination += reinterpret_cast<std::uintptr_t>(memory.bytes);
            piece.file = file;
            if (!note(tl_engine_submit(engine, &piece, 1, consumer, &ticket, &error), error)) break;
        }
        const tl_status status = tl_engine_wait(engine, ticket, 50000, &error);
        REQUIRE(status != TL_PENDING);
        note(status, error);
        note(tl_engine_stream_wait(engine, consumer, &error), error);
        if (driver_) {
            driver_->stream_sync(consumer);
            driver_->stream_free(consumer);
        }
        if (status_ == TL_OK) require_told(engine);
    }
    // Paths that no undisturbed load takes are named, and why.
    void require_told(tl_engine *engine) {
        tl_stats stats{};
        stats.struct_size = sizeof stats;
        REQUIRE_EQ(tl_engine_stats(engine, &stats, nullptr), TL_OK);
        tl_file_info info{};
        info.struct_size = sizeof info;
        REQUIRE_EQ(tl_engine_file_info(engine, 0, &info, nullptr), TL_OK);
        bool same = true;
        for (std::size_t k = 0; k < usual_.size(); ++k) {
            same = same && (usual_[k] || !undisturbed_ || stats.bytes_by_path[k] == 0);
            if (!undisturbed_) usual_[k] = stats.bytes_by_path[k] > 0;
        }
        REQUIRE_SAYING(same || info.fallback[0] || stats.notes[0], "a fallback that nobody was told of");
        undisturbed_ = true;  // the first load is
    }

    const bool cold_;
    const Ring ring_;
    const StandIn *driver_ = nullptr;
    tl_options options_{};
    Folder folder_;
    std::string path_;
    const Bytes content_ = random_bytes(600000, 7);
    std::vector<tl_piece> pieces_;  // destinations from the begin of the memory
    Bytes expected_;
    std::uint64_t size_ = 0;
    std::array<bool, TL_PATH_COUNT> usual_{};
    bool undisturbed_ = false;
    std::unique_ptr<Memory> last_;
    tl_status status_ = TL_OK;
    tl_error error_{};
};

constexpr int kInjected = 999;

void disturb(const std::string &what, std::vector<std::uint32_t> backends, int kind, bool cold,
             Ring ring = Ring::kGone) {
    Loads loads(backends, kind, cold, ring);
    const std::string reason = refusal(backends[0], loads.path());
    if (!reason.empty()) {
        std::printf("  skipped %s: %s\n", what.c_str(), reason.c_str());
        return;
    }
    const StandIn *driver = kind == TL_DEVICE_CPU ? nullptr : &standin(kind);
    const auto work = [&] {
        std::string said = loads.run();
        if (driver) {
            driver->fail_at_random(0, 0, 0);
            driver->require_clean(true);
        }
        return said;
    };
    fail_each_turn(what.c_str(), work);
    Also also;
    if (driver) {
        also = [driver](std::uint64_t seed, std::uint32_t in_a_million) {
            driver->fail_at_random(seed, in_a_million, kInjected);
        };
    }
    fail_at_random(what.c_str(), work, 40, also);
}

}  // namespace

TEST(loads_to_the_host) {
    for (const std::uint32_t backend : kBackends) {
        disturb(std::string(backend_name(backend)) + ", cold", {backend}, TL_DEVICE_CPU, true);
    }
    // The others do not ask what is cached.
    for (const std::uint32_t backend : {TL_BACKEND_AUTO, TL_BACKEND_PREAD, TL_BACKEND_BUFFERED}) {
        disturb(std::string(backend_name(backend)) + ", cached", {backend}, TL_DEVICE_CPU, false);
    }
}

TEST(lists_of_back_ends) {
    disturb("a list", {TL_BACKEND_URING, TL_BACKEND_AIO, TL_BACKEND_MMAP, TL_BACKEND_BUFFERED}, TL_DEVICE_CPU,
            true);
}

TEST(loads_to_a_device) {
    for (const int kind : kDevices) {
        const std::string name = kind == TL_DEVICE_CUDA ? "CUDA" : "HIP";
        disturb(name + ", cold", {TL_BACKEND_AUTO}, kind, true);
        disturb(name + ", cached", {TL_BACKEND_AUTO}, kind, false);
        disturb(name + ", its ring kept", {TL_BACKEND_AUTO}, kind, false, Ring::kKept);
        disturb(name + ", its ring set aside", {TL_BACKEND_AUTO}, kind, false, Ring::kAside);
    }
}

// Each is read, or left to others.
TEST(headers_of_files) {
    const Folder folder;
    std::string paths, text = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
    text.resize(100000, ' ');  // more than a first read takes
    for (const char *name : {"1", "2", "3"}) {
        Bytes bytes(8 + text.size() + 2);
        for (std::size_t i = 0; i < 8; i++) bytes[i] = static_cast<std::uint8_t>(text.size() >> 8 * i);
        std::copy(text.begin(), text.end(), bytes.begin() + 8);
        write_file(folder.file(name), bytes);
        paths += folder.file(name) + '\0';
    }
    const std::uint8_t bits[] = {8};
    const auto work = [&]() -> std::string {
        tl_headers *headers = nullptr;
        tl_headers_begin(paths.c_str(), 3, "U8 ", bits, 2, 2, &headers);
        if (!headers) return "none is read";
        std::string said;
        for (std::uint64_t k = 0; k < 3; k++) {
            REQUIRE(tl_headers_wait(headers, k, 50000));
            std::uint64_t facts[TL_HEADER_FACTS] = {};
            tl_headers_take(headers, k, facts);
            if (facts[TL_HEADER_HANDLE] == 0) {
                said = "one is left to others";
                continue;
            }
            REQUIRE(facts[TL_HEADER_PLAIN]);
            REQUIRE_EQ(facts[TL_HEADER_COUNT], 1u);
            tl_header_free(reinterpret_cast<tl_header *>(facts[TL_HEADER_HANDLE]));
        }
        tl_headers_end(&headers);
        return said;
    };
    fail_each_turn("headers", work);
    fail_at_random("headers", work, 40);
}

// Memory of the host, what is cached, and whether a reader works.
TEST(single_calls) {
    const Folder folder;
    const std::string path = folder.file("data");
    write_file(path, random_bytes(100000, 5));
    const auto work = [&]() -> std::string {
        tl_arena *arena = nullptr;
        std::uint64_t address = 0;
        tl_error error = no_error();
        const tl_status status = tl_arena_host(100000, &arena, &address, &error);
        tl_arena_release(arena);
        const double share = tl_cached_share(path.c_str());
        const tl_status probed = tl_backend_probe(TL_BACKEND_PREAD, path.c_str(), nullptr);
        REQUIRE_EQ(tl_arena_live(), 0u);
        if (status != TL_OK) return error.message;
        if (share < 0) return "nobody tells what is cached";
        return probed == TL_OK ? "" : "a reader that is refused";
    };
    fail_each_turn("single calls", work);
    fail_at_random("single calls", work, 40);
}

TEST_MAIN
