// Compiled with -mavx2.
#define XXH_INLINE_ALL
#define XXH_VECTOR 2  // XXH_AVX2
#include <xxhash.h>

#include <cstring>

#include "digest.hpp"

namespace tl {

Digest digest_avx2(const void *bytes, uint64_t nbytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, nbytes));
    Digest digest;
    std::memcpy(digest.bytes, canonical.digest, sizeof digest.bytes);
    return digest;
}

}  // namespace tl
