// What io_uring and Linux AIO share: threads that keep many reads in flight, each over a ring of its own.
#pragma once

#include <functional>

#include "readers/deep.hpp"

namespace tl {

// A read in flight.
struct AsyncEntry {
    DeepRead read;
    Bounce bounce;
    bool busy = false;
};

// One kernel ring, used by one thread. Results: bytes, or the negative errno.
class AsyncRing {
public:
    virtual ~AsyncRing() = default;
    // The negative errno of a refusal, else 0. Before it nothing else is called.
    virtual int open(uint32_t depth) = 0;
    // Takes the next read of an entry; never more entries than the depth at a time.
    virtual void queue(AsyncEntry *entry) = 0;
    // Hands what was queued to the kernel and waits for at least one result; calls done(entry, result) for each.
    // The negative errno if the ring itself does not work (any more), else 0.
    virtual int turn(const std::function<void(AsyncEntry *, int64_t)> &done) = 0;
    // After a failed turn: waits until the kernel writes to no memory any more, whatever it still answers.
    virtual void drain() = 0;
};

using MakeRing = std::unique_ptr<AsyncRing> (*)();

std::unique_ptr<DeepReader> make_async(RequestSink *sink, int path, const DeepLimits &limits, MakeRing make,
                                       const char *setup_call);

}  // namespace tl
