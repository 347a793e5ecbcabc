// XXH3-128 of bytes. The header of xxHash is compiled in twice, plain and for AVX2, and chosen at run time: the packaged
// library has no AVX2, and cost 22 to 41 % of a read where this costs 7 to 9 (measured on two cores).
#pragma once

#include <cstdint>

namespace tl {

struct Digest {
    uint8_t bytes[16];  // canonical: big endian
};

// False where xxHash was not there when the library was built.
bool digests_built();

Digest digest_of(const void *bytes, uint64_t nbytes);

// The digest of bytes that come in parts. Takes no memory but its own.
class DigestStream {
public:
    DigestStream();
    void add(const void *bytes, uint64_t nbytes);
    Digest digest() const;

private:
    alignas(64) unsigned char state_[576];  // XXH3_state_t
};

// One a file, each compiled for its instruction set.
Digest digest_plain(const void *bytes, uint64_t nbytes);
Digest digest_avx2(const void *bytes, uint64_t nbytes);

}  // namespace tl
