// The engine: keeps the plan, hands chunks to threads in order, counts what has landed. How a chunk's bytes come is in
// fetch.cpp; this is who waits for whom.
//
// Order and locks
//   - Chunks are taken in the order of the plan, a slot's first one only when a place in the ring is free. So the oldest
//     slot always progresses, and nothing waits in a circle.
//   - mutex_ guards the plan and all counters. A file's mutex is taken before it, never under it. Driver calls that may
//     wait are made under neither.
//   - The first failure wins: it stops all threads and answers every wait.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "backends.hpp"
#include "copier.hpp"
#include "digest.hpp"
#include "file.hpp"
#include "plan.hpp"
#include "readers/reader.hpp"
#include "ring.hpp"
#include "trace.hpp"

namespace tl {

class Engine final : public RequestSink {
public:
    explicit Engine(const tl_options &options);
    ~Engine() override;

    Failure start();
    Failure add_file(const char *path, uint64_t device, uint64_t inode, uint64_t nbytes, int32_t *index);
    Failure submit(const tl_piece *pieces, uint64_t count, Stream consumer, uint64_t *ticket);
    Failure wait(uint64_t ticket, uint32_t timeout_ms);
    Failure stream_wait(Stream consumer);
    Failure digests(uint64_t first, uint64_t count, uint8_t *digests);
    const Trace &trace() const {
        return trace_;
    }
    // Returns when what has landed is copied, whose events come a little later; after a second in any case.
    void await_copies();
    Failure file_info(int32_t index, tl_file_info *info);
    void stats(tl_stats *stats);
    void cancel();
    void set_aside() {
        aside_ = true;
    }
    // Ends everything; the first failure of giving back.
    Failure close();

    const uint64_t *landed() const {
        return reinterpret_cast<const uint64_t *>(&landed_);
    }
    bool forked() const {
        return getpid() != pid_;
    }

    // RequestSink, called by the readers' threads
    bool stopping() const override {
        return stopping_.load(std::memory_order_acquire);
    }
    void enter_thread() override;
    void complete(const Request &request, int path, const char *bounced) override;
    void refused(const Request &request, int path, const std::string &why, uint64_t got) override;
    void failed(const Failure &failure) override;
    void count_read(int path, uint64_t nbytes) override;

private:
    // Work of a thread of ours: what it throws (there is no memory) is the engine's failure, not the end of the process.
    template <class Work>
    void guarded(Work work) {
        try {
            work();
        } catch (const std::exception &error) {
            failed(failure(TL_ERR_MEMORY, error.what()));
        }
    }

    // fetch.cpp: how the bytes of a chunk come
    bool make_slot(uint64_t k);
    void fetch(Chunk *chunk);
    Failure ready_file(File *file, Route *route);
    Failure open_and_route(File *file, Route *route);
    bool fetch_range(Chunk *chunk, File *file, const Route &route, uint64_t begin, uint64_t end);
    std::vector<Segment> segments_of(const Chunk &chunk, const File &file) const;
    bool fetch_deep(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end);
    void push_blocks(DeepReader *reader, const Request &all, uint64_t block);
    bool fetch_straight(Chunk *chunk, File *file, uint64_t begin, uint64_t end);
    void push(DeepReader *reader, const Request &request);
    char *slot_base(const Slot &slot) const;
    DeepReader *deep_reader(int path, Failure *why);
    // got: where it is a read that was refused, the bytes before that
    bool path_refused(Chunk *chunk, File *file, int path, const std::string &why, uint64_t begin,
                      uint64_t end, std::optional<uint64_t> got = {});

    // cached.cpp
    enum class Came { kHere, kElsewhere, kNever };
    bool fetch_cached(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end);
    bool fetch_stretch(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end);
    // Rows, and what lies between them, through a buffer.
    bool fetch_packed(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end);
    // Fills the buffers from the wanted range. What is refused is read by another path, the whole range: kElsewhere.
    Came read_all(Chunk *chunk, File *file, int path, Range whole, Range wanted, std::vector<iovec> *buffers);
    // From the bytes of a range to where they go; how many are wanted.
    static uint64_t unpack(const Chunk &chunk, char *base, const char *bytes, Range range);

