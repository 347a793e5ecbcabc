/* A stand-in for the driver of a device, for tests on machines without one.
 *
 * Built as libcuda.so.1, as libamdhip64.so, and with the entry points of GPUDirect Storage as libcufile.so.0. A process that has dlopen'ed one of them by path gets it again
 * when the engine asks for that name. Device memory is host memory. Each stream has a thread that runs its operations
 * in order, and copies come late, as they do on hardware: their source is read when the operation runs, not when it is
 * queued. An event captures what its stream holds when it is recorded; waiting for it captures the last record.
 *
 * The functions below are for tests: they never fail by injection, need no context, and are not counted as calls.
 * Streams are the handles that the entry points take; 0 is the default stream. Sizes are bytes.
 */
#ifndef TENSORLIFT_STANDIN_H
#define TENSORLIFT_STANDIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* As new: opens all gates, waits for all work, frees all streams and events, forgets registrations, rules and counts. */
void standin_reset(void);

/* What a framework has done before the engine comes: the driver is initialised. */
void standin_ready(void);

/* Number of devices; 2 after a reset, so that a wrong ordinal is seen. */
void standin_set_devices(int32_t count);

/* Each copy to the device starts us microseconds after its turn, plus a random part below jitter_us. */
void standin_set_copy_delay_us(uint64_t us);
/* The device's memory is made of allocations of so many bytes, at multiples of it (0: of one); a copy must not cross. */
void standin_set_allocation_bytes(uint64_t nbytes);
void standin_set_copy_jitter_us(uint64_t jitter_us, uint64_t seed);
/* The device has work that does not end until it is set to 0: unregistering waits, as the driver's does. */
void standin_set_busy(int32_t busy);

/* The nth call from now on (1 is the next) of an entry point answers code; -n means the nth and all after it. What frees
 * or waits does so nevertheless and then answers code, as a driver does that reports an earlier failure. */
void standin_fail(const char *entry, int64_t nth, int32_t code);
/* Each call of any entry point answers code with the probability of so many in a million, but not the call of it
 * on the same thread after one that failed so; until a reset, or 0. */
void standin_fail_at_random(uint64_t seed, uint32_t in_a_million, int32_t code);
uint64_t standin_calls(const char *entry);
/* Name of entry point number index of this library, NULL past the last one. */
const char *standin_entry(uint32_t index);

uint64_t standin_registered_bytes(void);
uint64_t standin_registered_peak_bytes(void);
uint64_t standin_live_streams(void);
uint64_t standin_live_events(void);
int64_t standin_retained_contexts(void);
/* Allocations of another process that are mapped. */
uint64_t standin_mapped_allocations(void);

/* Things a right engine does not do. Copies from memory that was not registered; copies whose memory was unregistered
 * before their turn came (they move nothing); streams that serialise with the default stream. */
uint64_t standin_unpinned_copies(void);
uint64_t standin_lost_copies(void);
uint64_t standin_blocking_streams(void);

/* A consumer's stream, not counted as live, and work on it, which is not delayed. */
uint64_t standin_stream(void);
void standin_stream_free(uint64_t stream);
void standin_stream_sync(uint64_t stream);
void standin_memset(uint64_t stream, void *destination, int32_t value, uint64_t nbytes);
void standin_copy(uint64_t stream, void *destination, const void *source, uint64_t nbytes);
/* The stream stops there until the gate is opened. */
uint64_t standin_hold(uint64_t stream);
void standin_release(uint64_t gate);

/* Returns when each stream has run all it can without a gate or another stream. */
void standin_settle(void);

/* Waits for all work of all streams, those that were destroyed too, whose threads are gone then. */
void standin_drain(void);

/* Of libcufile.so.0 alone. A reset is that of its copy of the functions above, but its driver stays open: the engine opens
 * it once a process. A delay of copies is one of its reads. */
void standin_cufile_reset(void);
/* No read brings more; 0: all that is asked for. */
void standin_cufile_set_most(uint64_t nbytes);
uint64_t standin_cufile_handles(void);
/* Things a right engine does not do: descriptors 0 to 2, a descriptor closed before its handle is given back, reading
 * without a handle or a context, opening the driver twice. */
uint64_t standin_cufile_misuses(void);

#ifdef __cplusplus
}
#endif
#endif
