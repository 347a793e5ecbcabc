// The digests of what was read: made slot by slot before the memory is used again, kept by piece.
#include <algorithm>

#include "engine.hpp"

namespace tl {

void Engine::digest_slot(const Slot &slot) {
    const uint64_t begin = trace_.begin();
    const auto base = reinterpret_cast<uintptr_t>(slot_base(slot));
    std::vector<Digest> made;
    uint64_t nbytes = 0;
    for (const DigestJob &job : slot.digests) {
        made.push_back(digest_of(reinterpret_cast<const void *>(base + job.where), job.nbytes));
        nbytes += job.nbytes;
    }
    trace_.end(begin, TL_STAGE_DIGEST, -1, 0, nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (digests_.size() < pieces_submitted_) digests_.resize(pieces_submitted_);
    for (size_t i = 0; i < made.size(); i++) digests_[slot.digests[i].piece] = made[i];
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
