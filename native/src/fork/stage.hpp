// Blocks of a device's memory on their way from or to a socket: through a few pinned slots, by the device's copy engine,
// so that no kernel runs and nothing of the device's other work is waited for.
#pragma once

#include <memory>
#include <vector>

#include "fork/wire.hpp"
#include "ring.hpp"

namespace tl {

class Stage {
public:
    // One being sent or received, the other being copied. Of several blocks: each copy and each event is a few calls of a
    // driver whose locks the owner of the device wants too.
    static constexpr uint64_t kSlots = 2;
    static constexpr uint64_t kSlotBytes = 16 * kBlock;

    // Of one thread at a time; null with the reason in *why.
    static std::unique_ptr<Stage> make(int32_t device_kind, int32_t device, Failure *why);
    // Waits for copies.
    ~Stage();
    Stage(const Stage &) = delete;
    Stage &operator=(const Stage &) = delete;

    Driver *driver() const {
        return driver_;
    }
    int32_t device() const {
        return device_;
    }

    // All below want the device to be current (Bound).

    // The memory of slot k, once its last copy is over.
    Failure take(uint64_t k, char **memory);
    // Begins to copy bytes of the device to slot k, which is taken; they are there when it is taken again.
    Failure to_host(uint64_t k, uint64_t source, uint64_t nbytes);
    // Begins to copy from slot k. settle(k) after the last of them: then take(k) waits for them all.
    Failure to_device(uint64_t destination, const char *source, uint64_t nbytes);
    Failure settle(uint64_t k);
    // Nothing is on its way any more.
    Failure finish();

    // Memory of another process, mapped until the stage ends; and copies out of it: to a slot's memory, there on return, or
    // on the device, begun.
    Failure map(const IpcHandle &handle, uint64_t *address, uint64_t *nbytes);
    Failure fetch(uint64_t source, char *to, uint64_t nbytes);
    Failure across(uint64_t destination, uint64_t source, uint64_t nbytes);

private:
    Stage(Driver *driver, int32_t device);
    Failure begin();
    template <class Copy>
    Failure by_allocation(uint64_t address, uint64_t nbytes, Copy copy);

    Driver *driver_;
    const int32_t device_;
    bool retained_ = false;
    Ring ring_;
    Stream stream_ = nullptr;
    Event events_[kSlots] = {};
    std::vector<IpcHandle> mapped_;
    std::string note_;  // that slots are pageable, which is slower and still right
};

// A region's bytes from one offset to another, block by block, from the host's memory or through a stage.
class Outgoing {
public:
    // stage: null for host memory.
    Outgoing(Stage *stage, uint64_t address, uint64_t nbytes)
        : stage_(stage), address_(address), nbytes_(nbytes) {}

    // The next block, which stays until the next call.
    Failure next(const char **bytes, uint64_t *nbytes);

private:
    Failure begin_ahead();

    Stage *stage_;
    uint64_t address_, nbytes_;
    uint64_t given_ = 0;  // bytes
    uint64_t begun_ = 0;  // slots
    char *slot_ = nullptr;
};

}  // namespace tl
