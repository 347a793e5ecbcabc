/* tensorlift: the C interface to weights that pass between processes over sockets.
 *
 * The seed serves chunks of its regions of memory, the fork asks for them; see wire.hpp for what goes over the wire.
 * Both work on connected stream sockets whose peer is known already: shaking hands is the caller's. The rules of
 * tensorlift.h hold.
 */
#ifndef TENSORLIFT_FORK_H
#define TENSORLIFT_FORK_H

#include "tensorlift.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tl_region {
    uint64_t address; /* which stays until the sender is destroyed */
    uint64_t nbytes;
    int32_t
        device_kind; /* tl_device_kind: whose memory it is; a device's goes through pinned blocks of the host */
    int32_t device_index;
} tl_region;

/* Serves regions to any number of connections, each by a thread that sleeps while nothing is asked for. */
typedef struct tl_sender tl_sender;

/* bytes_per_second: of all connections together, 0 for no limit; burst_bytes: of them at once after a rest.
 * idle_milliseconds: a connection whose peer takes no byte for so long is closed. Begins with epoch 0, open. */
TL_API tl_status tl_sender_create(const tl_region *regions, uint64_t count, uint64_t bytes_per_second,
                                  uint64_t burst_bytes, uint32_t idle_milliseconds, tl_sender **sender,
                                  tl_error *error);

/* Serves a socket, which is the sender's to close from now on, also when it fails. */
TL_API tl_status tl_sender_serve(tl_sender *sender, int32_t fd, tl_error *error);

/* What is asked for with another epoch is refused from now on; closed (open is 0), all is. A chunk that is being sent is
 * sent on: its end says that the epoch is over, and whoever reads it throws it away. */
TL_API tl_status tl_sender_set_epoch(tl_sender *sender, uint64_t epoch, int32_t open, tl_error *error);

typedef struct tl_sender_stats {
    uint32_t struct_size;
    uint32_t connections; /* now */
    uint64_t sent_bytes;
    uint64_t sent_chunks;
    uint64_t refused_chunks; /* another epoch, or closed */
    uint64_t stale_chunks;   /* the epoch went on while they were sent */
    uint64_t bad_requests;   /* no request, or out of a region: the connection is closed */
} tl_sender_stats;

TL_API tl_status tl_sender_stats_of(tl_sender *sender, tl_sender_stats *stats, tl_error *error);

/* Closes every connection and waits for its thread: after it no byte of a region is read. Blocks. */
TL_API tl_status tl_sender_destroy(tl_sender *sender, tl_error *error);

typedef enum tl_chunk_outcome {
    TL_CHUNK_OK = 0,
    TL_CHUNK_STALE = 1,  /* the seed is at another epoch, or went on to one while it sent; see seed_epoch */
    TL_CHUNK_CLOSED = 2, /* the seed updates its weights, or ends */
    TL_CHUNK_RANGE = 3,  /* the seed has no such bytes */
    TL_CHUNK_WRONG = 4   /* the bytes do not have the digest that was sent with them */
} tl_chunk_outcome;

typedef struct tl_chunk {
    uint32_t struct_size;
    uint32_t region;
    uint64_t offset;
    uint64_t nbytes;
    uint64_t epoch;
    uint32_t digest;       /* not 0: the bytes come with their digest, and are compared with it */
    uint32_t milliseconds; /* TL_ERR_READ if no byte comes for so long */
    int32_t outcome;       /* tl_chunk_outcome, set where the call returns TL_OK */
    int32_t
        verified; /* set with it: not 0 where bytes were compared with a digest, which both sides have to know */
    uint64_t seed_epoch; /* set with it */
    uint64_t done;       /* counted up by the bytes that come, while other threads read it */
} tl_chunk;

/* Where some bytes of a chunk go: offset is counted from the chunk's first byte. */
typedef struct tl_place {
    uint64_t offset;
    uint64_t nbytes;
    uint64_t address; /* of host memory, or of the staging device */
} tl_place;

