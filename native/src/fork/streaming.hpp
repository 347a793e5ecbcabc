// Copies whose destination nobody reads soon: weights are larger than any cache.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tl {

// As memcpy, with stores that pass the caches by: a destination that is stored to as usual is first read from memory, which
// with blocks of this size costs a third of the rate. It has only to be aligned by what each store has, which libraries'
// "rep movsb" has not: that falls to a third where source and destination lie a few bytes apart within their pages.
inline void copy_streaming(char *to, const char *from, uint64_t nbytes) {
#ifdef __SSE2__
    constexpr uint64_t kStore = sizeof(__m128i), kLine = 4 * kStore;
    const uint64_t head = (kStore - reinterpret_cast<uint64_t>(to) % kStore) % kStore;
    if (nbytes >= head + kLine) {
        std::memcpy(to, from, head);
        to += head, from += head, nbytes -= head;
        for (; nbytes >= kLine; to += kLine, from += kLine, nbytes -= kLine) {
            __m128i line[4];
            for (int k = 0; k < 4; k++)
                line[k] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from) + k);
            for (int k = 0; k < 4; k++) _mm_stream_si128(reinterpret_cast<__m128i *>(to) + k, line[k]);
        }
        // Such stores are ordered by nothing else, not by the locks of whoever is told that they are done.
        _mm_sfence();
    }
#endif
    std::memcpy(to, from, nbytes);
}

}  // namespace tl
