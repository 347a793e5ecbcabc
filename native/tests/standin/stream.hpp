// A stream: one thread that runs operations in order. A latch: something that happens once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace standin {

class Latch {
public:
    void open() {
        std::lock_guard lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return open_; });
    }
    bool is_open() {
        std::lock_guard lock(mutex_);
        return open_;
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
};

class Stream {
public:
    explicit Stream(bool counted) : counted_(counted), thread_([this] { run(); }) {}
    ~Stream() {
        close();
        thread_.join();
    }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    void push(std::function<void()> operation) {
        push({std::move(operation), nullptr});
    }

    // The stream stops there until the latch opens.
    void push_wait(std::shared_ptr<Latch> latch) {
        push({[latch] { latch->wait(); }, latch});
    }

    // Returns when nothing more can happen on this stream by itself: it is empty, or stopped by a latch.
    void settle() {
        std::unique_lock lock(mutex_);
        // A latch opens without a notification here, hence the short slices.
        while (!idle_.wait_for(lock, std::chrono::milliseconds(1), [this] {
            return (queue_.empty() && !busy_) || (stopped_by_ && !stopped_by_->is_open());
        })) {
        }
    }

    // Waits for what the stream holds now, as the driver does: later work does not prolong it.
    void synchronize() {
        auto reached = std::make_shared<Latch>();
        push([reached] { reached->open(); });
        reached->wait();
    }

    // The thread ends after the work that is queued; destroying joins it.
    void close() {
        std::lock_guard lock(mutex_);
        closed_ = true;
        changed_.notify_one();
    }

    bool counted() const {
        return counted_;
    }

private:
    struct Operation {
        std::function<void()> run;
        std::shared_ptr<Latch> latch;  // what it waits for
    };

    void push(Operation operation) {
        std::lock_guard lock(mutex_);
        queue_.push_back(std::move(operation));
        changed_.notify_one();
    }

    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
            if (queue_.empty()) {
                return;
            }
            Operation operation = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
            stopped_by_ = operation.latch;
            lock.unlock();
            operation.run();
            operation = {};
            lock.lock();
            busy_ = false;
            stopped_by_ = nullptr;
            idle_.notify_all();
        }
    }

    const bool counted_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable idle_;
    std::deque<Operation> queue_;
    bool closed_ = false;
    bool busy_ = false;
    std::shared_ptr<Latch> stopped_by_;
    std::thread thread_;
};

}  // namespace standin
