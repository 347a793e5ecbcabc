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
    // Where [begin, end) goes: for cuFile an address of the device, for others one of whole blocks that fit, or else null:
    // through a buffer.
    char *in_place;
    uint64_t begin_ns = 0;  // when its first read was begun
};

// What a reader needs of the engine; implemented by it, called from the readers' threads.
class RequestSink {
public:
    virtual ~RequestSink() = default;
    virtual bool stopping() const = 0;
    virtual void enter_thread() = 0;  // first call of every thread: signals, device
    // All bytes of the request are there; bounced: where its first byte lies, or null if they are in place.
    virtual void complete(const Request &request, int path, const char *bounced) = 0;
    // This way of reading the file was refused (not: the file is bad), after so many bytes that do not count.
    virtual void refused(const Request &request, int path, const std::string &why, uint64_t got) = 0;
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
    uint32_t depth = 1;    // requests in flight
    uint32_t threads = 1;  // threads that may use a CPU
};
std::unique_ptr<DeepReader> make_pread(RequestSink *sink, int path, const DeepLimits &limits);
std::unique_ptr<DeepReader> make_uring(RequestSink *sink, int path, const DeepLimits &limits);
std::unique_ptr<DeepReader> make_aio(RequestSink *sink, int path, const DeepLimits &limits);
std::unique_ptr<DeepReader> make_cufile(RequestSink *sink, const DeepLimits &limits);

// True where reads of a path go around the page cache.
constexpr bool is_direct(int path) {
    return path == TL_PATH_PREAD_DIRECT || path == TL_PATH_URING_DIRECT || path == TL_PATH_AIO_DIRECT;
}

// True where an errno means "not this way", so that another way may still work.
bool means_refused(int os_errno);

}  // namespace tl