    // digesting.cpp
    bool all_there(const Chunk &chunk);
    bool fetch_and_digest(Chunk *chunk, File *file, int path);
    void make_digests(const Slot &slot, DigestJob *first, DigestJob *last);
    void digest_slot(Slot *slot);

    // threads.cpp
    void start_threads(size_t chunks);
    Failure start_copier();
    void stay_near();

    // engine.cpp: who waits for whom
    void work();
    // What a copying thread does next: one of both, or nothing at the end.
    struct Work {
        Chunk *chunk = nullptr;
        Slot *filled = nullptr;
        explicit operator bool() const {
            return chunk || filled;
        }
    };
    Work take_work();
    void end_wait(uint64_t waited_from);
    bool wait_for_a_close(uint64_t closes);
    bool slot_has_place(Slot *slot);
    void part_done(Chunk *chunk, bool by_reader);
    void slot_filled(Slot *slot);
    void slot_copied(uint64_t slot_index, uint64_t begin_ns);
    void advance_landed();
    void retire();
    void add_note(const std::string &note);
    void end_ring(bool quiet);

    const tl_options options_;
    const bool device_;
    const pid_t pid_;
    Trace trace_;
    Driver *driver_ = nullptr;
    bool retained_ = false;
    std::unique_ptr<Ring> ring_;
    std::unique_ptr<Copier> copier_;
    std::mutex copier_mutex_;  // guards its start
    std::atomic<bool> copier_runs_{false};

    mutable std::mutex mutex_;
    std::condition_variable work_cv_;          // a chunk or a slot to fill
    std::condition_variable done_cv_;          // landed_ moved, or the engine ended
    std::condition_variable closes_cv_;        // for threads that lack a descriptor
    std::deque<std::unique_ptr<Slot>> slots_;  // in order, from the oldest that is not retired
    uint64_t first_slot_ = 0;                  // index of slots_.front()
    uint64_t next_slot_ = 0;                   // where take_work goes on
    size_t next_chunk_ = 0;
    std::deque<Slot *> filled_;  // to be digested by a copying thread
    uint64_t slots_submitted_ = 0;
    uint64_t landed_slots_ = 0;  // leading slots that have landed
    std::vector<uint64_t> free_places_;
    uint64_t pieces_submitted_ = 0;
    std::vector<Digest> digests_;      // by piece; empty until one is asked for
    std::atomic<uint64_t> closes_{0};  // files closed so far
    uint64_t taken_chunks_ = 0;        // taken and not complete
    uint64_t lacking_ = 0;             // of these, waiting for a descriptor
    Failure failure_;
    std::string notes_;
    std::vector<std::thread> threads_;
    std::vector<std::unique_ptr<File>> files_;

    std::atomic<uint64_t> landed_{0};
    std::atomic<bool> stopping_{false};
    Failure driver_failure_;  // the first, which may come when all has landed
    bool closed_ = false;
    std::atomic<bool> aside_{false};  // the ring, at the end

    std::mutex deep_mutex_;  // guards making the deep readers; of other locks only theirs is taken under it
    std::unique_ptr<DeepReader> deep_[TL_PATH_COUNT];
    Failure deep_why_[TL_PATH_COUNT];

    std::atomic<uint64_t> bytes_[TL_PATH_COUNT]{};
    std::atomic<uint64_t> reads_[TL_PATH_COUNT]{};
    std::atomic<uint64_t> direct_bytes_{0};
    std::atomic<uint64_t> bounced_bytes_{0};
    std::atomic<uint64_t> copies_{0};
    std::atomic<uint64_t> slot_wait_ns_{0};
};

// Reads the first bytes of a file with the given options (one back end); the failure says what was refused.
Failure probe(const tl_options &options, const char *path);

}  // namespace tl
