#include "trace.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace tl {
namespace {

constexpr size_t kMostEvents = 1 << 20;

}  // namespace

void Trace::end(uint64_t begin_ns, tl_stage stage, int file, uint64_t offset, uint64_t nbytes, int path) {
    if (!on_) return;
    static thread_local const auto thread = static_cast<uint32_t>(syscall(SYS_gettid));
    const tl_trace_event event{begin_ns, now_ns(), offset, nbytes,
                               file,     thread,   stage,  static_cast<uint32_t>(path)};
    std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() >= kMostEvents) return;
    try {
        events_.push_back(event);
    } catch (const std::bad_alloc &) {
    }
}

uint64_t Trace::read(uint64_t first, tl_trace_event *events, uint64_t capacity) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (first < events_.size()) {
        const uint64_t count = std::min<uint64_t>(capacity, events_.size() - first);
        std::copy_n(events_.begin() + static_cast<int64_t>(first), count, events);
    }
    return events_.size();
}

}  // namespace tl
