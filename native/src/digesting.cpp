// The digests of what was read: made before the memory is used again, kept by piece.
#include <algorithm>

#include "engine.hpp"

namespace tl {
namespace {

// Bytes to read before they are digested: still in the processor's caches then. On two cores digesting each MiB right
// after its read costs 8 to 17 % of a read, four MiB together 23 to 35 %, and 256 KiB is no better than one MiB.
constexpr uint64_t kFresh = 1u << 20;

}  // namespace

bool Engine::digests_while_fetching(const Chunk &chunk, uint64_t begin, uint64_t end) const {
    return !device_ && !chunk.slot->digests.empty() && chunk.slot->chunks.size() == 1 &&
           begin == chunk.begin && end == chunk.end;
}

void Engine::make_digests(const Slot &slot, DigestJob *first, DigestJob *last) {
    const uint64_t begin = trace_.begin();
    const auto base = reinterpret_cast<uintptr_t>(slot_base(slot));
    uint64_t nbytes = 0;
    for (DigestJob *job = first; job != last; job++) {
        if (job->made) continue;
        job->digest = digest_of(reinterpret_cast<const void *>(base + job->where), job->nbytes);
        job->made = true;
        nbytes += job->nbytes;
    }
    if (nbytes > 0) trace_.end(begin, TL_STAGE_DIGEST, -1, 0, nbytes);
}

// Whether nobody is bringing a part of the chunk: a path that was refused has another, which may be waiting for storage.
bool Engine::all_there(const Chunk &chunk) {
    std::lock_guard<std::mutex> lock(mutex_);
    return chunk.pending == 1;
}

bool Engine::fetch_and_digest(Chunk *chunk, File *file, int path) {
    DigestJob *job = chunk->slot->digests.data();
    DigestJob *const end = job + chunk->slot->digests.size();
    uint64_t at = chunk->begin;
    while (job != end) {
        DigestJob *const first = job;
        uint64_t until = at;
        while (job != end && (job == first || job->end() - at <= kFresh)) until = (job++)->end();
        if (!fetch_cached(chunk, file, path, at, until)) return false;
        if (all_there(*chunk)) make_digests(*chunk->slot, first, job);
        at = until;
    }
    // Pieces that are not to be digested may come last.
    return at == chunk->end || fetch_cached(chunk, file, path, at, chunk->end);
}

void Engine::digest_slot(Slot *slot) {
    make_digests(*slot, slot->digests.data(), slot->digests.data() + slot->digests.size());
    std::lock_guard<std::mutex> lock(mutex_);
    if (digests_.size() < pieces_submitted_) digests_.resize(pieces_submitted_);
    for (const DigestJob &job : slot->digests) digests_[job.piece] = job.digest;
}

Failure Engine::digests(uint64_t first, uint64_t count, uint8_t *digests) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (first + count < first || first + count > landed_.load()) {
        return failure(TL_ERR_ARGUMENT, "digests of pieces that have not landed");
    }
    if (count > 0) std::memset(digests, 0, count * sizeof(Digest));
    for (uint64_t i = first; i < std::min<uint64_t>(first + count, digests_.size()); i++)
        std::memcpy(digests + (i - first) * sizeof(Digest), digests_[i].bytes, sizeof(Digest));
    return {};
}

}  // namespace tl
