// Linux AIO, io_submit(2): for kernels and containers without io_uring. Only direct reads are asynchronous there;
// buffered ones are copied inside io_submit. The four calls are made as they are: the static libaio has versioned symbols,
// which do not link under a version script of ours.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <vector>

#include "readers/async.hpp"

namespace tl {
namespace {

class AioRing final : public AsyncRing {
public:
    ~AioRing() override {
        if (context_) syscall(SYS_io_destroy, context_);
    }

    int open(uint32_t depth) override {
        events_.resize(depth);
        return syscall(SYS_io_setup, depth, &context_) == 0 ? 0 : -errno;
    }

    void queue(AsyncEntry *entry) override {
        const DeepRead &read = entry->read;
        iocb block{};
        block.aio_data = reinterpret_cast<uint64_t>(entry);
        block.aio_lio_opcode = IOCB_CMD_PREAD;
        block.aio_fildes = static_cast<uint32_t>(read.fd());
        block.aio_buf = reinterpret_cast<uint64_t>(read.buffer());
        block.aio_nbytes = read.nbytes();
        block.aio_offset = static_cast<int64_t>(read.offset());
        blocks_.push_back(block);
    }

    int turn(const std::function<void(AsyncEntry *, int64_t)> &done) override {
        std::vector<std::pair<AsyncEntry *, int64_t>> refused;
        while (!blocks_.empty()) {
            iocb *block = &blocks_.front();
            const int64_t code = syscall(SYS_io_submit, context_, 1L, &block) < 0 ? -errno : 0;
            if (code == -EAGAIN && in_kernel_ > 0) break;  // the kernel has enough for now
            // What the kernel does not take is an answer for this one read.
            if (code < 0) refused.emplace_back(reinterpret_cast<AsyncEntry *>(block->aio_data), code);
            if (code == 0) in_kernel_++;
            blocks_.pop_front();
        }
        if (in_kernel_ > 0 && refused.empty()) {
            const int count = get_events();
            if (count < 0) return count;
            for (int i = 0; i < count; i++) {
                const io_event &event = events_[static_cast<size_t>(i)];
                done(reinterpret_cast<AsyncEntry *>(event.data), event.res);
            }
        }
        for (const auto &[entry, code] : refused) done(entry, code);
        return 0;
    }

    void drain() override {
        for (int left = kTries; in_kernel_ > 0 && context_ && left > 0;) {
            if (get_events() >= 0) continue;
            // It waits for what is under way, where asking for results is refused.
            if (syscall(SYS_io_destroy, context_) == 0) context_ = 0;
            left--;
        }
    }

private:
    static constexpr int kTries = 100;  // of both calls, which a kernel refuses for ever or not at all

    // Waits for one result at least; how many lie in events_, or the negative errno.
    int get_events() {
        const auto count = static_cast<int>(syscall(
            SYS_io_getevents, context_, 1L, static_cast<long>(events_.size()), events_.data(), nullptr));
        if (count < 0) return errno == EINTR ? 0 : -errno;
        in_kernel_ -= static_cast<size_t>(count);
        return count;
    }

    aio_context_t context_ = 0;
    std::deque<iocb> blocks_;  // queued, not taken by the kernel
    std::vector<io_event> events_;
    size_t in_kernel_ = 0;
};

std::unique_ptr<AsyncRing> make_ring() {
    return std::make_unique<AioRing>();
}

}  // namespace

std::unique_ptr<DeepReader> make_aio(RequestSink *sink, int path, const DeepLimits &limits) {
    return make_async(sink, path, limits, make_ring, "io_setup");
}

}  // namespace tl
