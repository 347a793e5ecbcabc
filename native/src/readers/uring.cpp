// io_uring(7).
#include "readers/async.hpp"

#ifdef TL_HAVE_URING
#include <liburing.h>
#include <time.h>

#include <cerrno>

namespace tl {
namespace {

// A function with this name because the thread sanitizer, which does not see how the ring's memory comes, is told by such
// names to leave it alone (tests/native).
int io_uring_result(const io_uring_cqe &cqe) {
    return cqe.res;
}

class UringRing final : public AsyncRing {
public:
    ~UringRing() override {
        if (open_) io_uring_queue_exit(&ring_);
    }

    int open(uint32_t depth) override {
        const int code = io_uring_queue_init(depth, &ring_, 0);
        if (code < 0) return code;
        open_ = true;
        // The child of a fork must not keep the ring's memory busy, nor touch it.
        io_uring_ring_dontfork(&ring_);
        return 0;
    }

    void queue(AsyncEntry *entry) override {
        // There is room: no more entries than the ring has, each in it once.
        io_uring_sqe *sqe = io_uring_get_sqe(&ring_);
        const DeepRead &read = entry->read;
        io_uring_prep_read(sqe, read.fd(), read.buffer(), static_cast<unsigned>(read.nbytes()),
                           read.offset());
        io_uring_sqe_set_data(sqe, entry);
        in_flight_++;
    }

    int turn(const std::function<void(AsyncEntry *, int64_t)> &done) override {
        const int code = io_uring_submit_and_wait(&ring_, 1);
        if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY) return code;
        // A kernel that is short of memory says EAGAIN for a while; one that goes on does not want this way.
        idle_turns_ = code < 0 ? idle_turns_ + 1 : 0;
        if (idle_turns_ > kIdleTurns) return code;
        if (idle_turns_ > 0) nap();
        io_uring_cqe *cqe = nullptr;
        while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
            idle_turns_ = 0;
            auto *entry = static_cast<AsyncEntry *>(io_uring_cqe_get_data(cqe));
            const int result = io_uring_result(*cqe);
            io_uring_cqe_seen(&ring_, cqe);
            in_flight_--;
            done(entry, result);
        }
        return 0;
    }

    void drain() override {
        size_t taken = in_flight_ - io_uring_sq_ready(&ring_);
        io_uring_cqe *cqe = nullptr;
        while (taken > 0) {
            // Where waiting is refused: results come by themselves, into memory that is shared with the kernel.
            if (io_uring_wait_cqe(&ring_, &cqe) != 0 && io_uring_peek_cqe(&ring_, &cqe) != 0) {
                nap();
                continue;
            }
            io_uring_cqe_seen(&ring_, cqe);
            taken--;
        }
    }

private:
    static constexpr int kIdleTurns = 1000;  // naps: a second

    static void nap() {
        constexpr timespec kMillisecond{0, 1000000};
        nanosleep(&kMillisecond, nullptr);
    }

    io_uring ring_{};
    bool open_ = false;
    int idle_turns_ = 0;  // refused one after another, without a result between them
    size_t in_flight_ = 0;
};

std::unique_ptr<AsyncRing> make_ring() {
    return std::make_unique<UringRing>();
}

}  // namespace

std::unique_ptr<DeepReader> make_uring(RequestSink *sink, int path, const DeepLimits &limits) {
    return make_async(sink, path, limits, make_ring, "io_uring_setup");
}

}  // namespace tl

#else

namespace tl {

std::unique_ptr<DeepReader> make_uring(RequestSink *, int, const DeepLimits &) {
    return nullptr;  // backend_not_built() keeps every route from here
}

}  // namespace tl
#endif
