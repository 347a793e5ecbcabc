#include "keeper.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "signals.hpp"

namespace tl {
namespace {

using Device = std::pair<Driver *, int>;

// Of one process: a child made by fork() has neither the parent's registrations nor the threads that may hold its lock.
struct Keeper {
    const pid_t pid = getpid();
    std::mutex mutex;
    std::map<Device, std::unique_ptr<Ring>> rings;  // each device that had an engine; null: nothing is kept
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
    Bound bound(driver, device);
    ring.reset();
    driver->release(device);
}

// The driver gives no pinned memory back while the device has any work, of whomever. Work may last, or never end: a
// collective whose other rank is gone (NCCL, seen on two H200).
constexpr std::chrono::milliseconds kRest(500);

struct Release {
    std::unique_ptr<Ring> ring;
    std::mutex mutex;
    std::condition_variable ended;
    bool over = false;
};

}  // namespace

void release_ring(std::unique_ptr<Ring> ring) {
    const auto [driver, device] = ring->device();
    // The context has to stay until it is over.
    if (ring->pinned_bytes() == 0 || driver->retain(device)) return ring->release();
    const auto release = std::make_shared<Release>();
    release->ring = std::move(ring);
    const auto run = [release] {
        let_go(std::move(release->ring));
        std::lock_guard<std::mutex> lock(release->mutex);
        release->over = true;
        release->ended.notify_all();
    };
    std::thread thread;
    try {
        const SignalsBlocked blocked;
        thread = std::thread(run);
    } catch (const std::system_error &) {  // there is no thread to be had: it takes as long as it takes
        return run();
    }
    std::unique_lock<std::mutex> lock(release->mutex);
    const bool over = release->ended.wait_for(lock, kRest, [&] { return release->over; });
    lock.unlock();
    over ? thread.join() : thread.detach();
}

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

uint64_t release_rings() {
    std::map<Device, std::unique_ptr<Ring>> gone;
    {
        Keeper &k = keeper();
        std::lock_guard<std::mutex> lock(k.mutex);
        k.rings.swap(gone);
        k.releases++;
    }
    uint64_t nbytes = 0;
    for (auto &[device, ring] : gone) {
        if (!ring) continue;
        nbytes += ring->pinned_bytes();
        let_go(std::move(ring));
    }
    return nbytes;
}

}  // namespace tl
