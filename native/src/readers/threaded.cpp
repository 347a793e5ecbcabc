#include "readers/threaded.hpp"

#include <exception>

#include "starting.hpp"

namespace tl {

void ThreadedReader::push(const Request &request) {
    start_another();
    queue_.push(request);
}

void ThreadedReader::join() {
    queue_.wake();
    std::vector<std::thread> threads;
    {
        std::lock_guard<std::mutex> lock(
            mutex_);  // not while joining: a thread may be about to start another
        threads.swap(threads_);
    }
    for (std::thread &thread : threads) thread.join();
}

uint32_t ThreadedReader::threads() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<uint32_t>(threads_.size());
}

// One thread more where all that are there are busy and another would find something to wait for.
void ThreadedReader::start_another() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (threads_.size() >= most_threads() || idle_.load() > 0 || sink_->stopping()) return;
    const int code = start_thread([this] { threads_.emplace_back([this] { work(); }); });
    if (code != 0 && threads_.empty()) {
        sink_->failed(os_failure(TL_ERR_MEMORY, code, "cannot start a thread"));
    }
}

void ThreadedReader::work() {
    sink_->enter_thread();
    Bounce bounce;
    Request request;
    for (;;) {
        idle_++;
        const bool there = queue_.pop(&request, true);
        idle_--;
        if (!there) return;
        try {
            read(request, &bounce);
        } catch (const std::exception &error) {  // there is no memory
            sink_->failed(failure(TL_ERR_MEMORY, error.what()));
        }
        // All may have been pushed before the first read showed that reads wait.
        if (queue_.size() > 0) start_another();
    }
}

}  // namespace tl
