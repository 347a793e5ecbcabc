// How often a thread gives Python's GIL away, counted exactly: to be preloaded into a Python. Whatever gives the GIL away
// wakes those who wait for it, also where nobody does, and Python does that with this one function of libc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int (*Signal)(pthread_cond_t *);

static pthread_cond_t *gil;
static _Thread_local pthread_cond_t *last;
static _Thread_local uint64_t count;

int pthread_cond_signal(pthread_cond_t *condition) {
    static Signal real;
    if (!real) {
        // dlsym() may find the first version of it instead, which takes another structure.
        void *found = dlvsym(RTLD_NEXT, "pthread_cond_signal", "GLIBC_2.3.2");
        real = (Signal)(found ? found : dlsym(RTLD_NEXT, "pthread_cond_signal"));
    }
    last = condition;
    count += condition == gil;
    return real(condition);
}

// To be called without the GIL: then what its thread signalled last is the GIL's.
void giveaways_learn(void) {
    gil = last;
}

// Of the calling thread, for as long as it lives.
uint64_t *giveaways_of_this_thread(void) {
    return &count;
}
