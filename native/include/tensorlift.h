/* tensorlift: the C interface of the native engine.
 *
 * A plan goes in (arrays of pieces), tickets come out. Threads and rings read each piece from its file; for a CPU
 * the bytes land at their destination, for a device they land in a pinned slot that one large copy moves, or, by
 * libcufile, at their destination as well.
 *
 * Rules that hold for every function
 *   - Units: sizes and offsets are bytes, timeouts milliseconds. Ranges are half open.
 *   - Ownership: what a function creates, the function named beside it frees. Nothing else is shared.
 *   - Threads: an engine may be used from any thread; functions marked "blocks" may sleep and must not be called with
 *     a lock that a Python thread needs (call them without the GIL). The others return at once.
 *   - Errors: a function that can fail returns a tl_status and fills *error if it is given. No C++ exception crosses.
 *   - Structures start with struct_size, which the caller sets; a size the library does not know is TL_ERR_ABI.
 *   - Processes: a child made by fork() must not use its parent's engine: every call answers TL_ERR_FORKED.
 */
#ifndef TENSORLIFT_H
#define TENSORLIFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TL_API __attribute__((visibility("default")))
#else
#define TL_API
#endif

/* Raised with every change of a structure or a meaning. */
#define TL_ABI_VERSION 8u

typedef enum tl_status {
    TL_OK = 0,
    TL_PENDING = 1,       /* not there yet: the timeout of a wait ran out */
    TL_ERR_ARGUMENT = 2,  /* the caller's mistake; message says which */
    TL_ERR_ABI = 3,       /* version or struct_size does not match this library */
    TL_ERR_OPEN = 4,      /* a file could not be opened or asked about: os_errno */
    TL_ERR_READ = 5,      /* a read failed: os_errno, offset, wanted, got */
    TL_ERR_TRUNCATED = 6, /* the file ended before offset + wanted; got bytes were there */
    TL_ERR_REPLACED = 7,  /* the path now leads to another file than the one whose header was read */
    TL_ERR_BACKEND = 8,   /* each back end of the list was refused; message has each reason */
    TL_ERR_DRIVER = 9,    /* a call of the device's driver failed: driver_code */
    TL_ERR_MEMORY = 10,   /* host memory could not be had */
    TL_ERR_CANCELLED = 11,
    TL_ERR_FORKED = 12,
    TL_ERR_INTERNAL = 13
} tl_status;

/* What went wrong, and where. file is an index of tl_engine_add_file, -1 where no file is meant. */
typedef struct tl_error {
    uint32_t struct_size;
    int32_t status;
    int32_t os_errno;
    int32_t driver_code;
    int32_t file;
    int32_t reserved;
    uint64_t offset;
    uint64_t wanted;
    uint64_t got;
    char message[1024]; /* UTF-8, NUL terminated */
} tl_error;

/* Ways of filling memory. AUTO and BUFFERED are policies, the others are readers. */
typedef enum tl_backend {
    TL_BACKEND_AUTO = 0,  /* what is cached: pread; what is not: direct, by io_uring or else by threads */
    TL_BACKEND_PREAD = 1, /* pread alone, direct or buffered by what is cached */
    TL_BACKEND_URING = 2, /* io_uring alone, direct */
    TL_BACKEND_MMAP = 3,  /* a shared map, copied with process_vm_readv: EFAULT, not SIGBUS */
    TL_BACKEND_URING_BUFFERED = 4, /* io_uring alone, through the page cache */
    TL_BACKEND_AIO = 5,            /* Linux AIO (io_submit) alone, direct */
    TL_BACKEND_AIO_BUFFERED = 6,   /* Linux AIO alone, through the page cache */
    TL_BACKEND_BUFFERED = 7, /* pread, always through the page cache; more threads where storage is slow */
    TL_BACKEND_CUFILE =
        8, /* GPUDirect Storage: from the file to a CUDA device's memory; never part of AUTO */
    TL_BACKEND_COUNT = 9
} tl_backend;

