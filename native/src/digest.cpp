#include "digest.hpp"

#include <cstring>

#ifdef TL_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tl {

bool digests_built() {
    return true;
}

Digest digest_plain(const void *bytes, uint64_t nbytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, nbytes));
    Digest digest;
    std::memcpy(digest.bytes, canonical.digest, sizeof digest.bytes);
    return digest;
}

Digest digest_of(const void *bytes, uint64_t nbytes) {
#ifdef TL_HAVE_AVX2
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) return digest_avx2(bytes, nbytes);
#endif
    return digest_plain(bytes, nbytes);
}

}  // namespace tl

#else

namespace tl {

bool digests_built() {
    return false;
}

Digest digest_of(const void *, uint64_t) {
    return {};
}

}  // namespace tl
#endif
