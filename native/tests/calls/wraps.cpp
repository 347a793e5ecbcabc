// In place of the library's calls.
#include "numbers.hpp"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <iterator>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#ifdef TL_HAVE_URING
#include <liburing.h>
#endif

namespace {

constexpr std::size_t kPage = 4096;

std::atomic<std::int64_t> mapped{0};

// As the kernel: -1 with errno set.
bool fails(Number number) {
    const std::int32_t code = enter(number);
    if (code > 0) errno = code;
    return code > 0;
}

// Of what may be a direct read no part of a block: that would be the end of the file.
std::size_t shortened(Number number, std::size_t nbytes) {
    if (nbytes >= 2 * kPage) return nbytes / 2 / kPage * kPage;
    return number == kPread || nbytes < 2 ? nbytes : nbytes / 2;
}

// A call that moves so many bytes at most.
template <class Move>
ssize_t moving(Number number, std::size_t nbytes, Move move) {
    const std::int32_t code = enter(number);
    if (code > 0) {
        errno = code;
        return -1;
    }
    return move(code == CALLS_SHORT ? shortened(number, nbytes) : nbytes);
}

// The first bytes of some buffers.
struct Buffers {
    Buffers(const iovec *from, std::size_t count) : count(std::min(count, std::size(all))) {
        std::copy_n(from, this->count, all);
        for (std::size_t k = 0; k < this->count; ++k) nbytes += all[k].iov_len;
    }
    void cut(std::size_t left) {
        for (std::size_t k = 0; k < count; ++k) {
            all[k].iov_len = std::min(all[k].iov_len, left);
            left -= all[k].iov_len;
        }
    }
    iovec all[1024];  // as many as the kernel takes; a vector's memory would be refused as the library's is
    std::size_t count, nbytes = 0;
};

// What is to stand in place of the result of a read: bytes, or the negative errno.
std::int64_t altered(Number number, std::int64_t result) {
    const std::int32_t code = enter(number);
    if (code > 0) return -code;
    const bool cut = code == CALLS_SHORT && result >= static_cast<std::int64_t>(2 * kPage);
    return cut ? static_cast<std::int64_t>(shortened(number, static_cast<std::size_t>(result))) : result;
}

}  // namespace

CALLS_API int64_t calls_mapped_bytes(void) {
    return mapped.load();
}

// __real_ is what would have been called (ld's --wrap).
extern "C" {

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    return fails(kOpen) ? -1 : __real_open(path, flags);  // the library makes no file
}

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...) {
    std::va_list more;
    va_start(more, command);
    const long argument = va_arg(more, long);
    va_end(more);
    return fails(kFcntl) ? -1 : __real_fcntl(fd, command, argument);
}

int __real_fstat(int fd, struct stat *status);
int __wrap_fstat(int fd, struct stat *status) {
    return fails(kFstat) ? -1 : __real_fstat(fd, status);
}

int __real_fstatfs(int fd, struct statfs *status);
int __wrap_fstatfs(int fd, struct statfs *status) {
    return fails(kFstatfs) ? -1 : __real_fstatfs(fd, status);
}

int __real_stat(const char *path, struct stat *status);
int __wrap_stat(const char *path, struct stat *status) {
    return fails(kStat) ? -1 : __real_stat(path, status);
}

int __real_faccessat(int folder, const char *path, int mode, int flags);
int __wrap_faccessat(int folder, const char *path, int mode, int flags) {
    return fails(kFaccessat) ? -1 : __real_faccessat(folder, path, mode, flags);
}

ssize_t __real_read(int fd, void *to, size_t nbytes);
ssize_t __wrap_read(int fd, void *to, size_t nbytes) {
    return moving(kRead, nbytes, [&](size_t now) { return __real_read(fd, to, now); });
}

off_t __real_lseek(int fd, off_t offset, int whence);
off_t __wrap_lseek(int fd, off_t offset, int whence) {
    return fails(kLseek) ? -1 : __real_lseek(fd, offset, whence);
}

ssize_t __real_pread(int fd, void *to, size_t nbytes, off_t offset);
ssize_t __wrap_pread(int fd, void *to, size_t nbytes, off_t offset) {
    return moving(kPread, nbytes, [&](size_t now) { return __real_pread(fd, to, now, offset); });
}

