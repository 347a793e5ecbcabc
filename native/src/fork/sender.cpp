#include "fork/sender.hpp"

#include <sys/socket.h>

#include <chrono>

#include "digest.hpp"
#include "fork/blocks.hpp"
#include "starting.hpp"

namespace tl {
namespace {

constexpr uint64_t kPartsASecond = 16, kLeastPart = 1024;
// Without a limit: each wakes a fork that copies, which took a tenth of its rate with one at a time (and as much with all,
// since it then waits for them).
constexpr uint64_t kDigestsAtOnce = 4;

// How much of a block's digest goes with so many of its bytes.
uint64_t digest_at(uint64_t bytes, uint64_t nbytes) {
    return bytes * sizeof(Digest) / nbytes;
}

}  // namespace

Sender::~Sender() {
    if (forked()) {
        // Its threads are the parent's. What is left of them here is forgotten, with the sockets, which are open there.
        for (Connection &connection : connections_) connection.thread.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true, std::memory_order_release);
        for (Connection &connection : connections_) shutdown(connection.fd, SHUT_RDWR);
    }
    stopped_.notify_all();
    for (Connection &connection : connections_) {
        connection.thread.join();
        close(connection.fd);
    }
}

Failure Sender::serve(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    collect();
    std::list<Connection> made;
    const int code = start_thread([&] {
        Connection &one = made.emplace_back(fd);
        one.thread = std::thread([this, &one] { work(one); });
    });
    if (code != 0) {
        close(fd);
        return os_failure(TL_ERR_MEMORY, code, "cannot start a thread");
    }
    connections_.splice(connections_.end(), made);
    return {};
}

void Sender::set_epoch(uint64_t epoch, bool open) {
    std::lock_guard<std::mutex> lock(state_mutex_);
    epoch_ = epoch;
    open_ = open;
}

void Sender::stats(tl_sender_stats *stats) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        collect();
        stats->connections = static_cast<uint32_t>(connections_.size());
    }
    stats->sent_bytes = sent_bytes_.load();
    stats->sent_chunks = sent_chunks_.load();
    stats->refused_chunks = refused_.load();
    stats->stale_chunks = stale_.load();
    stats->bad_requests = bad_.load();
}

// Under mutex_: those whose peer is gone.
void Sender::collect() {
    for (auto at = connections_.begin(); at != connections_.end();) {
        if (!at->ended.load(std::memory_order_acquire)) {
            ++at;
            continue;
        }
        at->thread.join();
        close(at->fd);
        at = connections_.erase(at);
    }
}

void Sender::work(Connection &connection) {
    Socket socket(connection.fd, idle_milliseconds_, &stop_);
    try {
        converse(socket);
    } catch (const std::exception &) {  // there is no memory: the end of this connection, not of the process
    }
    // The descriptor stays until the thread is collected, or its number could be another's by then.
    shutdown(connection.fd, SHUT_RDWR);
    connection.ended.store(true, std::memory_order_release);
}

Failure Sender::converse(Socket &socket) {
    Stages stages;
    while (true) {
        bool closed = false;
        if (Failure f = socket.wait_for_request(&closed)) return f;
        ChunkRequest request{};
        if (Failure f = socket.receive(&request, sizeof request, &closed)) return f;
        if (closed) return {};
        bool done = false;
        if (Failure f = answer(socket, request, stages, &done)) return f;
        if (done) return {};
    }
}

Stage *Sender::stage_of(const tl_region &region, Stages &stages, Failure *why) {
    if (region.device_kind == TL_DEVICE_CPU) return nullptr;
    for (const std::unique_ptr<Stage> &stage : stages) {
        if (stage->device() == region.device_index) return stage.get();
    }
    std::unique_ptr<Stage> made = Stage::make(region.device_kind, region.device_index, why);
    return made ? stages.emplace_back(std::move(made)).get() : nullptr;
}

bool Sender::inside(const ChunkRequest &request) const {
    if (request.region >= regions_.size()) return false;
    const uint64_t size = regions_[request.region].nbytes;
    return request.offset <= size && request.nbytes <= size - request.offset;
}

