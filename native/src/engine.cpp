#include "engine.hpp"

#include <algorithm>
#include <chrono>

#include "keeper.hpp"
#include "straight.hpp"

namespace tl {
namespace {

constexpr uint64_t kLongestChunk = 1u << 30;  // io_uring counts a read in 32 bits

}  // namespace

Engine::Engine(const tl_options &options)
    : options_(options),
      device_(options.device_kind != TL_DEVICE_CPU),
      pid_(getpid()),
      trace_(options.flags & TL_OPTION_TRACE) {}

Engine::~Engine() {
    close();
}

Failure Engine::start() {
    const tl_options &o = options_;
    if (o.chunk_bytes == 0 || o.chunk_bytes % kPage != 0 || o.chunk_bytes > kLongestChunk) {
        return failure(TL_ERR_ARGUMENT, "chunk_bytes must be a multiple of 4096 of at most 1 GiB");
    }
    if (o.slot_bytes == 0 || o.slot_bytes % o.chunk_bytes != 0) {
        return failure(TL_ERR_ARGUMENT, "slot_bytes must be a multiple of chunk_bytes");
    }
    if (o.threads == 0 || o.io_depth == 0 || o.threads > 4096 || o.io_depth > 4096) {
        return failure(TL_ERR_ARGUMENT, "threads and io_depth must be from 1 to 4096");
    }
    if (o.backend_count == 0 || o.backend_count > std::size(o.backends)) {
        return failure(TL_ERR_ARGUMENT, "backend_count must be from 1 to 16");
    }
    for (uint32_t i = 0; i < o.backend_count; i++) {
        if (o.backends[i] >= TL_BACKEND_COUNT) return failure(TL_ERR_ARGUMENT, "unknown back end");
    }
    if (!device_) return {};
    Failure why;
    driver_ = driver_for(o.device_kind, &why);
    if (!driver_) return why;
    if (Failure f = driver_->retain(o.device_index)) return f;
    retained_ = true;
    Bound bound(driver_, o.device_index);
    if (bound.failure()) return bound.failure();
    ring_ = take_ring(driver_, o.device_index, o.slot_bytes, o.pinned_bytes);
    // The first at the end: it is taken first, and a small load makes no other.
    for (uint64_t k = ring_->count(); k-- > 0;) free_places_.push_back(k);
    copier_ = std::make_unique<Copier>(driver_, ring_->count(),
                                       Copier::Callbacks{[this] { enter_thread(); },
                                                         [this](uint64_t index, uint64_t begin) {
                                                             guarded([&] { slot_copied(index, begin); });
                                                         },
                                                         [this](const Failure &f) { failed(f); }});
    if (!(o.flags & TL_OPTION_WARM)) return {};
    if (Failure f = start_copier()) return f;
    std::lock_guard<std::mutex> lock(mutex_);
    start_threads(o.threads);
    return failure_;
}

Failure Engine::add_file(const char *path, uint64_t device, uint64_t inode, uint64_t nbytes, int32_t *index) {
    std::lock_guard<std::mutex> lock(mutex_);
    *index = static_cast<int32_t>(files_.size());
    files_.push_back(std::make_unique<File>(*index, path, device, inode, nbytes));
    return {};
}

Failure Engine::submit(const tl_piece *pieces, uint64_t count, Stream consumer, uint64_t *ticket) {
    PlanBuilder builder({device_, options_.chunk_bytes, options_.slot_bytes});
    std::vector<uint64_t> files;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto &file : files_) files.push_back(file->nbytes());
    }
    for (uint64_t i = 0; i < count; i++) {
        if (Failure f = check_piece(pieces, i, files, options_.slot_bytes)) return f;
        tl_piece piece = pieces[i];
        if (i == 0) piece.flags &= ~TL_PIECE_JOIN;
        builder.add(piece);
    }
    uint64_t fence = 0;
    if (device_ && count > 0) {
        Bound bound(driver_, options_.device_index);
        if (bound.failure()) return bound.failure();
        if (Failure f = start_copier()) return f;
        if (copier_runs_) {
            if (Failure f = copier_->wait_for_consumer(consumer, &fence)) return f;
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return failure_;
    auto fresh = builder.finish(pieces_submitted_);
    // All memory that the plan takes, before anything of it is there: without it nothing was submitted.
    size_t end = slots_.size();
    slots_.resize(end + fresh.size());
    pieces_submitted_ += count;
    *ticket = pieces_submitted_;
    size_t chunks = 0;
    for (auto &slot : fresh) {
        slot->index = slots_submitted_++;
        slot->fence = fence;
        chunks += slot->chunks.size();
        for (const Chunk &chunk : slot->chunks) files_[static_cast<size_t>(chunk.file)]->outstanding++;
        slots_[end++] = std::move(slot);
    }
    // Pieces of no bytes at the end are complete with what is before them.
    if (slots_.empty() || landed_slots_ == slots_submitted_) {
        landed_.store(pieces_submitted_, std::memory_order_release);
        done_cv_.notify_all();
    } else {
        slots_.back()->ticket = pieces_submitted_;
    }
    start_threads(chunks);
    work_cv_.notify_all();
    return failure_;
}

void Engine::work() {
    enter_thread();
    // Where much will come, the whole ring first: many threads make it faster than those that want one slot.
    uint64_t slot;
    // What goes past the ring needs none of it until something is refused.
    const bool warm = (options_.flags & TL_OPTION_WARM) && options_.backends[0] != TL_BACKEND_CUFILE;
    while (device_ && warm && !stopping() && ring_->claim(&slot)) {
        guarded([&] { make_slot(slot); });
    }
    while (const Work next = take_work()) {
        guarded([&] { next.filled ? slot_filled(next.filled) : fetch(next.chunk); });
    }
}

// Under mutex_. Whether the slot has a place in the ring, or gets one now. Any free one will do: where one chunk is late,
// because its thread has lost its CPU say, the other places go on.
bool Engine::slot_has_place(Slot *slot) {
    if (!device_ || next_chunk_ > 0) return true;
    if (free_places_.empty()) return false;
    slot->place = free_places_.back();
    free_places_.pop_back();
    return true;
}

// For a thread that found no place in the ring since then; 0: it did not wait.
void Engine::end_wait(uint64_t waited_from) {
    if (!waited_from) return;
    slot_wait_ns_ += now_ns() - waited_from;
    trace_.end(waited_from, TL_STAGE_WAIT_SLOT, -1, 0, 0);
}

// Filled slots first: what was read last is in the processor's caches still, and other memory waits for them.
Engine::Work Engine::take_work() {
    std::unique_lock<std::mutex> lock(mutex_);
    uint64_t waited_from = 0;
    for (;;) {
        if (stopping()) return {};
        if (!filled_.empty()) {
            Slot *slot = filled_.front();
            filled_.pop_front();
            end_wait(waited_from);
            return {nullptr, slot};
        }
        if (next_slot_ < slots_submitted_) {
            Slot &slot = *slots_[next_slot_ - first_slot_];
            if (slot_has_place(&slot)) {
                end_wait(waited_from);
                Chunk *chunk = &slot.chunks[next_chunk_++];
                taken_chunks_++;
                if (next_chunk_ == slot.chunks.size()) {
                    next_slot_++;
                    next_chunk_ = 0;
                }
                return {chunk, nullptr};
            }
            if (!waited_from) waited_from = now_ns();
        }
        work_cv_.wait(lock);
    }
}

// For a thread that lacks a descriptor: whether a file of ours was closed since closes, perhaps only now. False where
// all that could close one wait as well, and at the end.
bool Engine::wait_for_a_close(uint64_t closes) {
    std::unique_lock<std::mutex> lock(mutex_);
    lacking_++;
    closes_cv_.notify_all();
    closes_cv_.wait(lock,
                    [&] { return closes_.load() != closes || lacking_ == taken_chunks_ || stopping(); });
    lacking_--;
    return closes_.load() != closes && !stopping();
}

void Engine::part_done(Chunk *chunk, bool by_reader) {
    Slot *slot = nullptr;
    CufileHandle handle;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--chunk->pending > 0) return;
        File &file = *files_[static_cast<size_t>(chunk->file)];
        if (file.outstanding == 1) handle = std::move(file.cufile);
    }
    handle.close();  // a driver's call; what comes for the file meanwhile makes another
    {
        std::lock_guard<std::mutex> lock(mutex_);
        taken_chunks_--;
        File &file = *files_[static_cast<size_t>(chunk->file)];
        // Nobody reads a file without a chunk of it, so it can be closed under this lock alone.
        if (--file.outstanding == 0) {
            file.close();
            closes_++;
        }
        if (lacking_ > 0) closes_cv_.notify_all();
        slot = chunk->slot;
        if (--slot->chunks_left > 0) return;
        // One thread may wait for all of the storage: what takes time is for the copying threads.
        if (by_reader && !slot->digests.empty()) {
            filled_.push_back(slot);
            work_cv_.notify_one();
            return;
        }
    }
    slot_filled(slot);
}