/* Pinned blocks through which what is fetched goes to a device, by its copy engine; of one thread at a time. */
typedef struct tl_staging tl_staging;

TL_API tl_status tl_staging_create(int32_t device_kind, int32_t device_index, tl_staging **staging,
                                   tl_error *error);
TL_API tl_status tl_staging_destroy(tl_staging *staging, tl_error *error);

/* CUDA IPC: the handle of the allocation that holds a region, and how many bytes into it the region begins. TL_ERR_DRIVER
 * where the driver gives none, as for memory that is mapped in parts (expandable segments). */
typedef struct tl_ipc_handle {
    uint8_t bytes[64];
} tl_ipc_handle;
TL_API tl_status tl_ipc_export(const tl_region *region, tl_ipc_handle *handle, uint64_t *offset,
                               tl_error *error);

/* Maps an allocation of another process for the staging's device, until the staging is destroyed: its address here, and how
 * many bytes of it follow. */
TL_API tl_status tl_staging_map(tl_staging *staging, const tl_ipc_handle *handle, uint64_t *address,
                                uint64_t *nbytes, tl_error *error);

typedef enum tl_origin_kind {
    TL_ORIGIN_HERE = 0,    /* memory of this process, at address */
    TL_ORIGIN_PROCESS = 1, /* memory of another process: handle is its id, address is one of its own */
    TL_ORIGIN_DEVICE = 2   /* memory of another process on a device: in what tl_staging_map has mapped */
} tl_origin_kind;

/* Where a fork on the seed's own host reads a region itself. */
typedef struct tl_origin {
    int32_t kind; /* tl_origin_kind */
    int32_t handle;
    uint64_t address; /* of the region's first byte */
    uint64_t nbytes;  /* of the region */
} tl_origin;

/* Asks for a chunk and writes it to its places, which ascend and do not overlap; what no place wants is dropped. TL_OK: see
 * outcome; the connection can be used on. TL_ERR_READ: it cannot, got says how many bytes came. Only with TL_CHUNK_OK is
 * what was written right. staging: null where places are of host memory; else all bytes are on the device when this returns,
 * for work on any stream that is begun from then on, and none is on its way whatever comes of it. origin: of the chunk's
 * region, from where the bytes are copied; null where they come over the socket; one on a device wants a staging, through whose
 * blocks bytes go that are digested, while others go from device to device. Blocks. */
TL_API tl_status tl_chunk_fetch(int32_t fd, tl_chunk *chunk, const tl_place *places, uint64_t count,
                                tl_staging *staging, const tl_origin *origin, tl_error *error);

/* Copies bytes of an origin, with nobody asked: to see whether it can be read at all. TL_ERR_READ says why not. Blocks. */
TL_API tl_status tl_origin_copy(const tl_origin *origin, uint64_t offset, void *to, uint64_t nbytes,
                                tl_error *error);

/* Memory in a file that other processes may be given: mapped, zeroed, all of it there, of huge pages where that can be had.
 * No process can make it shorter, none but this one can write to it. Blocks. */
TL_API tl_status tl_shared_create(uint64_t nbytes, int32_t *fd, uint64_t *address, tl_error *error);
/* fd: below 0 where there is none any more. */
TL_API void tl_shared_release(int32_t fd, uint64_t address, uint64_t nbytes);

/* Maps such a file of another process, to be read, and says how large it is. TL_ERR_ARGUMENT where fd is no file of memory, or
 * one that can be made shorter, so that reading it might be a signal. fd can be closed behind this. */
TL_API tl_status tl_shared_map(int32_t fd, uint64_t *address, uint64_t *nbytes, tl_error *error);

/* The digest of a whole tensor, as tensorlift digest writes it: XXH3-128 of the digests of each MiB. Blocks. */
TL_API void tl_tensor_digest(const void *bytes, uint64_t nbytes, uint8_t digest[16]);

#ifdef __cplusplus
}
#endif
#endif
