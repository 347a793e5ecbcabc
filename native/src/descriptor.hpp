// A descriptor that closes with its scope, unless somebody else takes it.
#pragma once

#include <unistd.h>

#include <utility>

namespace tl {

class Descriptor {
public:
    // Below 0: there is none.
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;

    int get() const {
        return fd_;
    }
    int take() {
        return std::exchange(fd_, -1);
    }

private:
    int fd_;
};

}  // namespace tl
