// One file of a load: opened when its first chunk comes, closed when none is left, and how its bytes are to be read.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "common.hpp"
#include "residency.hpp"
#include "shim/cufile.hpp"

namespace tl {

// How the bytes of a file are read: what is cached by one path, what is not by the other. -1: not by this file.
struct Route {
    int backend = -1;           // tl_backend
    int cached_path = -1;       // tl_path that a copying thread takes
    int deep_path = -1;         // tl_path of a deep reader
    bool by_residency = false;  // ask chunk by chunk; otherwise the one path that is set takes all
};

// Whether an open failed because this process, or the machine, has no descriptor free just now.
bool no_descriptors(int os_errno);

class File {
public:
    File(int index, std::string path, uint64_t device, uint64_t inode, uint64_t nbytes)
        : index(index), path(std::move(path)), device_(device), inode_(inode), nbytes_(nbytes) {}
    ~File() {
        close();
    }
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    // Under mutex: opens the plain descriptor if it is not open, and checks that it is the file that was meant.
    Failure open_plain();
    // Under mutex: opens the same file for direct I/O; the errno of a refusal, 0 if it is open. Lacking a descriptor
    // is no refusal: it is kept in shortage.
    int open_direct();
    // Under mutex: has libcufile take the file; empty, or why it does not. A lack of descriptors is kept in shortage.
    std::string open_cufile();
    void close();

    // Remembers a refusal for the statistics, once each.
    void note(const std::string &text);

    // The failure of a read that met the end of the file.
    Failure truncated(uint64_t offset, uint64_t wanted, uint64_t got) const;
    Failure open_failed(int os_errno) const;
    Failure read_failed(int os_errno, uint64_t offset, uint64_t wanted, uint64_t got) const;

    // As announced, and checked when it is opened.
    uint64_t nbytes() const {
        return nbytes_;
    }

    const int index;
    const std::string path;
    std::mutex mutex;  // guards opening and the route; taken before the engine's lock, never under it
    Route route;
    size_t candidate = 0;  // position in the engine's list of back ends
    bool routed = false;
    std::string notes;  // refusals, one line each
    Residency::Method residency = Residency::Method::kUnknown;
    int plain_fd = -1;
    int direct_fd = -1;
    CufileHandle cufile;
    int shortage = 0;          // errno of an open_direct() or open_cufile() that found no descriptor free
    uint64_t block = kPage;    // offsets, sizes and addresses of direct reads are multiples of it
    uint64_t outstanding = 0;  // chunks submitted and not complete; under the engine's lock

private:
    const uint64_t device_;
    const uint64_t inode_;
    const uint64_t nbytes_;
};

}  // namespace tl