void Engine::slot_filled(Slot *slot) {
    if (stopping()) return;
    // Before the copy: after it the slot may be filled again.
    if (!slot->digests.empty()) digest_slot(slot);
    const uint64_t index = slot->index;
    if (device_) {
        uint64_t copies = 0;
        slot->copies = copies_left(*slot);  // none where all came straight
        const char *base = slot->copies.empty() ? nullptr : slot_base(*slot);
        if (Failure f = copier_->issue(*slot, base, &copies)) return failed(f);
        copies_ += copies;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    // Its copy may have been waited for already; it is retired only when both are done.
    slots_[index - first_slot_]->landed = true;
    advance_landed();
}

void Engine::slot_copied(uint64_t slot_index, uint64_t begin_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot &slot = *slots_[slot_index - first_slot_];
    slot.copied = true;
    free_places_.push_back(slot.place);
    uint64_t nbytes = 0;
    for (const Copy &copy : slot.copies) nbytes += copy.nbytes;
    if (nbytes > 0) trace_.end(begin_ns, TL_STAGE_COPY, -1, 0, nbytes);
    retire();
    work_cv_.notify_all();
}

void Engine::await_copies() {
    std::unique_lock<std::mutex> lock(mutex_);
    work_cv_.wait_for(lock, std::chrono::seconds(1), [&] {
        return std::none_of(slots_.begin(), slots_.end(),
                            [&](const auto &slot) { return device_ && slot->landed && !slot->copied; });
    });
}

// Under mutex_.
void Engine::advance_landed() {
    uint64_t ticket = 0;
    while (landed_slots_ < slots_submitted_ && slots_[landed_slots_ - first_slot_]->landed) {
        ticket = slots_[landed_slots_ - first_slot_]->ticket;
        landed_slots_++;
    }
    if (ticket) {
        landed_.store(ticket, std::memory_order_release);
        done_cv_.notify_all();
    }
    retire();
}

// Under mutex_.
void Engine::retire() {
    while (!slots_.empty() && slots_.front()->landed && (slots_.front()->copied || !device_)) {
        slots_.pop_front();
        first_slot_++;
    }
}

Failure Engine::wait(uint64_t ticket, uint32_t timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (ticket > pieces_submitted_) return failure(TL_ERR_ARGUMENT, "no such ticket has been given");
    done_cv_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                      [&] { return landed_.load() >= ticket || failure_; });
    if (landed_.load() >= ticket) return {};
    if (failure_) return failure_;
    return failure(TL_PENDING, "");
}