/* Paths by which bytes come, for statistics. */
typedef enum tl_path {
    TL_PATH_PREAD_BUFFERED = 0,
    TL_PATH_PREAD_DIRECT = 1,
    TL_PATH_URING_DIRECT = 2,
    TL_PATH_MMAP = 3,
    TL_PATH_URING_BUFFERED = 4,
    TL_PATH_AIO_DIRECT = 5,
    TL_PATH_AIO_BUFFERED = 6,
    TL_PATH_CUFILE = 7, /* past the pinned ring; without nvidia-fs through memory of libcufile's own */
    TL_PATH_COUNT = 8
} tl_path;

typedef enum tl_device_kind {
    TL_DEVICE_CPU = 0,  /* destinations are host addresses, no slots */
    TL_DEVICE_CUDA = 1, /* libcuda.so.1, opened at run time */
    TL_DEVICE_HIP = 2   /* libamdhip64.so, opened at run time */
} tl_device_kind;

typedef struct tl_options {
    uint32_t struct_size;
    uint32_t abi_version;  /* TL_ABI_VERSION */
    int32_t device_kind;   /* tl_device_kind */
    int32_t device_index;  /* the driver's ordinal; not used for a CPU */
    uint64_t chunk_bytes;  /* one read; a multiple of 4096 */
    uint64_t slot_bytes;   /* one copy to the device; a multiple of chunk_bytes */
    uint64_t pinned_bytes; /* the pinned ring: whole slots, at least two; 4096 bytes a slot come on top */
    uint32_t threads;      /* threads that copy out of the page cache; at least 1 */
    uint32_t io_depth;     /* direct reads in flight; at least 1 */
    uint32_t backend_count;
    uint32_t backends[16]; /* tl_backend, in the order of preference */
    uint32_t flags;        /* TL_OPTION_... */
    uint32_t reserved;
    uint64_t cpus[16]; /* where the threads may run: CPU n is bit n % 64 of cpus[n / 64]; all 0: anywhere */
} tl_options;

/* Keep what each thread did when, for tl_engine_trace. */
#define TL_OPTION_TRACE 1u
/* Start the threads and have the ring made at once, while the caller still reads headers. */
#define TL_OPTION_WARM 2u
/* Keep the pinned ring for later engines of the device, until tl_pinned_release; at most one a device, the larger. One
 * that is kept is used, and kept again, by every engine whose slots are no larger and no more; an engine that wants more
 * gives it back and makes its own. Not kept where a driver's call failed or memory could not be pinned. */
#define TL_OPTION_KEEP 4u

/* One copy from a file to contiguous memory: of a range, or of rows that lie in the file at equal distances. What lies
 * between two rows is read where it is less than a page, and never lands. */
typedef struct tl_piece {
    uint64_t file_offset; /* from the start of the file */
    uint64_t nbytes;      /* of all rows; 0 is allowed where there are none, and does nothing */
    uint64_t destination; /* host or device address */
    int32_t file;         /* index of tl_engine_add_file */
    uint32_t flags;       /* TL_PIECE_... */
    uint64_t rows;        /* 0: a range, and stride is 0 too; else nbytes is a multiple of it, and not 0 */
    uint64_t stride;      /* from the begin of a row to that of the next, at least the bytes of a row */
} tl_piece;

/* The bytes between the end of the piece before (of the same call) and this one's destination are padding of one
 * arena: a copy may overwrite them. Without it every byte outside a piece stays as it is. */
#define TL_PIECE_JOIN 1u

/* Compute the digest of this piece's bytes before it lands (tl_engine_digests). Such a piece is a range, and may not be
 * larger than a slot. */
#define TL_PIECE_DIGEST 2u

typedef struct tl_stats {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t bytes_by_path[TL_PATH_COUNT]; /* bytes delivered; block padding of direct reads is not counted */
    uint64_t reads_by_path[TL_PATH_COUNT]; /* system calls or ring entries */
    uint64_t direct_bytes_read; /* bytes asked of storage by direct reads, block padding included */
    uint64_t bounced_bytes;     /* bytes of direct reads that were moved once more by a CPU */
    uint64_t copies;            /* copies issued to the device */
    uint64_t pinned_bytes;      /* pinned host memory held now */
    uint64_t pinned_peak_bytes;
    uint64_t pinned_reused_bytes; /* of these, kept from an engine before */
    uint64_t slot_wait_ns; /* summed over threads: time in which no slot was free (the device is the limit) */
    uint32_t threads;      /* threads started, all kinds */
    uint32_t open_files;
    char notes[512]; /* what the machine refused to the engine as a whole (pinning, threads), one line each */
} tl_stats;

