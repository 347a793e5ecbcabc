// pread(2): buffered on the thread that asks, direct on threads that wait for storage, one request each.
#include <unistd.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "readers/direct.hpp"

namespace tl {

int64_t pread_buffered(const File &file, const iovec *buffers, int count, uint64_t offset) {
    const auto at = static_cast<off_t>(offset);
    ssize_t got;
    do {
        got = count == 1 ? pread(file.plain_fd, buffers->iov_base, buffers->iov_len, at)
                         : preadv(file.plain_fd, buffers, count, at);
    } while (got < 0 && errno == EINTR);
    return got < 0 ? -errno : got;
}

namespace {

class PreadDirect final : public DeepReader {
public:
    PreadDirect(RequestSink *sink, const DeepLimits &limits)
        : sink_(sink), depth_(limits.depth), queue_(sink, 2 * static_cast<size_t>(limits.depth)) {}

    Failure start() override {
        return {};
    }

    void push(const Request &request) override {
        {
            // One thread more as long as all that are there may be waiting.
            std::lock_guard<std::mutex> lock(mutex_);
            if (threads_.size() < depth_ && idle_.load() == 0 && !sink_->stopping()) {
                try {
                    threads_.emplace_back([this] { work(); });
                } catch (const std::system_error &error) {
                    if (threads_.empty()) {
                        sink_->failed(
                            os_failure(TL_ERR_MEMORY, error.code().value(), "cannot start a thread"));
                        return;
                    }
                }
            }
        }
        queue_.push(request);
    }

    void wake() override {
        queue_.wake();
    }

    void join() override {
        queue_.wake();
        std::lock_guard<std::mutex> lock(mutex_);
        for (std::thread &thread : threads_) thread.join();
        threads_.clear();
    }

    uint32_t threads() const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return static_cast<uint32_t>(threads_.size());
    }

private:
    void work() {
        sink_->enter_thread();
        Bounce bounce;
        Request request;
        for (;;) {
            idle_++;
            const bool there = queue_.pop(&request, true);
            idle_--;
            if (!there) return;
            read(request, &bounce);
        }
    }

    void read(const Request &request, Bounce *bounce) {
        DirectRead read;
        if (!read.begin(request, bounce)) {
            sink_->failed(failure(TL_ERR_MEMORY, "no memory for a buffer of direct reads"));
            return;
        }
        Failure why;
        for (;;) {
            const ssize_t got = pread(request.file->direct_fd, read.buffer(), read.nbytes(),
                                      static_cast<off_t>(read.offset()));
            if (got > 0) sink_->count_read(TL_PATH_PREAD_DIRECT, static_cast<uint64_t>(got));
            switch (read.on_result(got < 0 ? -errno : got, &why)) {
                case DirectRead::Outcome::kMore:
                    if (sink_->stopping()) return;
                    continue;
                case DirectRead::Outcome::kDone:
                    return sink_->complete(request, TL_PATH_PREAD_DIRECT, read.bounced());
                case DirectRead::Outcome::kRefused:
                    return sink_->refused(request, TL_PATH_PREAD_DIRECT, why.os_errno);
                case DirectRead::Outcome::kFailed:
                    return sink_->failed(why);
            }
        }
    }

    RequestSink *sink_;
    const size_t depth_;
    RequestQueue queue_;
    mutable std::mutex mutex_;
    std::vector<std::thread> threads_;
    std::atomic<uint32_t> idle_{0};
};

}  // namespace

std::unique_ptr<DeepReader> make_pread_direct(RequestSink *sink, const DeepLimits &limits) {
    return std::make_unique<PreadDirect>(sink, limits);
}

}  // namespace tl
