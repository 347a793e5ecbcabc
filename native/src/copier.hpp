// Moves filled slots to the device: one stream, as few copies a slot as may be, and one thread that waits for the copies so that no
// reading thread has to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "plan.hpp"
#include "shim/driver.hpp"

namespace tl {

class Copier {
public:
    // copied: called on the waiting thread when the memory of a slot may be filled again. failed: a driver's call failed.
    struct Callbacks {
        std::function<void()> enter_thread;
        std::function<void(uint64_t slot_index, uint64_t begin_ns)> copied;
        std::function<void(const Failure &)> failed;
    };

    Copier(Driver *driver, uint64_t slots, Callbacks callbacks)
        : driver_(driver), slots_(slots), callbacks_(std::move(callbacks)) {}
    ~Copier();
    Copier(const Copier &) = delete;
    Copier &operator=(const Copier &) = delete;

    // Makes the stream, the events and the thread. What was made before a failure is given back by the destructor.
    Failure start();

    // Copies issued from now on wait for the work that the consumer's stream holds now. The number of this fence comes
    // back, for what is written without the stream.
    Failure wait_for_consumer(Stream consumer, uint64_t *fence);
    // Returns when the work of that fence is done, on whichever thread; may wait, so under no lock. What copies do in
    // stream order, reads that the stream does not order do by this.
    Failure pass_fence(uint64_t fence);
    // The consumer's stream waits for all copies issued so far.
    Failure make_consumer_wait(Stream consumer);

    // Issues the copies of a filled slot that lies at base, which may be none; the number issued.
    Failure issue(const Slot &slot, const char *base, uint64_t *copies);

    // Waits for every copy, ends the thread, gives everything back. The first failure is returned.
    Failure stop();

private:
    struct Issued {
        uint64_t slot_index;
        Event event;
        uint64_t begin_ns;
    };
    void wait_for_copies();
    Failure copy_by_allocation(uint64_t destination, const char *source, uint64_t nbytes, uint64_t *copies);

    Driver *driver_;
    const uint64_t slots_;
    Callbacks callbacks_;
    Stream stream_ = nullptr;
    Event fence_ = nullptr;
    uint64_t fences_ = 0;              // put into the stream
    std::atomic<uint64_t> passed_{0};  // of these, known to be passed
    std::vector<Event> events_;        // one a slot of the ring
    std::mutex mutex_;
    std::condition_variable issued_cv_;
    std::deque<Issued> issued_;  // in stream order
    bool ended_ = false;
    std::thread thread_;
};

}  // namespace tl
