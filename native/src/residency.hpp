// What of a file is in the page cache, asked of the kernel without touching it. Never by a trial read: a refused one
// (RWF_NOWAIT) starts readahead of what it asked for.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <vector>

#include "common.hpp"

namespace tl {

struct Segment {
    uint64_t begin;
    uint64_t end;
    bool resident;
};

class Residency {
public:
    enum class Method {
        kUnknown,    // nobody tells: read through the cache
        kMemory,     // the file system is memory (tmpfs, ramfs, hugetlbfs)
        kCachestat,  // cachestat(2), Linux 6.5 and newer
        kMincore,    // mincore(2) on a map; true for owners and writers only
    };

    // Decides how to ask for an open file. Its first page is read for a check: what was just read has to be found.
    static Method detect(int fd, const struct stat &status);
    static const char *name(Method method);

    // Cuts [begin, end) into parts that are cached and parts that are not, at page granularity. A kernel that stops
    // answering makes all of it "resident": a buffered read is always right.
    static std::vector<Segment> segments(Method method, int fd, uint64_t begin, uint64_t end);

    // Whether all of [begin, end) is cached or nothing of it is, where one call tells.
    static std::optional<bool> alike(Method method, int fd, uint64_t begin, uint64_t end);

    // What share of a file is cached, 0 to 1, by some stretches of it: asking for all of a large file costs as long as
    // reading a part of it. -1 where nobody tells, the file cannot be opened or has no bytes.
    static double share(const char *path);
};

}  // namespace tl
