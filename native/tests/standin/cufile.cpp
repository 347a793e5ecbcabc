// The entry points of libcufile.so.0 that the engine uses. Device memory is host memory. A code to inject is a CUfileOpError
// from 5001 on or, for cuFileRead, also an errno.
#include "entry.hpp"
#include "standin.h"
#include "state.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

using namespace standin;

namespace {

constexpr int kBaseError = 5000;
constexpr int kInvalidFileType = 5018;
constexpr int kHandleNotRegistered = 5027;
constexpr std::uint64_t kBlock = 4096;

struct Status {
    int err;
    int cu_err;
};

struct Descriptor {
    int type;
    union {
        int fd;
        void *handle;
    };
    const void *fs_ops;
};

struct Files {
    std::mutex mutex;
    bool driver_open = false;
    std::map<std::uintptr_t, std::pair<int, ino_t>> open;  // descriptor and inode by handle
    std::uintptr_t next = 0x1000;
    std::uint64_t misuses = 0;
    std::uint64_t most = 0;
};

Files &files() {
    static Files *const the = new Files;
    return *the;
}

void misuse() {
    std::lock_guard lock(files().mutex);
    ++files().misuses;
}

bool still_is(int fd, ino_t inode) {
    struct stat about {};
    return fstat(fd, &about) == 0 && about.st_ino == inode;
}

// A thread that reads needs a context, as with the driver; the stand-in for CUDA, where it is loaded, knows.
bool has_context() {
    void *function = dlsym(RTLD_DEFAULT, "cuCtxGetCurrent");
    if (function == nullptr) {
        return true;
    }
    std::uintptr_t context = 0;
    const int code = reinterpret_cast<int (*)(std::uintptr_t *)>(function)(&context);
    return code != kSuccess || context != 0;
}

// Whole blocks through memory of its own, as compatibility mode reads what does not fit direct I/O.
ssize_t read_through(int fd, void *destination, std::size_t nbytes, off_t offset) {
    const std::uint64_t shift = static_cast<std::uint64_t>(offset) % kBlock;
    const std::size_t whole = (shift + nbytes + kBlock - 1) / kBlock * kBlock;
    std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kBlock, whole), &std::free);
    const ssize_t got = pread(fd, memory.get(), whole, offset - static_cast<off_t>(shift));
    if (got < 0) {
        return -1;
    }
    const std::uint64_t there = static_cast<std::uint64_t>(got);
    const std::size_t delivered = there > shift ? std::min<std::size_t>(there - shift, nbytes) : 0;
    std::memcpy(destination, static_cast<char *>(memory.get()) + shift, delivered);
    return static_cast<ssize_t>(delivered);
}

}  // namespace

const char *const standin::kEntries[] = {"cuFileDriverOpen", "cuFileHandleRegister", "cuFileHandleDeregister",
                                         "cuFileRead", nullptr};

STANDIN_ENTRY Status cuFileDriverOpen() {
    if (const int injected = enter("cuFileDriverOpen")) {
        return {injected, 0};
    }
    std::lock_guard lock(files().mutex);
    files().misuses += files().driver_open ? 1 : 0;
    files().driver_open = true;
    return {kSuccess, 0};
}

STANDIN_ENTRY Status cuFileHandleRegister(void **handle, Descriptor *descriptor) {
    if (const int injected = enter("cuFileHandleRegister")) {
        return {injected, 0};
    }
    struct stat about {};
    if (descriptor->type != 1 || fstat(descriptor->fd, &about) != 0) {
        misuse();
        return {kInvalidFileType, 0};
    }
    std::lock_guard lock(files().mutex);
    files().misuses += files().driver_open && descriptor->fd >= 3 ? 0 : 1;
    files().open[++files().next] = {descriptor->fd, about.st_ino};
    *handle = reinterpret_cast<void *>(files().next);
    return {kSuccess, 0};
}

STANDIN_ENTRY void cuFileHandleDeregister(void *handle) {
    enter("cuFileHandleDeregister");
    std::lock_guard lock(files().mutex);
    auto found = files().open.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == files().open.end() || !still_is(found->second.first, found->second.second)) {
        ++files().misuses;
    }
    files().open.erase(reinterpret_cast<std::uintptr_t>(handle));
}

STANDIN_ENTRY ssize_t cuFileRead(void *handle, void *memory, size_t nbytes, off_t offset, off_t shift) {
    const int injected = enter("cuFileRead");
    if (injected > kBaseError) {
        return -injected;
    }
    if (injected != 0) {
        errno = injected;
        return -1;
    }
    int fd = -1;
    {
        std::lock_guard lock(files().mutex);
        auto found = files().open.find(reinterpret_cast<std::uintptr_t>(handle));
        if (found == files().open.end()) {
            ++files().misuses;
            return -kHandleNotRegistered;
        }
        fd = found->second.first;
        nbytes = files().most ? std::min<std::size_t>(nbytes, files().most) : nbytes;
    }
    if (!has_context()) {
        misuse();
    }
    if (const std::uint64_t delay_us = state().delay_us) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    }
    return read_through(fd, static_cast<char *>(memory) + shift, nbytes, offset);
}

STANDIN_ENTRY void standin_cufile_reset(void) {
    standin_reset();
    std::lock_guard lock(files().mutex);
    files().misuses = 0;
    files().most = 0;
}

STANDIN_ENTRY void standin_cufile_set_most(uint64_t nbytes) {
    std::lock_guard lock(files().mutex);
    files().most = nbytes;
}

STANDIN_ENTRY uint64_t standin_cufile_handles(void) {
    std::lock_guard lock(files().mutex);
    return files().open.size();
}

STANDIN_ENTRY uint64_t standin_cufile_misuses(void) {
    std::lock_guard lock(files().mutex);
    return files().misuses;
}