ssize_t __real_preadv(int fd, const iovec *buffers, int count, off_t offset);
ssize_t __wrap_preadv(int fd, const iovec *buffers, int count, off_t offset) {
    Buffers some(buffers, static_cast<size_t>(count));
    return moving(kPreadv, some.nbytes, [&](size_t now) {
        some.cut(now);
        return __real_preadv(fd, some.all, count, offset);
    });
}

ssize_t __real_pwrite(int fd, const void *from, size_t nbytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *from, size_t nbytes, off_t offset) {
    return fails(kPwrite) ? -1 : __real_pwrite(fd, from, nbytes, offset);
}

int __real_ftruncate(int fd, off_t nbytes);
int __wrap_ftruncate(int fd, off_t nbytes) {
    return fails(kFtruncate) ? -1 : __real_ftruncate(fd, nbytes);
}

int __real_fallocate(int fd, int mode, off_t offset, off_t nbytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t nbytes) {
    return fails(kFallocate) ? -1 : __real_fallocate(fd, mode, offset, nbytes);
}

int __real_posix_fadvise(int fd, off_t offset, off_t nbytes, int advice);
int __wrap_posix_fadvise(int fd, off_t offset, off_t nbytes, int advice) {
    const std::int32_t code = enter(kFadvise);
    return code != 0 ? code : __real_posix_fadvise(fd, offset, nbytes, advice);
}

void *__real_mmap(void *address, size_t nbytes, int access, int flags, int fd, off_t offset);
void *__wrap_mmap(void *address, size_t nbytes, int access, int flags, int fd, off_t offset) {
    if (fails(kMmap)) return MAP_FAILED;
    void *map = __real_mmap(address, nbytes, access, flags, fd, offset);
    // A fixed map takes the place of what is counted already.
    if (map != MAP_FAILED && !(flags & MAP_FIXED))
        mapped += static_cast<std::int64_t>((nbytes + kPage - 1) / kPage * kPage);
    return map;
}

int __real_munmap(void *address, size_t nbytes);
int __wrap_munmap(void *address, size_t nbytes) {
    const int code = __real_munmap(address, nbytes);
    if (code == 0) mapped -= static_cast<std::int64_t>((nbytes + kPage - 1) / kPage * kPage);
    return code;
}

int __real_madvise(void *address, size_t nbytes, int advice);
int __wrap_madvise(void *address, size_t nbytes, int advice) {
    return fails(kMadvise) ? -1 : __real_madvise(address, nbytes, advice);
}

int __real_mincore(void *address, size_t nbytes, unsigned char *pages);
int __wrap_mincore(void *address, size_t nbytes, unsigned char *pages) {
    return fails(kMincore) ? -1 : __real_mincore(address, nbytes, pages);
}

void *__real_aligned_alloc(size_t alignment, size_t nbytes);
void *__wrap_aligned_alloc(size_t alignment, size_t nbytes) {
    return fails(kAlignedAlloc) ? nullptr : __real_aligned_alloc(alignment, nbytes);
}

// operator new.
void *__real__Znwm(size_t nbytes);
void *__wrap__Znwm(size_t nbytes) {
    if (enter(kNew) != 0) throw std::bad_alloc();
    return __real__Znwm(nbytes);
}

ssize_t __real_process_vm_readv(pid_t process, const iovec *here, unsigned long count, const iovec *there,
                                unsigned long sources, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t process, const iovec *here, unsigned long count, const iovec *there,
                                unsigned long sources, unsigned long flags) {
    Buffers some(here, count);
    return moving(kProcessRead, some.nbytes, [&](size_t now) {
        some.cut(now);
        return __real_process_vm_readv(process, some.all, count, there, sources, flags);
    });
}

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags) {
    return fails(kMemfd) ? -1 : __real_memfd_create(name, flags);
}

int __real_poll(pollfd *entries, nfds_t count, int milliseconds);
int __wrap_poll(pollfd *entries, nfds_t count, int milliseconds) {
    return fails(kPoll) ? -1 : __real_poll(entries, count, milliseconds);
}