/* What was decided for a file; texts are empty where there is nothing to say. */
typedef struct tl_file_info {
    uint32_t struct_size;
    int32_t backend;      /* tl_backend in use, -1 before the first read */
    int32_t cached_path;  /* tl_path for what is cached, -1: none */
    int32_t waiting_path; /* tl_path for what is not, or for all, -1: none */
    char residency[32];   /* "cachestat", "mincore", "memory" (tmpfs and such), "unknown" */
    char fallback[512];   /* what was refused and why, one line each */
} tl_file_info;

typedef struct tl_engine tl_engine;
typedef struct tl_arena tl_arena;

TL_API uint32_t tl_abi_version(void);

/* NULL where the back end can be used, else why it was not built. Static text. */
TL_API const char *tl_backend_not_built(uint32_t backend);

/* Tries one back end on a file of this machine, with one small read to host memory; CUFILE by opening its driver and
 * registering the file, without a read. Blocks. The reason of a refusal is in *error. */
TL_API tl_status tl_backend_probe(uint32_t backend, const char *path, tl_error *error);

/* What share of a file is in the page cache, 0 to 1, by some stretches of it; -1 where that is not known. Blocks. */
TL_API double tl_cached_share(const char *path);

/* Tries to open the device's driver library and to count devices. Blocks. */
TL_API tl_status tl_driver_probe(int32_t device_kind, int32_t *device_count, tl_error *error);

/* Creates an engine; without TL_OPTION_WARM no thread starts and nothing is pinned before the first piece. For a device
 * the driver has to be initialised by the caller and its primary context to exist (torch does both). Freed by
 * tl_engine_destroy. Blocks. */
TL_API tl_status tl_engine_create(const tl_options *options, tl_engine **engine, tl_error *error);

/* Gives back the rings that TL_OPTION_KEEP has kept, of all devices, and the devices' contexts that they hold; their bytes
 * in *nbytes. Rings of engines at work are not kept when these end. What is not released goes with the process. A child
 * made by fork() has none of its parent's. Blocks. */
TL_API tl_status tl_pinned_release(uint64_t *nbytes, tl_error *error);

/* Names a file for pieces. It is opened at its first read and closed when no submitted piece is left of it. If inode is
 * not 0, the file opened then must be (device, inode); nbytes is its expected size. path is kept as a copy. */
TL_API tl_status tl_engine_add_file(tl_engine *engine, const char *path, uint64_t device, uint64_t inode,
                                    uint64_t nbytes, int32_t *file, tl_error *error);

/* Appends pieces to the plan. Destinations must stay valid until their ticket has landed and the copy stream has passed
 * it, or the engine is destroyed. On success *ticket is the number of pieces submitted so far: when tl_engine_wait
 * returns TL_OK for it, all of them have landed. With a device, copies wait for the work that consumer_stream holds
 * now; reads by libcufile do too, so that with CUFILE a ticket may not land before that work is done. */
TL_API tl_status tl_engine_submit(tl_engine *engine, const tl_piece *pieces, uint64_t count,
                                  uint64_t consumer_stream, uint64_t *ticket, tl_error *error);

/* Address of the number of leading pieces that have landed (CPU: the bytes are there; device: they are, or their
 * copies are in the copy stream). Valid until the engine is destroyed; read it without a call. */
TL_API const uint64_t *tl_engine_landed(tl_engine *engine);

/* Waits until the pieces below ticket have landed. TL_PENDING after timeout_ms. An engine that failed answers with its
 * first error for every ticket that had not landed. Blocks. */
TL_API tl_status tl_engine_wait(tl_engine *engine, uint64_t ticket, uint32_t timeout_ms, tl_error *error);

/* Makes consumer_stream wait for all copies that have been issued, in stream order, without waiting on the host. Call it
 * after the tickets of interest have landed. Does nothing for a CPU. */
TL_API tl_status tl_engine_stream_wait(tl_engine *engine, uint64_t consumer_stream, tl_error *error);

/* The digests of pieces [first, first + count) that were submitted with TL_PIECE_DIGEST and have landed: XXH3-128 of the
 * piece's bytes, 16 bytes each in canonical (big endian) order; zeros for pieces without that flag or without bytes. */
