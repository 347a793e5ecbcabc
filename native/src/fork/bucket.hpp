// A token bucket for several threads, whose clock the caller has. Whoever takes more than there is owes it: the next waits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace tl {

class Bucket {
public:
    // rate: bytes a second, 0 for no limit.
    Bucket(uint64_t rate, uint64_t burst, uint64_t now_ns)
        : rate_(static_cast<double>(rate)),
          burst_(static_cast<double>(burst)),
          tokens_(burst_),
          at_ns_(now_ns) {}

    // Bytes a second, 0 for no limit.
    uint64_t rate() const {
        return static_cast<uint64_t>(rate_);
    }

    // Nanoseconds to wait before these bytes may go; they are taken.
    uint64_t take(uint64_t nbytes, uint64_t now_ns) {
        if (rate_ == 0) return 0;
        std::lock_guard<std::mutex> lock(mutex_);
        if (now_ns > at_ns_) {
            tokens_ = std::min(burst_, tokens_ + static_cast<double>(now_ns - at_ns_) * 1e-9 * rate_);
            at_ns_ = now_ns;
        }
        const double owed = std::max(0.0, -tokens_);
        tokens_ -= static_cast<double>(nbytes);
        return static_cast<uint64_t>(owed / rate_ * 1e9);
    }

private:
    const double rate_, burst_;
    std::mutex mutex_;
    double tokens_;
    uint64_t at_ns_;
};

}  // namespace tl
