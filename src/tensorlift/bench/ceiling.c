/* Bare loops that a load can be measured against, and the page cache's state. Threads and nothing else.
 *
 *   ceiling read prepared|fresh|ring buffered|direct THREADS CHUNK LIMIT FILE...
 *                                reads all files, no more than LIMIT bytes unless that is 0; prints {"seconds", "bytes"}
 *   ceiling copy THREADS BYTES   copies memory, five times; prints {"seconds", "bytes"} of the fastest
 *   ceiling cached FILE...       prints {"cached", "bytes"}, asked by mincore
 *
 * prepared: memory that has been written to before the clock starts. fresh: mapped inside the time, huge pages
 * advised. ring: 128 MiB of prepared memory for all bytes, over and over, as what passes through pinned slots. buffered: pread through the page cache. direct: pread with O_DIRECT, THREADS reads in flight.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HUGE ((size_t)2 << 20)
#define MAX_THREADS 256
#define RING ((size_t)128 << 20)

static void fail(const char *what, const char *where) {
    fprintf(stderr, "ceiling: %s: %s: %s\n", what, where, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct source {
    const char *path;
    int fd;
    size_t size;
    size_t at; /* its place in the memory: a multiple of 2 MiB */
} source;

typedef struct job {
    source *sources;
    int count;
    size_t chunk;
    char *memory;
    size_t slots;       /* chunks of a ring; 0: every byte has its own place */
    atomic_size_t next; /* the next chunk, counted over all files */
} job;

/* Which file and offset chunk number n is; 0 after the last. */
static int locate(const job *j, size_t n, int *file, size_t *offset) {
    for (int i = 0; i < j->count; i++) {
        size_t chunks = (j->sources[i].size + j->chunk - 1) / j->chunk;
        if (n < chunks) {
            *file = i;
            *offset = n * j->chunk;
            return 1;
        }
        n -= chunks;
    }
    return 0;
}

static void *work(void *argument) {
    job *j = argument;
    int file;
    size_t n, offset;
    while (locate(j, n = atomic_fetch_add(&j->next, 1), &file, &offset)) {
        source *s = &j->sources[file];
        char *to = j->slots ? j->memory + n % j->slots * j->chunk : j->memory + s->at + offset;
        size_t end = offset + j->chunk < s->size ? offset + j->chunk : s->size;
        while (offset < end) {
            /* Whole chunks are asked for, so that the last direct read is aligned too. */
            ssize_t got = pread(s->fd, to, j->chunk, (off_t)offset);
            if (got <= 0) fail("read", s->path);
            offset += (size_t)got, to += got;
        }
    }
    return NULL;
}

static size_t open_all(source *sources, char **paths, int count, int flags, size_t chunk, size_t limit) {
    size_t total = 0, left = limit ? limit : SIZE_MAX;
    for (int i = 0; i < count; i++) {
        struct stat st;
        int fd = open(paths[i], O_RDONLY | O_CLOEXEC | flags);
        if (fd < 0 || fstat(fd, &st)) fail("open", paths[i]);
        size_t size = (size_t)st.st_size;
        /* What is cut off leaves whole chunks, because whole chunks are read. */
        if (size > left) size = left / chunk * chunk;
        left -= size;
        sources[i] = (source){paths[i], fd, size, total};
        total += (size + chunk + HUGE - 1) / HUGE * HUGE;
    }
    return total;
}

