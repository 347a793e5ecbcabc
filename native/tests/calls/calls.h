/* The library's own system calls, failing on demand. libtensorlift_calls.so is the library linked once more, with each of
 * these calls led through wraps.cpp: whatever else runs in the process is not touched.
 *
 * What a call fails with is an errno, or for those that move bytes "short": half as many as there are, in whole pages
 * where there are several. What frees does so nevertheless.
 */
#ifndef TENSORLIFT_CALLS_H
#define TENSORLIFT_CALLS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALLS_SHORT (-1)

/* Nothing fails any more; forgets the counts. */
void calls_reset(void);
/* Name of call number index, NULL past the last one; what it may fail with, 0 past the last one. */
const char *calls_name(uint32_t index);
int32_t calls_code(uint32_t index, uint32_t which);
/* Calls since the reset; of number index, or all that failed by injection. */
uint64_t calls_count(uint32_t index);
uint64_t calls_failed(void);
/* The nth call of number index from now on (1 is the next) fails with the code. */
void calls_fail(uint32_t index, uint64_t nth, int32_t code);
/* Each call of any kind fails with the probability of so many in a million, with one of its codes; 0: none. */
void calls_fail_at_random(uint64_t seed, uint32_t in_a_million);
/* The last call that failed by injection, as text. */
const char *calls_last(void);
/* Bytes that the library has mapped and not unmapped. */
int64_t calls_mapped_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
