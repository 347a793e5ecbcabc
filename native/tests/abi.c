/* The C interface as a C program sees it: the header is C, structures lie where bindings expect them, and the calls
 * answer. A tuple of the same numbers is in the Python binding's test. */
#define _POSIX_C_SOURCE 200809L /* mkstemp */

#include "tensorlift.h"
#include "tensorlift_fork.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failures = 0;

#define CHECK(condition)                                                  \
    do {                                                                  \
        if (!(condition)) {                                               \
            printf("FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                   \
        }                                                                 \
    } while (0)

static tl_error new_error(void) {
    tl_error error;
    memset(&error, 0, sizeof error);
    error.struct_size = sizeof error;
    return error;
}

static tl_options new_options(void) {
    tl_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.abi_version = TL_ABI_VERSION;
    options.device_kind = TL_DEVICE_CPU;
    options.chunk_bytes = 65536;
    options.slot_bytes = 262144;
    options.pinned_bytes = 1048576;
    options.threads = 2;
    options.io_depth = 4;
    options.backend_count = 1;
    options.backends[0] = TL_BACKEND_AUTO;
    return options;
}

/* "--layout" prints this for comparison with another binding. */
static void print_layout(void) {
#define FIELD(type, name) \
    printf(#type "." #name " %zu %zu\n", offsetof(type, name), sizeof(((type *)0)->name))
    printf("tl_error %zu\n", sizeof(tl_error));
    FIELD(tl_error, struct_size);
    FIELD(tl_error, status);
    FIELD(tl_error, os_errno);
    FIELD(tl_error, driver_code);
    FIELD(tl_error, file);
    FIELD(tl_error, reserved);
    FIELD(tl_error, offset);
    FIELD(tl_error, wanted);
    FIELD(tl_error, got);
    FIELD(tl_error, message);
    printf("tl_options %zu\n", sizeof(tl_options));
    FIELD(tl_options, struct_size);
    FIELD(tl_options, abi_version);
    FIELD(tl_options, device_kind);
    FIELD(tl_options, device_index);
    FIELD(tl_options, chunk_bytes);
    FIELD(tl_options, slot_bytes);
    FIELD(tl_options, pinned_bytes);
    FIELD(tl_options, threads);
    FIELD(tl_options, io_depth);
    FIELD(tl_options, backend_count);
    FIELD(tl_options, backends);
    FIELD(tl_options, flags);
    FIELD(tl_options, reserved);
    FIELD(tl_options, cpus);
    printf("tl_piece %zu\n", sizeof(tl_piece));
    FIELD(tl_piece, file_offset);
    FIELD(tl_piece, nbytes);
    FIELD(tl_piece, destination);
    FIELD(tl_piece, file);
    FIELD(tl_piece, flags);
    FIELD(tl_piece, rows);
    FIELD(tl_piece, stride);
}

static void print_layout_of_answers(void) {
    printf("tl_stats %zu\n", sizeof(tl_stats));
    FIELD(tl_stats, struct_size);
    FIELD(tl_stats, reserved);
    FIELD(tl_stats, bytes_by_path);
    FIELD(tl_stats, reads_by_path);
    FIELD(tl_stats, direct_bytes_read);
    FIELD(tl_stats, bounced_bytes);
    FIELD(tl_stats, copies);
    FIELD(tl_stats, pinned_bytes);
    FIELD(tl_stats, pinned_peak_bytes);
    FIELD(tl_stats, pinned_reused_bytes);
    FIELD(tl_stats, slot_wait_ns);
    FIELD(tl_stats, threads);
    FIELD(tl_stats, open_files);
    FIELD(tl_stats, notes);
    printf("tl_file_info %zu\n", sizeof(tl_file_info));
    FIELD(tl_file_info, struct_size);
    FIELD(tl_file_info, backend);
    FIELD(tl_file_info, cached_path);
    FIELD(tl_file_info, waiting_path);
    FIELD(tl_file_info, residency);
    FIELD(tl_file_info, fallback);
    printf("tl_trace_event %zu\n", sizeof(tl_trace_event));
    FIELD(tl_trace_event, begin_ns);
    FIELD(tl_trace_event, end_ns);
    FIELD(tl_trace_event, offset);
    FIELD(tl_trace_event, nbytes);
    FIELD(tl_trace_event, file);
    FIELD(tl_trace_event, thread);
    FIELD(tl_trace_event, stage);
    FIELD(tl_trace_event, path);
}

static void print_layout_of_forks(void) {
    printf("tl_sender_stats %zu\n", sizeof(tl_sender_stats));
    FIELD(tl_sender_stats, struct_size);
    FIELD(tl_sender_stats, connections);
    FIELD(tl_sender_stats, sent_bytes);
    FIELD(tl_sender_stats, sent_chunks);
    FIELD(tl_sender_stats, refused_chunks);
    FIELD(tl_sender_stats, stale_chunks);
    FIELD(tl_sender_stats, bad_requests);
    printf("tl_chunk %zu\n", sizeof(tl_chunk));
    FIELD(tl_chunk, struct_size);
    FIELD(tl_chunk, region);
    FIELD(tl_chunk, offset);
    FIELD(tl_chunk, nbytes);
    FIELD(tl_chunk, epoch);
    FIELD(tl_chunk, digest);
    FIELD(tl_chunk, milliseconds);
    FIELD(tl_chunk, outcome);
    FIELD(tl_chunk, verified);
    FIELD(tl_chunk, seed_epoch);
    FIELD(tl_chunk, done);
    printf("tl_origin %zu\n", sizeof(tl_origin));
    FIELD(tl_origin, kind);
    FIELD(tl_origin, handle);
    FIELD(tl_origin, address);
    FIELD(tl_origin, nbytes);
    printf("tl_region %zu\n", sizeof(tl_region));
    FIELD(tl_region, address);
    FIELD(tl_region, nbytes);
    FIELD(tl_region, device_kind);
    FIELD(tl_region, device_index);
}

static void layout_is_packed_as_documented(void) {
    CHECK(sizeof(tl_error) == 1072);
    CHECK(offsetof(tl_error, message) == 48);
    CHECK(sizeof(tl_options) == 256);
    CHECK(offsetof(tl_options, backends) == 52);
    CHECK(sizeof(tl_piece) == 48);
    CHECK(sizeof(tl_stats) == 712);
    CHECK(sizeof(tl_trace_event) == 48);
    CHECK(sizeof(tl_file_info) == 560);
}

static void refuse_options(const char *what, tl_options options, tl_status wanted) {
    tl_error error = new_error();
    tl_engine *engine = NULL;
    const tl_status status = tl_engine_create(&options, &engine, &error);
    if (status != wanted || engine != NULL || error.status != (int32_t)wanted || error.message[0] == 0) {
        printf("FAILED %s: status %d, message \"%s\"\n", what, status, error.message);
        ++failures;
    }
}

static void wrong_options_are_refused(void) {
    tl_options o = new_options();
    tl_error error = new_error();
    tl_engine *engine = NULL;
    CHECK(tl_engine_create(NULL, &engine, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_engine_create(&o, NULL, &error) == TL_ERR_ARGUMENT);
    o.struct_size -= 4, refuse_options("a smaller structure", o, TL_ERR_ABI);
    o = new_options(), o.struct_size = 0, refuse_options("no size", o, TL_ERR_ABI);
    o = new_options(), o.abi_version += 1, refuse_options("another version", o, TL_ERR_ABI);
    o = new_options(), o.device_kind = 7, refuse_options("an unknown device", o, TL_ERR_ARGUMENT);
    o = new_options(), o.chunk_bytes = 0, refuse_options("no chunk", o, TL_ERR_ARGUMENT);
    o = new_options(), o.chunk_bytes = 65537, refuse_options("a crooked chunk", o, TL_ERR_ARGUMENT);
    o = new_options(), o.threads = 0, refuse_options("no threads", o, TL_ERR_ARGUMENT);
    o = new_options(), o.io_depth = 0, refuse_options("no depth", o, TL_ERR_ARGUMENT);
    o = new_options(), o.backend_count = 0, refuse_options("no back end", o, TL_ERR_ARGUMENT);
    o = new_options(), o.backend_count = 17, refuse_options("17 back ends", o, TL_ERR_ARGUMENT);
    o = new_options(), o.backends[0] = TL_BACKEND_COUNT,
    refuse_options("an unknown back end", o, TL_ERR_ARGUMENT);
    /* An error record of another size is not written to. */
    error.struct_size = 8;
    error.message[0] = 'x';
    o = new_options(), o.threads = 0;
    CHECK(tl_engine_create(&o, &engine, &error) != TL_OK);
    CHECK(error.message[0] == 'x');
    /* And none is needed. */
    CHECK(tl_engine_create(&o, &engine, NULL) == TL_ERR_ARGUMENT);
}

static void wrong_arguments_are_refused(const char *path) {
    tl_error error = new_error();
    tl_engine *engine = NULL;
    tl_options options = new_options();
    CHECK(tl_engine_create(&options, &engine, &error) == TL_OK);
    int32_t file = -1;
    CHECK(tl_engine_add_file(engine, NULL, 0, 0, 10, &file, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_engine_add_file(engine, path, 0, 0, 10, NULL, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_engine_add_file(NULL, path, 0, 0, 10, &file, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_engine_add_file(engine, path, 0, 0, 5000, &file, &error) == TL_OK);
    char memory[16];
    tl_piece piece = {0, sizeof memory, (uint64_t)(uintptr_t)memory, file + 1, 0, 0, 0};
    uint64_t ticket = 0;
    CHECK(tl_engine_submit(engine, &piece, 1, 0, &ticket, &error) == TL_ERR_ARGUMENT);
    piece.file = -1;
    CHECK(tl_engine_submit(engine, &piece, 1, 0, &ticket, &error) == TL_ERR_ARGUMENT);
    piece.file = file;
    piece.destination = 0;
    CHECK(tl_engine_submit(engine, &piece, 1, 0, &ticket, &error) == TL_ERR_ARGUMENT);
    piece.destination = (uint64_t)(uintptr_t)memory;
    piece.flags = 1u << 31;
    CHECK(tl_engine_submit(engine, &piece, 1, 0, &ticket, &error) == TL_ERR_ARGUMENT);
    piece.flags = 0;
    piece.file_offset = UINT64_MAX - 4;
    CHECK(tl_engine_submit(engine, &piece, 1, 0, &ticket, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_engine_submit(engine, NULL, 1, 0, &ticket, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_engine_wait(engine, 1, 0, &error) == TL_ERR_ARGUMENT);
    tl_stats stats;
    memset(&stats, 0, sizeof stats);
    CHECK(tl_engine_stats(engine, &stats, &error) == TL_ERR_ABI);
    tl_file_info info;
    memset(&info, 0, sizeof info);
    CHECK(tl_engine_file_info(engine, file, &info, &error) == TL_ERR_ABI);
    info.struct_size = sizeof info;
    CHECK(tl_engine_file_info(engine, file + 1, &info, &error) == TL_ERR_ARGUMENT);
    /* Nothing of that broke it, and nothing was started for it. */
    stats.struct_size = sizeof stats;
    CHECK(tl_engine_stats(engine, &stats, &error) == TL_OK);
    CHECK(stats.threads == 0 && stats.pinned_bytes == 0 && stats.open_files == 0);
    CHECK(tl_engine_submit(engine, NULL, 0, 0, &ticket, &error) == TL_OK && ticket == 0);
    CHECK(tl_engine_destroy(engine, &error) == TL_OK);
    CHECK(tl_engine_destroy(NULL, &error) == TL_ERR_ARGUMENT || tl_engine_destroy(NULL, &error) == TL_OK);
}

static void bytes_arrive(const char *path, const unsigned char *content, size_t nbytes) {
    tl_error error = new_error();
    tl_engine *engine = NULL;
    tl_options options = new_options();
    CHECK(tl_engine_create(&options, &engine, &error) == TL_OK);
    const uint64_t *landed = tl_engine_landed(engine);
    CHECK(landed != NULL && *landed == 0);
    int32_t file = -1;
    CHECK(tl_engine_add_file(engine, path, 0, 0, nbytes, &file, &error) == TL_OK && file == 0);
    unsigned char *memory = calloc(1, nbytes);
    const uint64_t to = (uint64_t)(uintptr_t)memory;
    tl_piece pieces[3] = {
        {0, 100, to, 0, 0, 0, 0}, {100, 0, to + 100, 0, 0, 0, 0}, {100, nbytes - 100, to + 100, 0, 0, 0, 0}};
    uint64_t ticket = 0;
    CHECK(tl_engine_submit(engine, pieces, 3, 0, &ticket, &error) == TL_OK && ticket == 3);
    CHECK(tl_engine_wait(engine, ticket, 60000, &error) == TL_OK);
    CHECK(__atomic_load_n(landed, __ATOMIC_ACQUIRE) == 3);
    CHECK(memcmp(memory, content, nbytes) == 0);
    CHECK(tl_engine_stream_wait(engine, 0, &error) == TL_OK);
    CHECK(tl_engine_cancel(engine, &error) == TL_OK);
    CHECK(tl_engine_submit(engine, pieces, 3, 0, &ticket, &error) == TL_ERR_CANCELLED);
    CHECK(tl_engine_destroy(engine, &error) == TL_OK);
    free(memory);
}

static void nothing_is_kept_without_a_device(void) {
    tl_error error = new_error();
    uint64_t nbytes = 1;
    CHECK(tl_pinned_release(NULL, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_pinned_release(&nbytes, &error) == TL_OK && nbytes == 0);
}

static void arenas_are_counted(void) {
    tl_error error = new_error();
    tl_arena *arena = NULL;
    uint64_t address = 0;
    const uint64_t before = tl_arena_live();
    CHECK(tl_arena_host(5000, &arena, &address, &error) == TL_OK);
    CHECK(address != 0 && address % 64 == 0 && tl_arena_live() == before + 1);
    for (int i = 0; i < 5000; ++i) {
        CHECK(((unsigned char *)(uintptr_t)address)[i] == 0);
    }
    tl_arena_release(arena);
    CHECK(tl_arena_live() == before);
    CHECK(tl_arena_host(5000, NULL, &address, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_arena_adopt(NULL, TL_DEVICE_CPU, 0, 0, &arena, &address, &error) == TL_ERR_ARGUMENT);
    CHECK(tl_arena_host(1ull << 62, &arena, &address, &error) == TL_ERR_MEMORY);
    CHECK(tl_arena_live() == before);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--layout") == 0) {
        print_layout();
        print_layout_of_answers();
        print_layout_of_forks();
        return 0;
    }
    enum { SIZE = 5000 };
    unsigned char content[SIZE];
    for (int i = 0; i < SIZE; ++i) {
        content[i] = (unsigned char)(i * 31 + i / 251);
    }
    char path[] = "tl-abi-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, content, SIZE) == SIZE && close(fd) == 0);
    CHECK(tl_abi_version() == TL_ABI_VERSION);
    CHECK(tl_backend_not_built(TL_BACKEND_AUTO) == NULL && tl_backend_not_built(TL_BACKEND_PREAD) == NULL);
    CHECK(tl_backend_not_built(TL_BACKEND_COUNT) != NULL);
    tl_error error = new_error();
    CHECK(tl_backend_probe(TL_BACKEND_PREAD, path, &error) == TL_OK);
    CHECK(tl_backend_probe(TL_BACKEND_PREAD, "/nonexistent/file", &error) != TL_OK && error.message[0] != 0);
    CHECK(tl_backend_probe(TL_BACKEND_COUNT, path, &error) != TL_OK);
    layout_is_packed_as_documented();
    wrong_options_are_refused();
    wrong_arguments_are_refused(path);
    bytes_arrive(path, content, SIZE);
    arenas_are_counted();
    nothing_is_kept_without_a_device();
    unlink(path);
    printf("%s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
