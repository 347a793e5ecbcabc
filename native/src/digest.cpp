#include "digest.hpp"

#include <cstring>
#include <new>

#ifdef TL_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tl {

namespace {

Digest canonical_of(XXH128_hash_t hash) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    Digest digest;
    std::memcpy(digest.bytes, canonical.digest, sizeof digest.bytes);
    return digest;
}

}  // namespace

bool digests_built() {
    return true;
}

Digest digest_plain(const void *bytes, uint64_t nbytes) {
    return canonical_of(XXH3_128bits(bytes, nbytes));
}

Digest digest_of(const void *bytes, uint64_t nbytes) {
#ifdef TL_HAVE_AVX2
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) return digest_avx2(bytes, nbytes);
#endif
    return digest_plain(bytes, nbytes);
}

DigestStream::DigestStream() {
    static_assert(sizeof(XXH3_state_t) <= sizeof state_ && alignof(XXH3_state_t) <= 64);
    XXH3_128bits_reset(new (state_) XXH3_state_t{});
}

void DigestStream::add(const void *bytes, uint64_t nbytes) {
    XXH3_128bits_update(reinterpret_cast<XXH3_state_t *>(state_), bytes, nbytes);
}

Digest DigestStream::digest() const {
    return canonical_of(XXH3_128bits_digest(reinterpret_cast<const XXH3_state_t *>(state_)));
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

DigestStream::DigestStream() : state_{} {}

void DigestStream::add(const void *, uint64_t) {}

Digest DigestStream::digest() const {
    return {};
}

}  // namespace tl
#endif
