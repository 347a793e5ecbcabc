#include "numbers.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <random>

namespace {

constexpr std::uint32_t kMostCodes = 10;

struct Call {
    const char *name;
    std::int32_t codes[kMostCodes];
};

constexpr Call kCalls[kNumbers] = {
    {"open", {EMFILE, ENFILE, EACCES, EINTR, EIO, ENOMEM, EINVAL, ENOENT}},
    {"fcntl", {EMFILE, EINVAL, EPERM}},
    {"fstat", {EIO, ENOMEM}},
    {"fstatfs", {EIO, ENOSYS}},
    {"stat", {EACCES, EIO}},
    {"faccessat", {EACCES, EIO}},
    {"statx", {ENOSYS, EPERM, EIO}},
    {"cachestat", {ENOSYS, EPERM, EFAULT, EOPNOTSUPP}},
    {"read", {EIO, EINTR, EAGAIN, CALLS_SHORT}},
    {"lseek", {EINVAL}},
    {"pread", {CALLS_SHORT, EIO, EINTR, EAGAIN, EINVAL, ENOMEM, EPERM, ESTALE, EOPNOTSUPP}},
    {"preadv", {CALLS_SHORT, EIO, EINTR, EAGAIN, EINVAL, ENOMEM, EPERM, ESTALE}},
    {"pwrite", {ENOSPC, EIO, EINTR}},
    {"ftruncate", {ENOSPC, EINVAL, EINTR}},
    {"fallocate", {ENOSPC, EINTR, EOPNOTSUPP, ENOMEM}},
    {"posix_fadvise", {EINVAL, ENOSYS}},
    {"mmap", {ENOMEM, EACCES, ENODEV, EPERM, EAGAIN}},
    {"madvise", {ENOMEM, EINVAL, EAGAIN, ENOSYS}},
    {"mincore", {ENOMEM, EPERM, EAGAIN}},
    {"aligned_alloc", {ENOMEM}},
    {"operator new", {ENOMEM}},
    {"process_vm_readv", {CALLS_SHORT, EPERM, ENOMEM, EFAULT, EINTR, ESRCH, ENOSYS}},
    {"memfd_create", {EMFILE, ENOMEM, ENOSYS}},
    {"poll", {EINTR, ENOMEM}},
    {"send", {CALLS_SHORT, EPIPE, ECONNRESET, EAGAIN, EINTR, ENOBUFS}},
    {"recv", {CALLS_SHORT, ECONNRESET, EAGAIN, EINTR, ENOMEM, ETIMEDOUT}},
    {"shutdown", {ENOTCONN}},
    {"clone3", {EAGAIN}},
    {"sched_setaffinity", {EINVAL}},
    {"io_setup", {EAGAIN, ENOMEM, EPERM, ENOSYS}},
    {"io_submit", {EAGAIN, EPERM, EINVAL, ENOMEM}},
    {"io_getevents", {EINTR, EPERM, EINVAL}},
    {"io_destroy", {EPERM}},
    {"a result of AIO", {CALLS_SHORT, EIO, EAGAIN, EINTR, EINVAL, ENOMEM}},
    {"io_uring_setup", {ENOMEM, EPERM, EMFILE, ENOSYS}},
    {"madvise of io_uring", {ENOMEM}},
    {"io_uring_enter", {EINTR, EAGAIN, EBUSY, EPERM, ENOMEM}},
    {"io_uring_enter for results", {EINTR, EPERM}},
    {"a result of io_uring", {CALLS_SHORT, EIO, EAGAIN, EINTR, EINVAL, ENOMEM, EPERM, EOPNOTSUPP}},
};

struct Plan {
    std::mutex mutex;
    std::uint64_t counts[kNumbers] = {};
    std::uint64_t failed = 0;
    std::uint32_t number = kNumbers;  // of the call that fails once
    std::uint64_t turns = 0;          // until then; 0: none does
    std::int32_t code = 0;
    std::uint32_t in_a_million = 0;
    std::mt19937_64 random;
    char last[80] = "";
};

// Never freed: threads of the library may outlive the statics of a process that exits. Not by operator new, which asks it.
Plan &plan() {
    alignas(Plan) static std::byte room[sizeof(Plan)];
    static Plan *const the = new (room) Plan;
    return *the;
}

std::uint32_t codes_of(std::uint32_t number) {
    const auto &codes = kCalls[number].codes;
    return static_cast<std::uint32_t>(std::find(std::begin(codes), std::end(codes), 0) - std::begin(codes));
}

}  // namespace

// Counts a call; what it is to fail with, else 0.
std::int32_t enter(Number number) {
    Plan &p = plan();
    const std::lock_guard lock(p.mutex);
    ++p.counts[number];
    std::int32_t code = 0;
    if (p.turns > 0 && p.number == static_cast<std::uint32_t>(number) && --p.turns == 0) code = p.code;
    if (p.in_a_million > 0 && p.random() % 1000000 < p.in_a_million) {
        code = kCalls[number].codes[p.random() % codes_of(number)];
    }
    if (code != 0) {
        ++p.failed;
        std::snprintf(p.last, sizeof p.last, "%s, call %llu: %s", kCalls[number].name,
                      static_cast<unsigned long long>(p.counts[number]),
                      code > 0 ? std::strerror(code) : "short");
    }
    return code;
}

CALLS_API void calls_reset(void) {
    Plan &p = plan();
    const std::lock_guard lock(p.mutex);
    std::fill(std::begin(p.counts), std::end(p.counts), 0);
    p.failed = p.turns = 0;
    p.in_a_million = 0;
    p.last[0] = 0;
}

CALLS_API const char *calls_name(uint32_t index) {
    return index < kNumbers ? kCalls[index].name : nullptr;
}

CALLS_API int32_t calls_code(uint32_t index, uint32_t which) {
    return index < kNumbers && which < kMostCodes ? kCalls[index].codes[which] : 0;
}

CALLS_API uint64_t calls_count(uint32_t index) {
    const std::lock_guard lock(plan().mutex);
    return index < kNumbers ? plan().counts[index] : 0;
}

CALLS_API uint64_t calls_failed(void) {
    const std::lock_guard lock(plan().mutex);
    return plan().failed;
}

CALLS_API void calls_fail(uint32_t index, uint64_t nth, int32_t code) {
    Plan &p = plan();
    const std::lock_guard lock(p.mutex);
    p.number = index;
    p.turns = nth;
    p.code = code;
}

CALLS_API void calls_fail_at_random(uint64_t seed, uint32_t in_a_million) {
    Plan &p = plan();
    const std::lock_guard lock(p.mutex);
    p.random.seed(seed);
    p.in_a_million = in_a_million;
}

CALLS_API const char *calls_last(void) {
    return plan().last;
}
