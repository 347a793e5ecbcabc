// The few calls of a device's driver that loading needs, behind one interface. The libraries are opened at run time, so
// that one build runs where there is a GPU, another kind of GPU, or none.
#pragma once

#include "common.hpp"

namespace tl {

using Stream = void *;
using Event = void *;

// CUipcMemHandle, hipIpcMemHandle_t: passed by value.
struct IpcHandle {
    char bytes[64];
};

class Driver {
public:
    virtual ~Driver() = default;

    virtual Failure device_count(int *count) = 0;

    // Keeps the device's primary context while an engine lives, so that no second one is ever made.
    virtual Failure retain(int device) = 0;
    virtual void release(int device) = 0;

    // Makes the device current for this thread. The previous one comes back in *previous (may be null) for restore().
    virtual Failure bind(int device, void **previous) = 0;
    virtual void restore(void *previous) = 0;

    virtual Failure register_host(void *address, uint64_t nbytes) = 0;
    virtual Failure unregister_host(void *address) = 0;

    virtual Failure stream_create(Stream *stream) = 0;  // does not synchronise with the default stream
    virtual Failure stream_destroy(Stream stream) = 0;
    virtual Failure stream_synchronize(Stream stream) = 0;
    virtual Failure stream_wait(Stream stream, Event event) = 0;

    virtual Failure event_create(Event *event) = 0;  // no timing; waiting for it sleeps
    virtual Failure event_destroy(Event event) = 0;
    virtual Failure event_record(Event event, Stream stream) = 0;
    virtual Failure event_synchronize(Event event) = 0;

    // The allocation that an address of the device lies in.
    virtual Failure address_range(uint64_t address, uint64_t *begin, uint64_t *nbytes) = 0;
    virtual Failure copy_to_device(uint64_t destination, const void *source, uint64_t nbytes,
                                   Stream stream) = 0;
    virtual Failure copy_to_host(void *destination, uint64_t source, uint64_t nbytes, Stream stream) = 0;
    virtual Failure copy_on_device(uint64_t destination, uint64_t source, uint64_t nbytes, Stream stream) = 0;

    // The allocation that begins at this address, for another process of the host; and that of another process, here.
    virtual Failure ipc_export(uint64_t address, IpcHandle *handle) = 0;
    virtual Failure ipc_open(const IpcHandle &handle, uint64_t *address) = 0;
    virtual Failure ipc_close(uint64_t address) = 0;
};

// How many of these bytes lie in the allocation of the first: a driver refuses a copy from one into the next
// (CUDA_ERROR_INVALID_VALUE). All, where it does not know: the copy decides. Asked each time, for another thread may free
// and allocate.
uint64_t within_allocation(Driver *driver, uint64_t address, uint64_t nbytes);

// Of a call of a driver that answered with a code; name: the driver's for it, may be null.
Failure driver_failure(const char *call, int code, const char *name);

// The driver of a kind, opened once for the process; null with the reason in *why.
Driver *driver_for(int32_t device_kind, Failure *why);

// One implementation a file; each opens its library once.
Driver *cuda_driver(Failure *why);
Driver *hip_driver(Failure *why);

// A device made current for a scope on a thread that is not ours.
class Bound {
public:
    // to_give_back: tried again where it fails, whatever was current before. Without it copies could not be waited for, nor
    // anything be given back.
    Bound(Driver *driver, int device, bool to_give_back = false) : driver_(driver) {
        if (driver_) failure_ = driver_->bind(device, &previous_);
        for (int left = to_give_back ? 2 : 0; failure_ && left > 0; left--) {
            previous_ = nullptr;
            failure_ = driver_->bind(device, nullptr);
        }
    }
    ~Bound() {
        if (driver_ && !failure_) driver_->restore(previous_);
    }
    Bound(const Bound &) = delete;
    Bound &operator=(const Bound &) = delete;
    const Failure &failure() const {
        return failure_;
    }

private:
    Driver *driver_;
    void *previous_ = nullptr;
    Failure failure_;
};

}  // namespace tl
