// How an entry point begins.
#pragma once

#include "core.hpp"

#define STANDIN_ENTRY extern "C" __attribute__((visibility("default")))

// An injected failure comes before the call has done anything.
#define STANDIN_ENTER(name)                               \
    do {                                                  \
        if (const int injected = standin::enter(#name)) { \
            return injected;                              \
        }                                                 \
        if (!standin::initialised()) {                    \
            return standin::kNotInitialized;              \
        }                                                 \
    } while (false)

// For what frees or waits: the work is done, and an injected failure tells of something earlier.
#define STANDIN_NEVERTHELESS(name, work)            \
    do {                                            \
        const int injected = standin::enter(#name); \
        const int result = (work);                  \
        return injected ? injected : result;        \
    } while (false)
