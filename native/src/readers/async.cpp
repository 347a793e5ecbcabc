#include "readers/async.hpp"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <thread>
#include <vector>

#include "starting.hpp"

namespace tl {
namespace {

// One thread and its ring. The queue is shared by all of a reader.
class AsyncThread {
public:
    AsyncThread(RequestSink *sink, int path, uint32_t depth, RequestQueue *queue,
                std::unique_ptr<AsyncRing> ring)
        : sink_(sink), path_(path), queue_(queue), entries_(depth), ring_(std::move(ring)) {
        for (AsyncEntry &entry : entries_) free_.push_back(&entry);
    }

    int open() {
        return ring_->open(static_cast<uint32_t>(entries_.size()));
    }

    void run() {
        sink_->enter_thread();
        try {
            keep_reading();
        } catch (const std::exception &error) {  // there is no memory
            sink_->failed(failure(TL_ERR_MEMORY, error.what()));
            ring_->drain();
        }
    }

private:
    void keep_reading() {
        for (;;) {
            Request request;
            while (!free_.empty() && queue_->pop(&request, in_flight() == 0)) begin(request);
            if (in_flight() == 0) return;  // only when the engine stops
            const int code =
                ring_->turn([this](AsyncEntry *entry, int64_t result) { finish(entry, result); });
            if (code < 0) return give_up(-code);
        }
    }

    // The kernel does not let the ring work, at its first use (seccomp allows the set-up alone) or later: what it had
    // and what still comes is for the next way of reading. Nothing is lost by reading it again.
    void give_up(int os_errno) {
        ring_->drain();
        for (AsyncEntry &entry : entries_) {
            if (entry.busy) sink_->refused(entry.read.request(), path_, std::strerror(os_errno), 0);
        }
        Request request;
        while (queue_->pop(&request, true)) sink_->refused(request, path_, std::strerror(os_errno), 0);
    }

    size_t in_flight() const {
        return entries_.size() - free_.size();
    }

    void begin(const Request &request) {
        AsyncEntry *entry = free_.back();
        if (!entry->read.begin(request, is_direct(path_), &entry->bounce)) {
            sink_->failed(failure(TL_ERR_MEMORY, "no memory for a buffer of reads"));
            return;
        }
        free_.pop_back();
        entry->busy = true;
        ring_->queue(entry);
    }

    void finish(AsyncEntry *entry, int64_t result) {
        if (result > 0) sink_->count_read(path_, static_cast<uint64_t>(result));
        Failure why;
        const DeepRead::Outcome outcome = entry->read.on_result(result, &why);
        if (outcome == DeepRead::Outcome::kMore && !sink_->stopping()) return ring_->queue(entry);
        const Request request = entry->read.request();
        if (outcome == DeepRead::Outcome::kDone) sink_->complete(request, path_, entry->read.bounced());
        entry->busy = false;
        free_.push_back(entry);
        if (outcome == DeepRead::Outcome::kFailed) sink_->failed(why);
        if (outcome == DeepRead::Outcome::kRefused) {
            sink_->refused(request, path_, std::strerror(why.os_errno), why.got);
        }
    }

    RequestSink *sink_;
    const int path_;
    RequestQueue *queue_;
    std::vector<AsyncEntry> entries_;
    std::vector<AsyncEntry *> free_;
    std::unique_ptr<AsyncRing> ring_;  // ends before the memory that it may write to
};

class AsyncReader final : public DeepReader {
public:
    AsyncReader(RequestSink *sink, int path, const DeepLimits &limits, MakeRing make, const char *setup_call)
        : sink_(sink),
          path_(path),
          limits_(limits),
          make_(make),
          setup_call_(setup_call),
          queue_(sink, 2 * static_cast<size_t>(limits.depth)) {}

    // Direct reads wait for storage: one thread keeps all of them in flight. Buffered ones are copied out of the page
    // cache inside the kernel, by the thread that hands them over: as many threads as may use a CPU.
    Failure start() override {
        const uint32_t count = is_direct(path_) ? 1 : std::min(limits_.threads, limits_.depth);
        for (uint32_t i = 0; i < count; i++) {
            auto worker = std::make_unique<AsyncThread>(sink_, path_, std::max(1u, limits_.depth / count),
                                                        &queue_, make_());
            const int code = worker->open();
            // The first has to work; fewer than wanted only make it slower.
            if (code < 0 && i == 0) return os_failure(TL_ERR_BACKEND, -code, setup_call_);
            if (code < 0) break;
            workers_.push_back(std::move(worker));
        }
        threads_.reserve(workers_.size());  // what fails below leaves no thread without an owner
        for (auto &worker : workers_) {
            const int code = start_thread([&] { threads_.emplace_back([&worker] { worker->run(); }); });
            if (code == 0) continue;
            if (threads_.empty()) return os_failure(TL_ERR_MEMORY, code, "cannot start a thread");
            break;
        }
        return {};
    }

    void push(const Request &request) override {
        queue_.push(request);
    }

    void wake() override {
        queue_.wake();
    }

    void join() override {
        queue_.wake();
        for (std::thread &thread : threads_) thread.join();
        threads_.clear();
    }

    uint32_t threads() const override {
        return static_cast<uint32_t>(workers_.size());
    }

private:
    RequestSink *sink_;
    const int path_;
    const DeepLimits limits_;
    MakeRing make_;
    const char *setup_call_;
    RequestQueue queue_;
    std::vector<std::unique_ptr<AsyncThread>> workers_;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DeepReader> make_async(RequestSink *sink, int path, const DeepLimits &limits, MakeRing make,
                                       const char *setup_call) {
    return std::make_unique<AsyncReader>(sink, path, limits, make, setup_call);
}

}  // namespace tl
