#include "fork/stage.hpp"

#include <algorithm>

namespace tl {

Stage::Stage(Driver *driver, int32_t device)
    : driver_(driver), device_(device), ring_(driver, device, kBlock, kSlots * kBlock) {}

std::unique_ptr<Stage> Stage::make(int32_t device_kind, int32_t device, Failure *why) {
    Driver *driver = driver_for(device_kind, why);
    if (!driver) return nullptr;
    if ((*why = driver->retain(device))) return nullptr;
    std::unique_ptr<Stage> made(new Stage(driver, device));
    *why = made->begin();
    return *why ? nullptr : std::move(made);
}

Failure Stage::begin() {
    const Bound bound(driver_, device_);
    if (bound.failure()) return bound.failure();
    if (Failure f = driver_->stream_create(&stream_)) return f;
    for (Event &event : events_) {
        if (Failure f = driver_->event_create(&event)) return f;
    }
    return {};
}

Stage::~Stage() {
    {
        const Bound bound(driver_, device_);
        if (stream_) {
            driver_->stream_synchronize(stream_);
            driver_->stream_destroy(stream_);
        }
        for (const Event event : events_) {
            if (event) driver_->event_destroy(event);
        }
        ring_.release();
    }
    driver_->release(device_);
}

Failure Stage::take(uint64_t k, char **memory) {
    if (Failure f = driver_->event_synchronize(events_[k])) return f;
    *memory = ring_.prepare(k, &note_);
    return *memory ? Failure{} : failure(TL_ERR_MEMORY, "no host memory for a block");
}

Failure Stage::to_host(uint64_t k, uint64_t source, uint64_t nbytes) {
    char *to = nullptr;
    if (Failure f = take(k, &to)) return f;
    while (nbytes > 0) {
        const uint64_t part = within_allocation(driver_, source, nbytes);
        if (Failure f = driver_->copy_to_host(to, source, part, stream_)) return f;
        to += part;
        source += part;
        nbytes -= part;
    }
    return settle(k);
}

Failure Stage::to_device(uint64_t destination, const char *source, uint64_t nbytes) {
    while (nbytes > 0) {
        const uint64_t part = within_allocation(driver_, destination, nbytes);
        if (Failure f = driver_->copy_to_device(destination, source, part, stream_)) return f;
        destination += part;
        source += part;
        nbytes -= part;
    }
    return {};
}

Failure Stage::settle(uint64_t k) {
    return driver_->event_record(events_[k], stream_);
}

Failure Stage::finish() {
    return driver_->stream_synchronize(stream_);
}

Failure Outgoing::next(const char **bytes, uint64_t *nbytes) {
    const uint64_t at = given_ * kBlock;
    *nbytes = std::min(kBlock, nbytes_ - at);
    if (!stage_) {
        *bytes = reinterpret_cast<const char *>(address_) + at;
    } else {
        // The slot of the block before this one is free by now.
        if (Failure f = begin_ahead()) return f;
        char *memory = nullptr;
        if (Failure f = stage_->take(given_ % Stage::kSlots, &memory)) return f;
        *bytes = memory;
    }
    given_++;
    return {};
}

Failure Outgoing::begin_ahead() {
    for (; begun_ < given_ + Stage::kSlots && begun_ * kBlock < nbytes_; begun_++) {
        const uint64_t at = begun_ * kBlock;
        const uint64_t nbytes = std::min(kBlock, nbytes_ - at);
        if (Failure f = stage_->to_host(begun_ % Stage::kSlots, address_ + at, nbytes)) return f;
    }
    return {};
}

}  // namespace tl
