// What the native tests share: files with known bytes, plans with random pieces, an engine that cleans up.
#pragma once

#include "check.hpp"
#include "standin.h"
#include "tensorlift.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

// A folder of this test on the file system of the working directory (so that direct reads are tried on a real one).
class Folder {
public:
    Folder();
    ~Folder();
    Folder(const Folder &) = delete;
    Folder &operator=(const Folder &) = delete;
    std::string file(const std::string &name) const {
        return path_ + "/" + name;
    }

private:
    std::string path_;
};

Bytes random_bytes(std::size_t nbytes, std::uint64_t seed);
void write_file(const std::string &path, const Bytes &bytes);
void truncate_file(const std::string &path, std::uint64_t nbytes);
// Makes the kernel forget what it has cached of a file, where it can.
void drop_cache(const std::string &path);
std::size_t cached_pages(const std::string &path);
int count_open_files();
int count_threads();
// Waits until so many threads are left: the kernel may still show one for a moment after it was joined.
bool threads_come_back_to(int count);

// Loads a stand-in once and gives its controls.
struct StandIn {
    int kind;
    decltype(&standin_reset) reset;
    decltype(&standin_ready) ready;
    decltype(&standin_set_copy_delay_us) set_copy_delay_us;
    decltype(&standin_set_copy_jitter_us) set_copy_jitter_us;
    decltype(&standin_set_allocation_bytes) set_allocation_bytes;
    decltype(&standin_set_busy) set_busy;
    decltype(&standin_fail) fail;
    decltype(&standin_fail_at_random) fail_at_random;
    decltype(&standin_calls) calls;
    decltype(&standin_entry) entry;
    decltype(&standin_registered_bytes) registered_bytes;
    decltype(&standin_registered_peak_bytes) registered_peak_bytes;
    decltype(&standin_live_streams) live_streams;
    decltype(&standin_live_events) live_events;
    decltype(&standin_retained_contexts) retained_contexts;
    decltype(&standin_mapped_allocations) mapped_allocations;
    decltype(&standin_unpinned_copies) unpinned_copies;
    decltype(&standin_lost_copies) lost_copies;
    decltype(&standin_blocking_streams) blocking_streams;
    decltype(&standin_stream) stream;
    decltype(&standin_stream_free) stream_free;
    decltype(&standin_stream_sync) stream_sync;
    decltype(&standin_memset) memset;
    decltype(&standin_copy) copy;
    decltype(&standin_hold) hold;
    decltype(&standin_release) release;
    decltype(&standin_settle) settle;
    decltype(&standin_drain) drain;

    // Nothing registered, no stream or event alive, no copy that was not as it should be.
    void require_clean(bool may_be_unpinned = false) const;
};

// TL_DEVICE_CUDA or TL_DEVICE_HIP, as after a reset and ready.
const StandIn &standin(int kind);
inline constexpr int kDevices[] = {TL_DEVICE_CUDA, TL_DEVICE_HIP};

// The stand-in for libcufile, as after a reset.
struct CufileStandIn {
    decltype(&standin_cufile_reset) reset;
    decltype(&standin_cufile_set_most) set_most;
    decltype(&standin_cufile_handles) handles;
    decltype(&standin_cufile_misuses) misuses;
    decltype(&standin_set_copy_delay_us) set_delay_us;
    decltype(&standin_fail) fail;
    decltype(&standin_calls) calls;

    void require_clean() const;
};
const CufileStandIn &cufile_standin();

tl_options options_for(int kind, std::vector<std::uint32_t> backends = {TL_BACKEND_AUTO});
tl_error no_error();
// Why a back end cannot be used for a file here; empty where it can.
std::string refusal(std::uint32_t backend, const std::string &path);
inline constexpr std::uint32_t kBackends[] = {
    TL_BACKEND_AUTO,           TL_BACKEND_PREAD, TL_BACKEND_URING,        TL_BACKEND_MMAP,
    TL_BACKEND_URING_BUFFERED, TL_BACKEND_AIO,   TL_BACKEND_AIO_BUFFERED, TL_BACKEND_BUFFERED};
const char *backend_name(std::uint32_t backend);

class Engine {
public:
    explicit Engine(const tl_options &options);
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    tl_engine *get() const {
        return engine_;
    }
    std::int32_t add(const std::string &path, std::uint64_t nbytes);
    tl_status submit(const std::vector<tl_piece> &pieces, std::uint64_t stream = 0);
    // Waits as long as it takes, 60 s at most.
    tl_status wait();
    tl_stats stats() const;
    tl_status destroy();

    tl_error error = no_error();
    std::uint64_t ticket = 0;

private:
    tl_engine *engine_ = nullptr;
};

// Files, their bytes, random pieces of them, and what memory must hold afterwards.
struct Plan {
    std::vector<std::string> paths;
    std::vector<Bytes> contents;
    std::vector<tl_piece> pieces;  // destinations relative to the memory's begin
    std::uint64_t memory_bytes = 0;
    std::vector<bool> padding;  // bytes that may hold anything
    Bytes expected;             // kCanary where nothing is written
};
inline constexpr std::uint8_t kCanary = 0xA5;

Plan random_plan(const Folder &folder, Random &random, std::size_t pieces, std::size_t largest);
// Pieces with absolute destinations, from first to last.
std::vector<tl_piece> placed(const Plan &plan, const Bytes &memory, std::size_t first, std::size_t last,
                             const std::vector<std::int32_t> &files);
// Throws at the first byte that differs.
void require_expected(const Plan &plan, const Bytes &memory);
std::vector<std::int32_t> add_files(Engine &engine, const Plan &plan);
