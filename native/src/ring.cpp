#include "ring.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace tl {
namespace {

uint64_t stride_of(uint64_t slot_bytes) {
    return round_up(slot_bytes, kPage) + kPage;
}

uint64_t count_of(uint64_t slot_bytes, uint64_t pinned_bytes) {
    return std::max<uint64_t>(2, pinned_bytes / slot_bytes);
}

}  // namespace

Ring::Ring(Driver *driver, int device, uint64_t slot_bytes, uint64_t pinned_bytes)
    : driver_(driver),
      device_(device),
      stride_(stride_of(slot_bytes)),
      count_(count_of(slot_bytes, pinned_bytes)),
      used_(count_),
      entries_(std::make_unique<Entry[]>(count_)) {}

Ring::~Ring() {
    release();
}

// Slots are not cut anew: each is registered by itself, and a copy must not cross into another registration.
bool Ring::begin_again(uint64_t slot_bytes, uint64_t pinned_bytes) {
    const uint64_t wanted = count_of(slot_bytes, pinned_bytes);
    if (stride_of(slot_bytes) > stride_ || wanted > count_) return false;
    used_ = wanted;
    next_ = 0;
    reused_ = pinned_;
    pinned_peak_ = reused_;
    return true;
}

char *Ring::prepare(uint64_t k, std::string *note) {
    Entry &entry = entries_[k];
    if (entry.ready.load(std::memory_order_acquire)) return memory_ + k * stride_;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!memory_) {
            void *map =
                mmap(nullptr, count_ * stride_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (map == MAP_FAILED) return nullptr;
            memory_ = static_cast<char *>(map);
            madvise(memory_, count_ * stride_, MADV_HUGEPAGE);
            // A fork() would make us write to copies of the pages, while the device goes on to read the old ones.
            madvise(memory_, count_ * stride_, MADV_DONTFORK);
        }
    }
    std::lock_guard<std::mutex> lock(entry.mutex);
    if (entry.ready.load(std::memory_order_relaxed)) return memory_ + k * stride_;
    // The driver would touch the pages under a lock of its own, 4 ms a slot and one slot after another; and a call that
    // makes many pages at once keeps other threads of the process from mapping memory meanwhile.
    for (uint64_t at = 0; at < stride_; at += kPage) {
        *static_cast<volatile char *>(memory_ + k * stride_ + at) = 0;
    }
    Failure f = driver_->register_host(memory_ + k * stride_, stride_);
    if (!f) {
        entry.registered = true;
        pinned_ += stride_;
        pinned_peak_ += stride_;
    } else if (!refused_.exchange(true)) {
        *note = "host memory could not be pinned, copies go through pageable memory: " + f.message;
    }
    entry.ready.store(true, std::memory_order_release);
    return memory_ + k * stride_;
}

void Ring::release() {
    if (!memory_) return;
    for (uint64_t k = 0; k < count_; k++) {
        if (entries_[k].registered) driver_->unregister_host(memory_ + k * stride_);
    }
    munmap(memory_, count_ * stride_);
    memory_ = nullptr;
    pinned_ = 0;
}

}  // namespace tl
