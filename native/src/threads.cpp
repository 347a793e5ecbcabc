// The engine's own threads: when they start, and how each begins.
#include <algorithm>

#include "engine.hpp"
#include "starting.hpp"

namespace tl {

// At the first pieces, so that an engine without any costs nothing.
Failure Engine::start_copier() {
    std::lock_guard<std::mutex> lock(copier_mutex_);
    if (copier_runs_ || stopping()) return {};
    Failure f;
    try {
        f = copier_->start();
    } catch (const std::bad_alloc &) {
        f = failure(TL_ERR_MEMORY, kNoMemory);
    }
    if (f) {
        failed(f);  // for good: what was made of it is given back by close()
    } else {
        copier_runs_ = true;
    }
    return f;
}

// Under mutex_. One thread a chunk at most: small loads stay small.
void Engine::start_threads(size_t chunks) {
    const size_t wanted = std::min<size_t>(options_.threads, std::max(threads_.size(), chunks));
    while (threads_.size() < wanted) {
        const int code = start_thread([this] { threads_.emplace_back([this] { work(); }); });
        if (code == 0) continue;
        Failure f = os_failure(TL_ERR_MEMORY, code, "cannot start a thread");
        if (threads_.empty()) {
            failure_ = std::move(f);
            stopping_.store(true, std::memory_order_release);
        } else if (notes_.empty()) {
            notes_ = std::move(f.message);
        }
        return;
    }
}

void Engine::enter_thread() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    guarded([this] { stay_near(); });
    if (device_) {
        if (Failure f = driver_->bind(options_.device_index, nullptr)) failed(f);
    }
}

// The thread runs, and so touches memory first, where the options say.
void Engine::stay_near() {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (size_t cpu = 0; cpu < 64 * std::size(options_.cpus); cpu++) {
        if (options_.cpus[cpu / 64] >> (cpu % 64) & 1) CPU_SET(cpu, &cpus);
    }
    if (CPU_COUNT(&cpus) == 0) return;
    const int code = pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
    if (code != 0) add_note(std::string("threads could not be kept near the device: ") + std::strerror(code));
}

}  // namespace tl
