// pread(2): on the thread that asks for what is cached, on threads of its own for what storage has to bring.
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "readers/threaded.hpp"

namespace tl {

int64_t pread_buffered(const File &file, const iovec *buffers, int count, uint64_t offset) {
    const auto at = static_cast<off_t>(offset);
    const ssize_t got = count == 1 ? pread(file.plain_fd, buffers->iov_base, buffers->iov_len, at)
                                   : preadv(file.plain_fd, buffers, count, at);
    return got < 0 ? -errno : got;
}

namespace {

uint64_t thread_cpu_ns() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// How often a thread, or the process, went to sleep by itself: waiting for storage, say, not while others had its CPU.
long sleeps(int whose) {
    rusage now{};
    getrusage(whose, &now);
    return now.ru_nvcsw;
}

// One pread, and what it took: on the clock, and of a CPU.
struct TimedRead {
    explicit TimedRead(const DeepRead &read) {
        const uint64_t begin = now_ns(), cpu_begin = thread_cpu_ns();
        // A process has slept before it reads: a kernel that says it never did does not count, so the clock must do.
        static const bool counted = sleeps(RUSAGE_SELF) > 0;
        const long before = sleeps(RUSAGE_THREAD);
        const ssize_t got = pread(read.fd(), read.buffer(), read.nbytes(), static_cast<off_t>(read.offset()));
        result = got < 0 ? -errno : got;
        cpu_ns = thread_cpu_ns() - cpu_begin;
        const bool slept = !counted || sleeps(RUSAGE_THREAD) > before;
        wall_ns = slept ? now_ns() - begin : cpu_ns;
    }
    int64_t result;
    uint64_t wall_ns;
    uint64_t cpu_ns;
};

// Direct reads wait for storage, so there are threads up to the depth. Buffered ones may be served by the cache: more
// threads than CPUs only come where reads are seen to wait.
class PreadThreads final : public ThreadedReader {
public:
    using ThreadedReader::ThreadedReader;

private:
    size_t most_threads() const override {
        const bool waits = is_direct(path_) || wall_ns_.load() > 2 * cpu_ns_.load();
        return waits ? limits_.depth : std::min(limits_.depth, limits_.threads);
    }

    void read(const Request &request, Bounce *bounce) override {
        DeepRead read;
        if (!read.begin(request, is_direct(path_), bounce)) {
            sink_->failed(failure(TL_ERR_MEMORY, "no memory for a buffer of reads"));
            return;
        }
        Failure why;
        for (;;) {
            const TimedRead timed(read);
            wall_ns_ += timed.wall_ns;
            cpu_ns_ += timed.cpu_ns;
            if (timed.result > 0) sink_->count_read(path_, static_cast<uint64_t>(timed.result));
            switch (read.on_result(timed.result, &why)) {
                case DeepRead::Outcome::kMore:
                    if (sink_->stopping()) return;
                    continue;
                case DeepRead::Outcome::kDone:
                    return sink_->complete(read.request(), path_, read.bounced());
                case DeepRead::Outcome::kRefused:
                    return sink_->refused(request, path_, std::strerror(why.os_errno), why.got);
                case DeepRead::Outcome::kFailed:
                    return sink_->failed(why);
            }
        }
    }

    std::atomic<uint64_t> wall_ns_{0};
    std::atomic<uint64_t> cpu_ns_{0};
};

}  // namespace

std::unique_ptr<DeepReader> make_pread(RequestSink *sink, int path, const DeepLimits &limits) {
    return std::make_unique<PreadThreads>(sink, path, limits);
}

}  // namespace tl
