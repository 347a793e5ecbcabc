// The pinned ring: slots of staging memory, each made (its pages touched, then registered) by one of the engine's threads,
// several at a time. Small on purpose: it has to stay in the last-level cache.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "shim/driver.hpp"

namespace tl {

class Ring {
public:
    // As many slots as pinned_bytes holds, at least two, and a page more for each.
    Ring(Driver *driver, uint64_t slot_bytes, uint64_t pinned_bytes);
    ~Ring();
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    uint64_t count() const {
        return count_;
    }

    // A slot that nobody has begun to make yet, once each; false when there is none left.
    bool claim(uint64_t *k) {
        return next_.load(std::memory_order_relaxed) < count_ && (*k = next_.fetch_add(1)) < count_;
    }

    // The memory of slot k, ready to be filled. A registration that is refused leaves it pageable (slower, still right):
    // *note then says so, once. Null if there is no memory at all.
    char *prepare(uint64_t k, std::string *note);

    // After the last copy: gives everything back.
    void release();

    uint64_t pinned_bytes() const {
        return pinned_.load();
    }
    uint64_t pinned_peak_bytes() const {
        return pinned_peak_.load();
    }

private:
    struct Entry {
        std::mutex mutex;
        std::atomic<bool> ready{false};
        bool registered = false;
    };

    Driver *driver_;
    uint64_t stride_;  // a slot, and room to shift its content within a page
    uint64_t count_;
    std::unique_ptr<Entry[]> entries_;
    std::atomic<uint64_t> next_{0};  // to be claimed
    std::mutex mutex_;               // guards mapping
    char *memory_ = nullptr;
    std::atomic<uint64_t> pinned_{0};
    std::atomic<uint64_t> pinned_peak_{0};
    std::atomic<bool> refused_{false};
};

}  // namespace tl
