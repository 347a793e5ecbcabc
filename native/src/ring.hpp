// The pinned ring: slots of staging memory, each made (its pages touched, then registered) by one of the engine's threads,
// several at a time. Small on purpose: it has to stay in the last-level cache.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "shim/driver.hpp"

namespace tl {

class Ring {
public:
    // As many slots as pinned_bytes holds, at least two, and a page more for each.
    Ring(Driver *driver, int device, uint64_t slot_bytes, uint64_t pinned_bytes);
    ~Ring();
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    // For another engine: whether the slots are as large and as many as it wants; it then has so many of them, as they are.
    bool begin_again(uint64_t slot_bytes, uint64_t pinned_bytes);

    std::pair<Driver *, int> device() const {
        return {driver_, device_};
    }
    // Of the slots that the engine uses.
    uint64_t count() const {
        return used_;
    }

    // A slot that nobody has begun to make yet, once each; false when there is none left.
    bool claim(uint64_t *k) {
        return next_.load(std::memory_order_relaxed) < used_ && (*k = next_.fetch_add(1)) < used_;
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
    // What was pinned already when this engine began.
    uint64_t reused_bytes() const {
        return reused_;
    }
    bool refused() const {
        return refused_.load();
    }

    uint64_t releases = 0;       // the keeper's, when the ring was taken
    std::unique_ptr<Ring> next;  // the keeper's, of what is set aside: a list that takes no memory

private:
    struct Entry {
        std::mutex mutex;
        std::atomic<bool> ready{false};
        bool registered = false;
    };

    Driver *driver_;
    int device_;
    uint64_t stride_;  // a slot, and room to shift its content within a page
    uint64_t count_;
    uint64_t used_;
    uint64_t reused_ = 0;
    std::unique_ptr<Entry[]> entries_;
    std::atomic<uint64_t> next_{0};  // to be claimed
    std::mutex mutex_;               // guards mapping
    char *memory_ = nullptr;
    std::atomic<uint64_t> pinned_{0};
    std::atomic<uint64_t> pinned_peak_{0};
    std::atomic<bool> refused_{false};
};

}  // namespace tl
