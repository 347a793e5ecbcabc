// Which calls of the library may fail, and whether one does now.
#pragma once

#include "calls.h"

#include <cstdint>

#define CALLS_API extern "C" __attribute__((visibility("default")))

enum Number {
    kOpen,
    kFcntl,
    kFstat,
    kFstatfs,
    kStat,
    kFaccessat,
    kStatx,
    kCachestat,
    kRead,
    kLseek,
    kPread,
    kPreadv,
    kPwrite,
    kFtruncate,
    kFallocate,
    kFadvise,
    kMmap,
    kMadvise,
    kMincore,
    kAlignedAlloc,
    kNew,
    kProcessRead,
    kMemfd,
    kPoll,
    kSend,
    kRecv,
    kShutdown,
    kThread,
    kAffinity,
    kIoSetup,
    kIoSubmit,
    kIoGetevents,
    kIoDestroy,
    kAioResult,
    kUringSetup,
    kUringDontfork,
    kUringEnter,
    kUringWait,
    kUringResult,
    kNumbers
};

// Counts a call; what it is to fail with, else 0.
std::int32_t enter(Number number);