ssize_t __real_send(int fd, const void *from, size_t nbytes, int flags);
ssize_t __wrap_send(int fd, const void *from, size_t nbytes, int flags) {
    return moving(kSend, nbytes, [&](size_t now) { return __real_send(fd, from, now, flags); });
}

ssize_t __real_recv(int fd, void *to, size_t nbytes, int flags);
ssize_t __wrap_recv(int fd, void *to, size_t nbytes, int flags) {
    return moving(kRecv, nbytes, [&](size_t now) { return __real_recv(fd, to, now, flags); });
}

int __real_shutdown(int fd, int how);
int __wrap_shutdown(int fd, int how) {
    const int code = __real_shutdown(fd, how);
    return fails(kShutdown) ? -1 : code;
}

int __real_pthread_setaffinity_np(pthread_t thread, size_t nbytes, const cpu_set_t *cpus);
int __wrap_pthread_setaffinity_np(pthread_t thread, size_t nbytes, const cpu_set_t *cpus) {
    const std::int32_t code = enter(kAffinity);
    return code != 0 ? code : __real_pthread_setaffinity_np(thread, nbytes, cpus);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    long a[6];
    std::va_list more;
    va_start(more, number);
    for (long &argument : a) argument = va_arg(more, long);
    va_end(more);
    const auto real = [&] { return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]); };
    switch (number) {
        case SYS_statx:
            return fails(kStatx) ? -1 : real();
        case 451:  // cachestat
            return fails(kCachestat) ? -1 : real();
        case SYS_io_setup:
            return fails(kIoSetup) ? -1 : real();
        case SYS_io_submit:
            return fails(kIoSubmit) ? -1 : real();
        case SYS_io_destroy:
            return fails(kIoDestroy) ? -1 : real();
        case SYS_io_getevents: {
            if (fails(kIoGetevents)) return -1;
            const long count = real();
            auto *events = reinterpret_cast<io_event *>(a[3]);
            for (long i = 0; i < count; i++) events[i].res = altered(kAioResult, events[i].res);
            return count;
        }
        default:
            return real();
    }
}

#ifdef TL_HAVE_URING
int __real_io_uring_queue_init(unsigned entries, io_uring *ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned entries, io_uring *ring, unsigned flags) {
    const std::int32_t code = enter(kUringSetup);
    return code != 0 ? -code : __real_io_uring_queue_init(entries, ring, flags);
}

int __real_io_uring_ring_dontfork(io_uring *ring);
int __wrap_io_uring_ring_dontfork(io_uring *ring) {
    const std::int32_t code = enter(kUringDontfork);
    return code != 0 ? -code : __real_io_uring_ring_dontfork(ring);
}

int __real_io_uring_submit_and_wait(io_uring *ring, unsigned count);
int __wrap_io_uring_submit_and_wait(io_uring *ring, unsigned count) {
    if (const std::int32_t code = enter(kUringEnter)) return -code;
    const int submitted = __real_io_uring_submit_and_wait(ring, count);
    unsigned head;
    io_uring_cqe *cqe;
    io_uring_for_each_cqe(ring, head, cqe) cqe->res = static_cast<int>(altered(kUringResult, cqe->res));
    return submitted;
}

int __real___io_uring_get_cqe(io_uring *ring, io_uring_cqe **cqe, unsigned submit, unsigned count,
                              sigset_t *signals);
int __wrap___io_uring_get_cqe(io_uring *ring, io_uring_cqe **cqe, unsigned submit, unsigned count,
                              sigset_t *signals) {
    const std::int32_t code = enter(kUringWait);
    return code != 0 ? -code : __real___io_uring_get_cqe(ring, cqe, submit, count, signals);
}
#endif

// std::thread::_M_start_thread, the one function of libstdc++ that starts a thread.
using State = std::unique_ptr<std::thread::_State>;
void __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
    std::thread *thread, State state, void (*depend)());
void __wrap__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
    std::thread *thread, State state, void (*depend)()) {
    if (const std::int32_t code = enter(kThread)) throw std::system_error(code, std::generic_category());
    __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
        thread, std::move(state), depend);
}

}  // extern "C"
