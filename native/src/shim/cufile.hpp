// libcufile (GPUDirect Storage): the few calls that reading needs. Opened at run time like the drivers, and its own driver
// once a process, at the first file that asks for it: never closed, since engines come and go.
#pragma once

#include <utility>

#include "common.hpp"

namespace tl {

// Opens libcufile and its driver; empty where that is done, else why not.
std::string cufile_driver_refusal();

// Whether reads can go past host memory. Without the nvidia-fs module libcufile reads like anybody else, in what it calls
// compatibility mode.
bool nvidia_fs_loaded();

// A file as libcufile knows it. It has a descriptor of its own, which is none of 0 to 2 (libcufile has been seen to take
// descriptor 0 for none) and is closed after the handle is given back.
class CufileHandle {
public:
    CufileHandle() = default;
    ~CufileHandle() {
        close();
    }
    CufileHandle(CufileHandle &&other) noexcept
        : handle_(std::exchange(other.handle_, nullptr)), fd_(std::exchange(other.fd_, -1)) {}
    CufileHandle &operator=(CufileHandle &&other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(fd_, other.fd_);
        return *this;
    }

    explicit operator bool() const {
        return fd_ >= 0;
    }

    // Registers the file behind a descriptor; empty, or why it is refused. Where that is a lack of descriptors its errno
    // comes back in *shortage.
    std::string open(int fd, int *shortage);

    // Reads into device memory of the calling thread's context and waits for it. Bytes, which may be fewer, 0 at the end of
    // the file, or negative with the reason in *why.
    int64_t read(char *destination, uint64_t nbytes, uint64_t offset, std::string *why) const;

    void close();

private:
    void *handle_ = nullptr;
    int fd_ = -1;
};

}  // namespace tl