Failure Engine::stream_wait(Stream consumer) {
    if (!device_ || !copier_runs_) return {};
    Bound bound(driver_, options_.device_index);
    if (bound.failure()) return bound.failure();
    return copier_->make_consumer_wait(consumer);
}

void Engine::failed(const Failure &failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    keep_first(&failure_, failure);
    if (failure.status == TL_ERR_DRIVER) keep_first(&driver_failure_, failure);
    stopping_.store(true, std::memory_order_release);
    work_cv_.notify_all();
    done_cv_.notify_all();
    closes_cv_.notify_all();
}

void Engine::cancel() {
    failed(failure(TL_ERR_CANCELLED, "cancelled"));  // a text that needs no memory: it has to be possible
}

Failure Engine::close() {
    if (closed_) return {};
    closed_ = true;
    cancel();
    {
        // From here on no deep reader is made. A copying thread may wait for room in a queue: let it go first.
        std::lock_guard<std::mutex> lock(deep_mutex_);
        for (auto &reader : deep_) {
            if (reader) reader->wake();
        }
    }
    for (std::thread &thread : threads_) thread.join();
    threads_.clear();
    for (auto &reader : deep_) {
        if (reader) reader->join();
    }
    Failure first;
    if (driver_ && retained_) {
        Bound bound(driver_, options_.device_index, true);
        keep_first(&first, bound.failure());
        files_.clear();  // libcufile's handles, before the context that they were made in
        if (copier_) {
            keep_first(&first, copier_->stop());
        }
        if (ring_) end_ring(!first);
        driver_->release(options_.device_index);
    }
    files_.clear();
    return driver_failure_ ? driver_failure_ : first;  // no thread is left that could set it
}

// A ring that came from the keeper goes back there. quiet: all copies are known to be over; what a driver that failed may
// read still is not for others.
void Engine::end_ring(bool quiet) {
    if (aside_) return set_ring_aside(std::move(ring_));
    const bool wanted = (options_.flags & TL_OPTION_KEEP) || ring_->reused_bytes() > 0;
    if (wanted && quiet && !driver_failure_) return keep_ring(std::move(ring_));
    ring_->release();
}

}  // namespace tl
