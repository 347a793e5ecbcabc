#include "copier.hpp"

#include "mutants.hpp"
#include "starting.hpp"

#include <algorithm>

namespace tl {

Copier::~Copier() {
    stop();
}

Failure Copier::start() {
    if (Failure f = driver_->stream_create(&stream_)) return f;
    if (Failure f = driver_->event_create(&fence_)) return f;
    events_.reserve(slots_);  // an event that is made has its place
    for (uint64_t i = 0; i < slots_; i++) {
        Event event = nullptr;
        if (Failure f = driver_->event_create(&event)) return f;
        events_.push_back(event);
    }
    const int code = start_thread([this] { thread_ = std::thread([this] { wait_for_copies(); }); });
    return code == 0 ? Failure{} : os_failure(TL_ERR_MEMORY, code, "cannot start a thread");
}

Failure Copier::wait_for_consumer(Stream consumer, uint64_t *fence) {
    if (!kConsumerFence) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    if (Failure f = driver_->event_record(fence_, consumer)) return f;
    if (Failure f = driver_->stream_wait(stream_, fence_)) return f;
    *fence = ++fences_;
    return {};
}

Failure Copier::pass_fence(uint64_t fence) {
    if (!kHostFence || fence <= passed_.load(std::memory_order_acquire)) return {};
    uint64_t until;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        until = fences_;
    }
    if (Failure f = driver_->stream_synchronize(stream_)) return f;
    uint64_t before = passed_.load(std::memory_order_relaxed);
    while (before < until && !passed_.compare_exchange_weak(before, until, std::memory_order_release)) {
    }
    return {};
}

Failure Copier::make_consumer_wait(Stream consumer) {
    if (!kArrivalFence) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    if (Failure f = driver_->event_record(fence_, stream_)) return f;
    return driver_->stream_wait(consumer, fence_);
}

// One copy for each allocation: destinations of load_into that follow each other may lie in several.
Failure Copier::copy_by_allocation(uint64_t destination, const char *source, uint64_t nbytes,
                                   uint64_t *copies) {
    while (nbytes > 0) {
        const uint64_t part = within_allocation(driver_, destination, nbytes);
        if (Failure f = driver_->copy_to_device(destination, source, part, stream_)) return f;
        ++*copies;
        destination += part;
        source += part;
        nbytes -= part;
    }
    return {};
}

Failure Copier::issue(const Slot &slot, const char *base, uint64_t *copies) {
    const Event event = events_[slot.place];
    const uint64_t begin = now_ns();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Copy &copy : slot.copies) {
        if (Failure f = copy_by_allocation(copy.destination, base + copy.where, copy.nbytes, copies))
            return f;
    }
    if (Failure f = driver_->event_record(event, stream_)) return f;
    issued_.push_back({slot.index, event, begin});
    issued_cv_.notify_one();
    return {};
}

void Copier::wait_for_copies() {
    callbacks_.enter_thread();
    for (;;) {
        Issued issued;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            issued_cv_.wait(lock, [&] { return !issued_.empty() || ended_; });
            if (issued_.empty()) return;
            issued = issued_.front();
            issued_.pop_front();
        }
        if (kSlotFence) {
            if (Failure f = driver_->event_synchronize(issued.event)) {
                callbacks_.failed(f);
                return;
            }
        }
        callbacks_.copied(issued.slot_index, issued.begin_ns);
    }
}

Failure Copier::stop() {
    Failure first;
    const auto keep = [&first](const Failure &f) { keep_first(&first, f); };
    // The stream first: it also holds copies whose event could not be recorded.
    if (stream_ && kDrain) keep(driver_->stream_synchronize(stream_));
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
        issued_cv_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    for (Event event : events_) keep(driver_->event_destroy(event));
    events_.clear();
    if (fence_) keep(driver_->event_destroy(fence_));
    if (stream_) keep(driver_->stream_destroy(stream_));
    fence_ = stream_ = nullptr;
    return first;
}

}  // namespace tl
