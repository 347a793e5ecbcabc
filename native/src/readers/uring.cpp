// io_uring(7), direct: one thread keeps up to io_depth reads in flight.
#include "readers/direct.hpp"

#ifdef TL_HAVE_URING
#include <liburing.h>

#include <thread>
#include <vector>

namespace tl {
namespace {

class UringDirect final : public DeepReader {
public:
    UringDirect(RequestSink *sink, const DeepLimits &limits)
        : sink_(sink), entries_(limits.depth), queue_(sink, 2 * static_cast<size_t>(limits.depth)) {
        for (Entry &entry : entries_) free_.push_back(&entry);
    }

    ~UringDirect() override {
        if (ready_) io_uring_queue_exit(&ring_);
    }

    Failure start() override {
        const int code = io_uring_queue_init(static_cast<unsigned>(entries_.size()), &ring_, 0);
        if (code < 0) return os_failure(TL_ERR_BACKEND, -code, "io_uring_setup");
        ready_ = true;
        // The child of a fork must not keep the ring's memory busy, nor touch it.
        io_uring_ring_dontfork(&ring_);
        try {
            thread_ = std::thread([this] { work(); });
        } catch (const std::system_error &error) {
            return os_failure(TL_ERR_MEMORY, error.code().value(), "cannot start a thread");
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
        if (thread_.joinable()) thread_.join();
    }

    uint32_t threads() const override {
        return 1;
    }

private:
    struct Entry {
        DirectRead read;
        Bounce bounce;
    };

    void work() {
        sink_->enter_thread();
        for (;;) {
            Request request;
            while (!free_.empty() && queue_.pop(&request, in_flight() == 0)) begin(request);
            if (in_flight() == 0) return;  // only when the engine stops
            const int code = io_uring_submit_and_wait(&ring_, 1);
            if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY) {
                give_up(code);
                return;
            }
            reap();
        }
    }

    size_t in_flight() const {
        return entries_.size() - free_.size();
    }

    void begin(const Request &request) {
        Entry *entry = free_.back();
        if (!entry->read.begin(request, &entry->bounce)) {
            sink_->failed(failure(TL_ERR_MEMORY, "no memory for a buffer of direct reads"));
            return;
        }
        free_.pop_back();
        issue(entry);
    }

    void issue(Entry *entry) {
        // There is room: no more entries than the ring has, each in it once.
        io_uring_sqe *sqe = io_uring_get_sqe(&ring_);
        const DirectRead &read = entry->read;
        io_uring_prep_read(sqe, read.request().file->direct_fd, read.buffer(),
                           static_cast<unsigned>(read.nbytes()), read.offset());
        io_uring_sqe_set_data(sqe, entry);
    }

    void reap() {
        io_uring_cqe *cqe = nullptr;
        while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
            auto *entry = static_cast<Entry *>(io_uring_cqe_get_data(cqe));
            const int result = cqe->res;
            io_uring_cqe_seen(&ring_, cqe);
            finish(entry, result);
        }
    }

    void finish(Entry *entry, int result) {
        if (result > 0) sink_->count_read(TL_PATH_URING_DIRECT, static_cast<uint64_t>(result));
        Failure why;
        const DirectRead::Outcome outcome = entry->read.on_result(result, &why);
        if (outcome == DirectRead::Outcome::kMore && !sink_->stopping()) return issue(entry);
        const Request request = entry->read.request();
        if (outcome == DirectRead::Outcome::kDone)
            sink_->complete(request, TL_PATH_URING_DIRECT, entry->read.bounced());
        free_.push_back(entry);
        if (outcome == DirectRead::Outcome::kFailed) sink_->failed(why);
        if (outcome == DirectRead::Outcome::kRefused)
            sink_->refused(request, TL_PATH_URING_DIRECT, why.os_errno);
    }

    // The ring itself does not work any more. What the kernel has taken still writes to memory: wait for that much.
    void give_up(int code) {
        sink_->failed(os_failure(TL_ERR_READ, -code, "io_uring_enter"));
        size_t submitted = in_flight() - io_uring_sq_ready(&ring_);
        io_uring_cqe *cqe = nullptr;
        while (submitted > 0 && io_uring_wait_cqe(&ring_, &cqe) == 0) {
            io_uring_cqe_seen(&ring_, cqe);
            submitted--;
        }
    }

    RequestSink *sink_;
    std::vector<Entry> entries_;
    std::vector<Entry *> free_;
    RequestQueue queue_;
    io_uring ring_{};
    bool ready_ = false;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<DeepReader> make_uring_direct(RequestSink *sink, const DeepLimits &limits) {
    return std::make_unique<UringDirect>(sink, limits);
}

}  // namespace tl

#else

namespace tl {

std::unique_ptr<DeepReader> make_uring_direct(RequestSink *, const DeepLimits &) {
    return nullptr;
}

}  // namespace tl
#endif
