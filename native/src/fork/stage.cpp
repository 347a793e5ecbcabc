#include "fork/stage.hpp"

#include <algorithm>

#include "fork/ipc.hpp"

namespace tl {

Stage::Stage(Driver *driver, int32_t device)
    : driver_(driver), device_(device), ring_(driver, device, kSlotBytes, kSlots * kSlotBytes) {}

std::unique_ptr<Stage> Stage::make(int32_t device_kind, int32_t device, Failure *why) {
    Driver *driver = driver_for(device_kind, why);
    if (!driver) return nullptr;
    std::unique_ptr<Stage> made(new Stage(driver, device));
    *why = made->begin();
    return *why ? nullptr : std::move(made);
}

Failure Stage::begin() {
    if (Failure f = driver_->retain(device_)) return f;
    retained_ = true;
    const Bound bound(driver_, device_);
    if (bound.failure()) return bound.failure();
    if (Failure f = driver_->stream_create(&stream_)) return f;
    for (Event &event : events_) {
        if (Failure f = driver_->event_create(&event)) return f;
    }
    return {};
}

Stage::~Stage() {
    if (!retained_) return;
    {
        const Bound bound(driver_, device_, true);
        if (stream_) {
            driver_->stream_synchronize(stream_);
            driver_->stream_destroy(stream_);
        }
        for (const Event event : events_) {
            if (event) driver_->event_destroy(event);
        }
        for (const IpcHandle &handle : mapped_) ipc_unmap(driver_, device_, handle);
        ring_.release();
    }
    driver_->release(device_);
}

Failure Stage::take(uint64_t k, char **memory) {
    if (Failure f = driver_->event_synchronize(events_[k])) return f;
    *memory = ring_.prepare(k, &note_);
    return *memory ? Failure{} : failure(TL_ERR_MEMORY, "no host memory for a block");
}

// In one copy where that can be: what the driver refuses is cut where allocations end.
template <class Copy>
Failure Stage::by_allocation(uint64_t address, uint64_t nbytes, Copy copy) {
    const Failure whole = copy(uint64_t{0}, nbytes);
    if (!whole || within_allocation(driver_, address, nbytes) == nbytes) return whole;
    for (uint64_t at = 0; at < nbytes;) {
        const uint64_t part = within_allocation(driver_, address + at, nbytes - at);
        if (Failure f = copy(at, part)) return f;
        at += part;
    }
    return {};
}

Failure Stage::to_host(uint64_t k, uint64_t source, uint64_t nbytes) {
    char *to = nullptr;
    if (Failure f = take(k, &to)) return f;
    if (Failure f = by_allocation(source, nbytes, [&](uint64_t at, uint64_t part) {
            return driver_->copy_to_host(to + at, source + at, part, stream_);
        }))
        return f;
    return settle(k);
}

Failure Stage::to_device(uint64_t destination, const char *source, uint64_t nbytes) {
    return by_allocation(destination, nbytes, [&](uint64_t at, uint64_t part) {
        return driver_->copy_to_device(destination + at, source + at, part, stream_);
    });
}

Failure Stage::map(const IpcHandle &handle, uint64_t *address, uint64_t *nbytes) {
    mapped_.reserve(mapped_.size() + 1);
    if (Failure f = ipc_map(driver_, device_, handle, address, nbytes)) return f;
    mapped_.push_back(handle);
    return {};
}

Failure Stage::fetch(uint64_t source, char *to, uint64_t nbytes) {
    if (Failure f = driver_->copy_to_host(to, source, nbytes, stream_)) return f;
    return finish();
}

Failure Stage::across(uint64_t destination, uint64_t source, uint64_t nbytes) {
    return by_allocation(destination, nbytes, [&](uint64_t at, uint64_t part) {
        return driver_->copy_on_device(destination + at, source + at, part, stream_);
    });
}

Failure Stage::settle(uint64_t k) {
    return driver_->event_record(events_[k], stream_);
}

Failure Stage::finish() {
    return driver_->stream_synchronize(stream_);
}

Failure Outgoing::next(const char **bytes, uint64_t *nbytes) {
    *nbytes = std::min(kBlock, nbytes_ - given_);
    const uint64_t inside = given_ % Stage::kSlotBytes;
    if (!stage_) {
        *bytes = reinterpret_cast<const char *>(address_) + given_;
    } else {
        if (inside == 0) {
            // The slot before this one is free by now.
            if (Failure f = begin_ahead()) return f;
            if (Failure f = stage_->take(given_ / Stage::kSlotBytes % Stage::kSlots, &slot_)) return f;
        }
        *bytes = slot_ + inside;
    }
    given_ += *nbytes;
    return {};
}

Failure Outgoing::begin_ahead() {
    const uint64_t until = given_ / Stage::kSlotBytes + Stage::kSlots;
    for (; begun_ < until && begun_ * Stage::kSlotBytes < nbytes_; begun_++) {
        const uint64_t at = begun_ * Stage::kSlotBytes;
        const uint64_t nbytes = std::min(Stage::kSlotBytes, nbytes_ - at);
        if (Failure f = stage_->to_host(begun_ % Stage::kSlots, address_ + at, nbytes)) return f;
    }
    return {};
}

}  // namespace tl
