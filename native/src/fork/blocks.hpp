// The digest of a chunk, block by block as its bytes pass: XXH3-128 of its blocks' digests.
#pragma once

#include <cstring>
#include <vector>

#include "digest.hpp"

namespace tl {

class Blocks {
public:
    explicit Blocks(bool wanted) : wanted_(wanted && digests_built()) {}

    uint32_t wanted() const {
        return wanted_;
    }
    // The digest of the block; zeros where none is wanted.
    Digest add(const void *bytes, uint64_t nbytes) {
        if (!wanted_) return {};
        return found_.emplace_back(digest_of(bytes, nbytes));
    }
    void digest(uint8_t *digest) const {
        if (!wanted_) return;
        const Digest whole = digest_of(found_.data(), found_.size() * sizeof(Digest));
        std::memcpy(digest, whole.bytes, sizeof whole.bytes);
    }

private:
    bool wanted_;
    std::vector<Digest> found_;
};

}  // namespace tl
