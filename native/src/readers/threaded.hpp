// A reader whose calls wait: one request a thread, and threads that come where all that are there are busy.
#pragma once

#include <thread>
#include <vector>

#include "readers/deep.hpp"

namespace tl {

class ThreadedReader : public DeepReader {
public:
    ThreadedReader(RequestSink *sink, int path, const DeepLimits &limits)
        : sink_(sink), path_(path), limits_(limits), queue_(sink, 2 * static_cast<size_t>(limits.depth)) {}

    Failure start() override {
        return {};
    }
    void push(const Request &request) override;
    void wake() override {
        queue_.wake();
    }
    void join() override;
    uint32_t threads() const override;

protected:
    // Brings a request, on one of the threads, and tells the sink; bounce is the thread's own.
    virtual void read(const Request &request, Bounce *bounce) = 0;
    // How many threads are worth having.
    virtual size_t most_threads() const = 0;

    RequestSink *const sink_;
    const int path_;
    const DeepLimits limits_;

private:
    void start_another();
    void work();

    RequestQueue queue_;
    mutable std::mutex mutex_;
    std::vector<std::thread> threads_;
    std::atomic<uint32_t> idle_{0};
};

}  // namespace tl
