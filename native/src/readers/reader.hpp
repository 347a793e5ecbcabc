// The two kinds of reader.
//
//   CachedReader  takes bytes out of the page cache on the thread that asks: its limit is a CPU.
//   DeepReader    waits for storage: many requests in flight, completed on threads of its own.
//
// One implementation a file; the engine chooses by the route of a file and knows no other difference.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <memory>

#include "common.hpp"
#include "file.hpp"
#include "plan.hpp"

namespace tl {

// Bytes read into the buffers in turn, or the negative errno. May be short; 0 is the end of the file. Never a signal,
// also where the file was cut short under it.
using CachedRead = int64_t (*)(const File &file, const iovec *buffers, int count, uint64_t offset);
int64_t pread_buffered(const File &file, const iovec *buffers, int count, uint64_t offset);
int64_t mmap_copy(const File &file, const iovec *buffers, int count, uint64_t offset);

// Part of a chunk that a deep reader brings.
struct Request {
    Chunk *chunk;
    File *file;
    uint64_t begin;  // range of the file
    uint64_t end;
    char *
        in_place;  // where [begin, end) goes if it is whole blocks at a fitting address, else null: through a buffer
};

// What a reader needs of the engine; implemented by it, called from the readers' threads.
class RequestSink {
public:
    virtual ~RequestSink() = default;
    virtual bool stopping() const = 0;
    virtual void enter_thread() = 0;  // first call of every thread: signals, device
    // All bytes of the request are there; bounced: where its first byte lies, or null if they are in place.
    virtual void complete(const Request &request, int path, const char *bounced) = 0;
    // The kernel refused this way of reading the file (not: the file is bad).
    virtual void refused(const Request &request, int path, int os_errno) = 0;
    virtual void failed(const Failure &failure) = 0;
    virtual void count_read(int path, uint64_t nbytes) = 0;
};

class DeepReader {
public:
    virtual ~DeepReader() = default;
    // Empty if the machine lets it work, else why not. Called once, before any push.
    virtual Failure start() = 0;
    // Waits while too much is queued; gives up silently when the engine stops.
    virtual void push(const Request &request) = 0;
    // The engine has begun to stop: nobody waits in push any more.
    virtual void wake() = 0;
    // After it: returns when nothing is in flight and all threads have ended.
    virtual void join() = 0;
    virtual uint32_t threads() const = 0;
};

struct DeepLimits {
    uint32_t depth = 1;
    uint64_t chunk_bytes = 0;
};
std::unique_ptr<DeepReader> make_pread_direct(RequestSink *sink, const DeepLimits &limits);
std::unique_ptr<DeepReader> make_uring_direct(RequestSink *sink, const DeepLimits &limits);

// True where an errno means "not this way", so that another way may still work.
bool means_refused(int os_errno);

}  // namespace tl
