// What each thread did when: off it costs one comparison a chunk.
#pragma once

#include <mutex>
#include <vector>

#include "common.hpp"

namespace tl {

class Trace {
public:
    explicit Trace(bool on) : on_(on) {}

    bool on() const {
        return on_;
    }
    // The time now where the trace is on, else 0.
    uint64_t begin() const {
        return on_ ? now_ns() : 0;
    }
    // Keeps what began at begin_ns and ends now, on this thread; not without memory for it, since nothing depends on it.
    void end(uint64_t begin_ns, tl_stage stage, int file, uint64_t offset, uint64_t nbytes, int path = 0);

    // Copies events from the one numbered first on; how many there are in all.
    uint64_t read(uint64_t first, tl_trace_event *events, uint64_t capacity) const;

private:
    const bool on_;
    mutable std::mutex mutex_;
    std::vector<tl_trace_event> events_;
};

}  // namespace tl
