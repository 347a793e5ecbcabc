#include "fork/origin.hpp"

#include <sys/uio.h>

#include <cerrno>

#include "fork/streaming.hpp"

namespace tl {
namespace {

// Repeats what moves a part of the bytes until it has moved all.
template <class Part>
Failure all(uint64_t nbytes, const char *what, Part part) {
    for (uint64_t done = 0; done < nbytes;) {
        const ssize_t moved = part(done);
        if (moved > 0) {
            done += static_cast<uint64_t>(moved);
        } else if (moved == 0) {
            return failure(TL_ERR_READ, std::string(what) + ": it ends before the region does");
        } else if (errno != EINTR) {
            return os_failure(TL_ERR_READ, errno, what);
        }
    }
    return {};
}

}  // namespace

Failure Origin::find(uint64_t offset, uint64_t nbytes, uint64_t *at) const {
    if (offset > origin_.nbytes || nbytes > origin_.nbytes - offset)
        return failure(TL_ERR_READ, "the seed has not said where it has these bytes");
    *at = origin_.address + offset;
    return {};
}

Failure Origin::copy(uint64_t offset, char *to, uint64_t nbytes, const char **seen) const {
    *seen = to;
    uint64_t at = 0;
    if (Failure f = find(offset, nbytes, &at)) return f;
    switch (origin_.kind) {
        case TL_ORIGIN_HERE:
            *seen = reinterpret_cast<const char *>(at);
            copy_streaming(to, *seen, nbytes);
            return {};
        case TL_ORIGIN_PROCESS:
            return from_process(at, to, nbytes);
        case TL_ORIGIN_DEVICE:
            return stage_ ? stage_->fetch(at, to, nbytes)
                          : failure(TL_ERR_ARGUMENT, "memory of a device is read through a staging");
        default:
            return failure(TL_ERR_ARGUMENT, "no kind of origin: " + std::to_string(origin_.kind));
    }
}

Failure Origin::from_process(uint64_t at, char *to, uint64_t nbytes) const {
    return all(nbytes, "cannot read the seed's memory", [&](uint64_t done) {
        const iovec here{to + done, nbytes - done};
        const iovec there{reinterpret_cast<void *>(at + done), nbytes - done};
        return process_vm_readv(origin_.handle, &here, 1, &there, 1, 0);
    });
}

}  // namespace tl
