// What every deep reader shares: whole blocks where reads are direct, short reads, the end of the file, a buffer for what
// does not fit its place.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "readers/reader.hpp"

namespace tl {

// Host memory at a fitting address for requests that cannot land in place; grows to what is asked.
class Bounce {
public:
    Bounce() = default;
    ~Bounce();
    Bounce(const Bounce &) = delete;
    Bounce &operator=(const Bounce &) = delete;
    char *reserve(uint64_t nbytes);  // null if there is no memory

private:
    char *memory_ = nullptr;
    uint64_t nbytes_ = 0;
};

// One request on its way: which read to issue next, and what its result means.
class DeepRead {
public:
    enum class Outcome { kMore, kDone, kFailed, kRefused };

    // False if there is no memory for the buffer.
    bool begin(const Request &request, bool direct, Bounce *bounce);

    char *buffer() const {
        return buffer_ + got_;
    }
    uint64_t offset() const {
        return begin_ + got_;
    }
    uint64_t nbytes() const {
        return end_ - begin_ - got_;
    }
    int fd() const {
        return direct_ ? request_.file->direct_fd : request_.file->plain_fd;
    }
    const Request &request() const {
        return request_;
    }
    // Where the first byte of the request lies, null if it landed in place.
    const char *bounced() const {
        return request_.in_place ? nullptr : buffer_ + (request_.begin - begin_);
    }

    // result: bytes, or the negative errno. On kFailed *why is set, on kRefused its os_errno.
    Outcome on_result(int64_t result, Failure *why);

private:
    Request request_{};
    bool direct_ = false;
    char *buffer_ = nullptr;
    uint64_t block_ = 1;  // unit of direct reads; 1 for buffered ones
    uint64_t begin_ = 0;  // whole blocks around the request
    uint64_t end_ = 0;
    uint64_t got_ = 0;  // a multiple of the block while more is to come
    int retries_ = 0;   // answers without progress that asked to try again
};

// Requests waiting for a deep reader. Bounded, so that what is cached is judged shortly before it is read.
class RequestQueue {
public:
    RequestQueue(RequestSink *sink, size_t limit) : sink_(sink), limit_(limit) {}

    void push(const Request &request);
    // Waits for a request; false when the engine stops. With wait false: false too if none is there.
    bool pop(Request *request, bool wait);
    void wake();  // the engine stops
    size_t size();

private:
    RequestSink *sink_;
    const size_t limit_;
    std::mutex mutex_;
    std::condition_variable not_empty_;
    std::condition_variable not_full_;
    std::deque<Request> queue_;
};

}  // namespace tl