Failure Sender::answer(Socket &socket, const ChunkRequest &request, Stages &stages, bool *done) {
    Answer answer{kAnswer, TL_CHUNK_OK, 0};
    {
        std::lock_guard<std::mutex> lock(state_mutex_);
        answer.epoch = epoch_;
        if (!open_) answer.outcome = TL_CHUNK_CLOSED;
        if (request.epoch != epoch_) answer.outcome = TL_CHUNK_STALE;
    }
    if (request.magic != kRequest || !inside(request)) {
        // Whoever asks so has another manifest, or is no fork.
        answer.outcome = TL_CHUNK_RANGE;
        bad_++;
        *done = true;
    } else if (answer.outcome != TL_CHUNK_OK) {
        refused_++;
    }
    if (Failure f = socket.send(&answer, sizeof answer)) return f;
    if (answer.outcome != TL_CHUNK_OK) return {};
    Failure why;
    Stage *stage = stage_of(regions_[request.region], stages, &why);
    if (why) return why;
    const Bound bound(stage ? stage->driver() : nullptr, stage ? stage->device() : 0);
    return bound.failure() ? bound.failure() : send_bytes(socket, request, stage);
}

// Bytes, or where they are null their digest, as fast as the limit lets them. In parts, the digest too: at a low limit a
// whole block would take longer than a fork waits for a sign of life.
Failure Sender::send_block(Socket &socket, const char *bytes, uint64_t nbytes, const Digest &digest) {
    const uint64_t part =
        bucket_.rate() ? std::max<uint64_t>(bucket_.rate() / kPartsASecond, kLeastPart) : nbytes;
    for (uint64_t at = 0; at < nbytes;) {
        const uint64_t now = std::min(part, nbytes - at);
        if (Failure f = pause(bucket_.take(now, now_ns()))) return f;
        const uint64_t from = digest_at(at, nbytes), to = digest_at(at + now, nbytes);
        if (Failure f = bytes ? socket.send(bytes + at, now) : socket.send(digest.bytes + from, to - from))
            return f;
        sent_bytes_ += now;
        at += now;
    }
    return {};
}

Failure Sender::send_bytes(Socket &socket, const ChunkRequest &request, Stage *stage) {
    Outgoing outgoing(stage, regions_[request.region].address + request.offset, request.nbytes);
    Blocks blocks(request.digest != 0);
    Digest digests[kDigestsAtOnce];
    uint64_t count = 0;
    for (uint64_t at = 0; at < request.nbytes; at += kBlock) {
        const char *bytes = nullptr;
        uint64_t nbytes = std::min(kBlock, request.nbytes - at);
        // A fork that copies by itself and wants no digest needs nothing read here.
        if (!request.copies || blocks.wanted()) {
            if (Failure f = outgoing.next(&bytes, &nbytes)) return f;
        }
        const Digest digest = blocks.add(bytes, nbytes);
        if (!request.copies || bucket_.rate()) {
            if (Failure f = send_block(socket, request.copies ? nullptr : bytes, nbytes, digest)) return f;
            continue;
        }
        digests[count++] = digest;
        sent_bytes_ += nbytes;
        if (count == kDigestsAtOnce || at + nbytes == request.nbytes) {
            if (Failure f = socket.send(digests, count * sizeof(Digest))) return f;
            count = 0;
        }
    }
    if (request.copies) {
        Copied copied{};
        if (Failure f = socket.receive(&copied, sizeof copied)) return f;
        if (copied.magic != kCopied) {
            bad_++;
            return failure(TL_ERR_READ, "what came does not say that a chunk is copied");
        }
    }
    Trailer trailer{kTrailer, blocks.wanted(), 0, {}};
    blocks.digest(trailer.digest);
    {
        std::lock_guard<std::mutex> lock(state_mutex_);
        trailer.epoch = epoch_;
    }
    sent_chunks_++;
    if (trailer.epoch != request.epoch) stale_++;
    return socket.send(&trailer, sizeof trailer);
}

Failure Sender::pause(uint64_t nanoseconds) {
    if (nanoseconds == 0) return {};
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), [this] { return stop_.load(); })) {
        return failure(TL_ERR_CANCELLED, "stopped");
    }
    return {};
}

}  // namespace tl
