#include "keeper.hpp"

#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace tl {
namespace {

using Device = std::pair<Driver *, int>;

// Of one process: a child made by fork() has neither the parent's registrations nor the threads that may hold its lock.
struct Keeper {
    const pid_t pid = getpid();
    std::mutex mutex;
    std::map<Device, std::unique_ptr<Ring>> rings;  // each device that had an engine; null: nothing is kept
    std::unique_ptr<Ring> aside;                    // the last one, see Ring::next
    uint64_t releases = 0;
};

// Never destroyed: when a process ends, the driver may be gone before statics are, and the kernel takes back what was
// pinned. A child leaves its parent's alone.
Keeper &keeper() {
    static std::atomic<Keeper *> current{nullptr};
    Keeper *found = current.load(std::memory_order_acquire);
    while (!found || found->pid != getpid()) {
        auto fresh = std::make_unique<Keeper>();
        if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
            return *fresh.release();
        }
    }
    return *found;
}

// Of a ring that was kept. Where the device cannot be bound any more the driver's calls fail, and memory goes all the same.
void let_go(std::unique_ptr<Ring> ring) {
    const auto [driver, device] = ring->device();
    Bound bound(driver, device, true);
    ring.reset();
    driver->release(device);
}

}  // namespace

std::unique_ptr<Ring> take_ring(Driver *driver, int device, uint64_t slot_bytes, uint64_t pinned_bytes) {
    std::unique_ptr<Ring> ring;
    uint64_t releases;
    {
        Keeper &k = keeper();
        std::lock_guard<std::mutex> lock(k.mutex);
        ring.swap(k.rings[{driver, device}]);
        releases = k.releases;
    }
    if (ring && ring->begin_again(slot_bytes, pinned_bytes)) {
        driver->release(device);  // the engine has it retained
    } else {
        if (ring) let_go(std::move(ring));
        ring = std::make_unique<Ring>(driver, device, slot_bytes, pinned_bytes);
    }
    ring->releases = releases;
    return ring;
}

void keep_ring(std::unique_ptr<Ring> ring) {
    const auto [driver, device] = ring->device();
    // Kept with the context, without which the memory would be pinned no more.
    if (ring->pinned_bytes() == 0 || ring->refused() || driver->retain(device)) return;
    {
        Keeper &k = keeper();
        std::lock_guard<std::mutex> lock(k.mutex);
        const auto place = k.rings.find({driver, device});
        if (place != k.rings.end() && ring->releases == k.releases &&
            (!place->second || place->second->pinned_bytes() < ring->pinned_bytes())) {
            ring.swap(place->second);
        }
    }
    if (ring) let_go(std::move(ring));
}

void set_ring_aside(std::unique_ptr<Ring> ring) {
    const auto [driver, device] = ring->device();
    // Without its context nothing is pinned any more, and giving it back waits for nothing.
    if (ring->pinned_bytes() == 0 || driver->retain(device)) return ring->release();
    Keeper &k = keeper();
    std::lock_guard<std::mutex> lock(k.mutex);
    ring->next = std::move(k.aside);
    k.aside = std::move(ring);
}

uint64_t release_rings() {
    std::map<Device, std::unique_ptr<Ring>> rings;
    std::unique_ptr<Ring> aside;
    {
        Keeper &k = keeper();
        std::lock_guard<std::mutex> lock(k.mutex);
        k.rings.swap(rings);
        k.aside.swap(aside);
        k.releases++;
    }
    uint64_t nbytes = 0;
    const auto give_back = [&nbytes](std::unique_ptr<Ring> ring) {
        nbytes += ring->pinned_bytes();
        let_go(std::move(ring));
    };
    for (auto &[device, ring] : rings) {
        if (ring) give_back(std::move(ring));
    }
    while (aside) {
        std::unique_ptr<Ring> behind = std::move(aside->next);
        give_back(std::move(aside));
        aside = std::move(behind);
    }
    return nbytes;
}

}  // namespace tl