TL_API tl_status tl_engine_digests(tl_engine *engine, uint64_t first, uint64_t count, uint8_t *digests,
                                   tl_error *error);

/* What a thread did: one event. */
typedef struct tl_trace_event {
    uint64_t begin_ns; /* CLOCK_MONOTONIC */
    uint64_t end_ns;
    uint64_t offset; /* of the file */
    uint64_t nbytes;
    int32_t file;
    uint32_t thread; /* the kernel's id */
    uint32_t stage;  /* tl_stage */
    uint32_t path;   /* tl_path where the stage is TL_STAGE_READ */
} tl_trace_event;

typedef enum tl_stage {
    TL_STAGE_READ = 0,      /* a read, from its start to its last byte */
    TL_STAGE_WAIT_SLOT = 1, /* no slot was free: the device is the limit */
    TL_STAGE_COPY = 2,      /* a slot's copies, from their issue to the end of the last */
    TL_STAGE_DIGEST = 3,
    TL_STAGE_ASK_CACHE = 4 /* asking the kernel what is cached */
} tl_stage;

/* Copies up to capacity events of an engine with TL_OPTION_TRACE, from the event `first` on, in no order; *count is how
 * many there are in all. At most 1,048,576 are kept. Waits for copies under way, at most a second. Blocks. */
TL_API tl_status tl_engine_trace(tl_engine *engine, uint64_t first, tl_trace_event *events, uint64_t capacity,
                                 uint64_t *count, tl_error *error);

/* XXH3-128 of bytes, in canonical order. Blocks. */
TL_API void tl_digest(const void *bytes, uint64_t nbytes, uint8_t digest[16]);

TL_API tl_status tl_engine_stats(tl_engine *engine, tl_stats *stats, tl_error *error);
TL_API tl_status tl_engine_file_info(tl_engine *engine, int32_t file, tl_file_info *info, tl_error *error);

/* Starts no further read; waits answer TL_ERR_CANCELLED. */
TL_API tl_status tl_engine_cancel(tl_engine *engine, tl_error *error);

/* The device may never rest, as behind a collective whose other rank is gone, and the driver gives pinned memory back only
 * when it does: at its end the engine sets its ring aside, for tl_pinned_release. */
TL_API tl_status tl_engine_set_aside(tl_engine *engine, tl_error *error);

/* Cancels, waits for reads and copies that are under way, frees everything. After it no byte is written to any
 * destination. In a forked child it only forgets. Answers what the driver has said, also of copies that had landed, which
 * is when they are issued; the engine is gone all the same. Blocks. */
TL_API tl_status tl_engine_destroy(tl_engine *engine, tl_error *error);

/* Arenas: reference counted memory that tensors share. The last reference gone, the memory goes back, on whichever
 * thread that is, without the GIL. */

/* Host memory, zero filled. From 64 KiB on a map of its own: page aligned, from 2 MiB on 2 MiB aligned with huge pages
 * advised; less is 64 bytes aligned. One reference. */
TL_API tl_status tl_arena_host(uint64_t nbytes, tl_arena **arena, uint64_t *address, tl_error *error);

/* Takes over a DLManagedTensor (the pointer in an unversioned DLPack capsule): its deleter is called when the last
 * reference is gone. The memory is used again in the order of owner, a stream of the device. One reference. */
TL_API tl_status tl_arena_adopt(void *dl_managed_tensor, int32_t device_kind, int32_t device_index,
                                uint64_t owner, tl_arena **arena, uint64_t *address, tl_error *error);

/* Says that work of a stream uses the adopted arena that has this address, which the caller holds: when the last
 * reference is gone, the owner's stream waits for all that the stream holds then. TL_ERR_ARGUMENT: there is none. */
TL_API tl_status tl_arena_record_stream(uint64_t address, uint64_t stream, tl_error *error);

/* Drops the reference that tl_arena_host or tl_arena_adopt gave. */
TL_API void tl_arena_release(tl_arena *arena);

/* Number of arenas that are alive in this process. */
TL_API uint64_t tl_arena_live(void);