static char *map(size_t nbytes) {
    char *raw = mmap(NULL, nbytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) fail("mmap", "memory");
    char *aligned = (char *)(((uintptr_t)raw + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    madvise(aligned, nbytes, MADV_HUGEPAGE);
    return aligned;
}

static int run_read(char **arguments, int count) {
    if (count < 6) return 2;
    int ring = !strcmp(arguments[0], "ring"), prepared = ring || !strcmp(arguments[0], "prepared");
    int flags = !strcmp(arguments[1], "direct") ? O_DIRECT : 0;
    int threads = atoi(arguments[2]);
    job j = {.chunk = strtoull(arguments[3], NULL, 10), .count = count - 5};
    size_t limit = strtoull(arguments[4], NULL, 10);
    if (threads < 1 || threads > MAX_THREADS || !j.chunk || j.chunk % 4096) return 2;
    j.sources = calloc((size_t)j.count, sizeof(source));
    if (!j.sources) fail("calloc", "sources");

    char *memory = NULL;
    if (prepared) {
        size_t total = open_all(j.sources, arguments + 5, j.count, flags, j.chunk, limit);
        for (int i = 0; i < j.count; i++) close(j.sources[i].fd);
        if (ring) {
            j.slots = RING / j.chunk ? RING / j.chunk : 1;
            /* A chunk more: what is read after a short read may pass the end of its slot. */
            total = (j.slots + 1) * j.chunk;
        }
        memory = map(total);
        memset(memory, 1, total);
    }
    double start = now();
    size_t total = open_all(j.sources, arguments + 5, j.count, flags, j.chunk, limit);
    j.memory = prepared ? memory : map(total);
    pthread_t ids[MAX_THREADS];
    for (int i = 0; i < threads; i++)
        if (pthread_create(&ids[i], NULL, work, &j)) fail("pthread_create", "thread");
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    double seconds = now() - start;

    size_t bytes = 0;
    for (int i = 0; i < j.count; i++) bytes += j.sources[i].size;
    printf("{\"seconds\": %.6f, \"bytes\": %zu}\n", seconds, bytes);
    return 0;
}

typedef struct part {
    char *to, *from;
    size_t nbytes;
} part;

static void *copy_part(void *argument) {
    part *p = argument;
    memcpy(p->to, p->from, p->nbytes);
    return NULL;
}

static int run_copy(char **arguments, int count) {
    int threads = count == 2 ? atoi(arguments[0]) : 0;
    size_t nbytes = count == 2 ? strtoull(arguments[1], NULL, 10) : 0;
    if (threads < 1 || threads > MAX_THREADS || !nbytes) return 2;
    char *from = map(nbytes), *to = map(nbytes);
    memset(from, 1, nbytes);
    memset(to, 2, nbytes);
    pthread_t ids[MAX_THREADS];
    part parts[MAX_THREADS];
    double best = 0;
    for (int round = 0; round < 5; round++) {
        double start = now();
        for (int i = 0; i < threads; i++) {
            size_t begin = nbytes / (size_t)threads * (size_t)i;
            size_t end = i + 1 < threads ? nbytes / (size_t)threads * (size_t)(i + 1) : nbytes;
            parts[i] = (part){to + begin, from + begin, end - begin};
            if (pthread_create(&ids[i], NULL, copy_part, &parts[i])) fail("pthread_create", "thread");
        }
        for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
        double seconds = now() - start;
        if (!round || seconds < best) best = seconds;
    }
    printf("{\"seconds\": %.6f, \"bytes\": %zu}\n", best, nbytes);
    return 0;
}

static size_t cached_bytes(const char *path, size_t *size) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) fail("open", path);
    *size = (size_t)st.st_size;
    if (!*size) return close(fd), 0;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (*size + page - 1) / page, cached = 0;
    unsigned char *state = malloc(pages);
    void *view = mmap(NULL, *size, PROT_READ, MAP_SHARED, fd, 0);
    if (!state || view == MAP_FAILED || mincore(view, *size, state)) fail("mincore", path);
    for (size_t i = 0; i < pages; i++)
        if (state[i] & 1) cached += i + 1 < pages ? page : *size - i * page;
    munmap(view, *size);
    free(state);
    close(fd);
    return cached;
}

int main(int argc, char **argv) {
    int status = 2;
    if (argc > 2 && !strcmp(argv[1], "read")) {
        status = run_read(argv + 2, argc - 2);
    } else if (argc > 2 && !strcmp(argv[1], "copy")) {
        status = run_copy(argv + 2, argc - 2);
    } else if (argc > 2 && !strcmp(argv[1], "cached")) {
        size_t cached = 0, bytes = 0, size;
        for (int i = 2; i < argc; i++) {
            cached += cached_bytes(argv[i], &size);
            bytes += size;
        }
        printf("{\"cached\": %zu, \"bytes\": %zu}\n", cached, bytes);
        status = 0;
    }
    if (status == 2) fprintf(stderr, "usage: see the top of ceiling.c\n");
    return status;
}
