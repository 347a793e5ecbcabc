// The digest of a chunk, block by block as its bytes pass: XXH3-128 of its blocks' digests.
#pragma once

#include <cstring>

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
        const Digest found = digest_of(bytes, nbytes);
        whole_.add(found.bytes, sizeof found.bytes);
        return found;
    }
    void digest(uint8_t *digest) const {
        if (!wanted_) return;
        const Digest whole = whole_.digest();
        std::memcpy(digest, whole.bytes, sizeof whole.bytes);
    }

private:
    bool wanted_;
    DigestStream whole_;
};

}  // namespace tl