/* Tensors handed out: for count tensors of an arena, a Python list of DLPack capsules ("dltensor"), each holding one
 * reference of the arena until its tensor, or the capsule itself if nobody takes it, is gone. Tensor i lies at
 * address + offsets[i], is contiguous, has ndims[i] dimensions (taken in turn from shapes) and the DLPack data type
 * (codes[i], bits[i], lanes[i]). Needs the GIL (call it through PyDLL). Returns a new reference, or NULL with a Python
 * error set. */
TL_API void *tl_arena_capsules(tl_arena *arena, uint64_t address, uint64_t count, const uint64_t *offsets,
                               const uint8_t *codes, const uint8_t *bits, const uint16_t *lanes,
                               const int32_t *ndims, const int64_t *shapes, int32_t dl_device_type,
                               int32_t dl_device_id);

/* The JSON of a file's header, read where it has the plain form that writers produce: every key of a tensor once
 * (dtype, shape, data_offsets), no escapes in them or in names, plain integers below 2^63, names that differ, ranges as
 * long as shapes and dtypes say. What is otherwise somebody else has to read. codes: the dtypes that are known, each
 * followed by a space; the place of one is its number. bits: of one element of each. */
typedef struct tl_header tl_header;

/* What was read, as numbers: an array that whoever wants them gives. */
enum {
    TL_HEADER_HANDLE,         /* address of the tl_header; 0: nothing was read, and the others are not set */
    TL_HEADER_PLAIN,          /* 0: the text is not plain, and the facts about tensors mean nothing */
    TL_HEADER_NBYTES,         /* of the text */
    TL_HEADER_COUNT,          /* of tensors */
    TL_HEADER_TILED,          /* not 0: each range begins where the one before it ends, the first at 0 */
    TL_HEADER_METADATA_BEGIN, /* the object of "__metadata__" in the text, of which nothing is checked */
    TL_HEADER_METADATA_END,   /* 0: there is none */
    TL_HEADER_FILE_BYTES,     /* size and identity of the file, where one was read */
    TL_HEADER_DEVICE,
    TL_HEADER_INODE,
    TL_HEADER_FACTS
};

/* The text must be UTF-8, and stay as long as the result. Blocks. */
TL_API void tl_header_scan(const char *text, uint64_t nbytes, const char *codes, const uint8_t *bits,
                           uint64_t *facts);

/* Of a plain header. Fills arrays of count elements, in the order of the text: number of the dtype, first byte in the
 * file, bytes. Needs the GIL. Returns a list of two, of the names and of the shapes as tuples, or NULL with a Python error
 * set. */
TL_API void *tl_header_lists(const tl_header *header, uint8_t *dtypes, int64_t *starts, int64_t *sizes);

/* The text as Python's bytes. Needs the GIL. Returns a new reference, or NULL with a Python error set. */
TL_API void *tl_header_text(const tl_header *header);

TL_API void tl_header_free(tl_header *header);

/* Headers of files, each opened, read and closed once, in their order, by so many threads or as many as can be had. paths:
 * count texts, each with its 0 at the end. At most ahead headers wait to be taken; they have to be taken in order. headers:
 * set to NULL where there is no memory. */
typedef struct tl_headers tl_headers;
TL_API void tl_headers_begin(const char *paths, uint64_t count, const char *codes, const uint8_t *bits,
                             uint32_t threads, uint32_t ahead, tl_headers **headers);

/* Whether a file's header can be taken within so many milliseconds. ready: only waits for the threads, so that a caller may
 * keep a lock for a few. wait: without threads, it reads the file. Blocks. */
TL_API int32_t tl_headers_ready(tl_headers *headers, uint64_t file, uint32_t milliseconds);
TL_API int32_t tl_headers_wait(tl_headers *headers, uint64_t file, uint32_t milliseconds);

/* Once for each file, when it is ready. The header is the caller's to free; there is none where the file could not be read
 * or can be no safetensors file, and in a child of fork(). */
TL_API void tl_headers_take(tl_headers *headers, uint64_t file, uint64_t *facts);

/* Ends the threads, when they are through with the file that they are at, and frees what nobody took; sets the pointer to
 * NULL, where nothing is done if it is so already. Blocks. */
TL_API void tl_headers_end(tl_headers **headers);

#ifdef __cplusplus
}
#endif
#endif
