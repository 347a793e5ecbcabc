#include "residency.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "descriptor.hpp"

namespace tl {
namespace {

// From linux/magic.h; spelled out because not every build machine has all of them.
constexpr long kTmpfs = 0x01021994;
constexpr long kRamfs = 0x858458f6;
constexpr long kHugetlbfs = 0x958458f6;

constexpr long kCachestatNumber = 451;  // on every architecture, as all calls since 5.x
struct CachestatRange {
    uint64_t offset;
    uint64_t nbytes;
};
struct CachestatAnswer {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;  // pages
};

// Pages of the running kernel: what cachestat and mincore count in.
uint64_t system_page() {
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return page;
}

bool cachestat_pages(int fd, uint64_t begin, uint64_t end, uint64_t *pages) {
    CachestatRange range{begin, end - begin};
    CachestatAnswer answer{};
    if (syscall(kCachestatNumber, fd, &range, &answer, 0) != 0) return false;
    *pages = answer.cached;
    return true;
}

bool mincore_pages(int fd, uint64_t begin, uint64_t end, std::vector<unsigned char> *pages) {
    pages->assign((end - begin + system_page() - 1) / system_page(), 0);
    void *map = mmap(nullptr, end - begin, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
    if (map == MAP_FAILED) return false;
    const bool answered = mincore(map, end - begin, pages->data()) == 0;
    munmap(map, end - begin);
    return answered;
}

// mincore tells the truth to the owner of a file and to who may write it; to others it says that all is resident.
bool mincore_is_true(int fd, const struct stat &status) {
    if (geteuid() == 0 || geteuid() == status.st_uid) return true;
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    return faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0;
}

void append(std::vector<Segment> *out, uint64_t begin, uint64_t end, bool resident) {
    if (!out->empty() && out->back().resident == resident && out->back().end == begin) {
        out->back().end = end;
    } else {
        out->push_back({begin, end, resident});
    }
}

// Halves a range (page aligned) until each half is wholly in the cache or wholly out of it.
bool bisect(int fd, uint64_t begin, uint64_t end, std::vector<Segment> *out) {
    uint64_t cached = 0;
    if (!cachestat_pages(fd, begin, end, &cached)) return false;
    const uint64_t pages = (end - begin) / system_page();
    if (cached == 0 || cached >= pages) {
        append(out, begin, end, cached != 0);
        return true;
    }
    const uint64_t middle = begin + pages / 2 * system_page();
    return bisect(fd, begin, middle, out) && bisect(fd, middle, end, out);
}

}  // namespace

const char *Residency::name(Method method) {
    switch (method) {
        case Method::kMemory:
            return "memory";
        case Method::kCachestat:
            return "cachestat";
        case Method::kMincore:
            return "mincore";
        case Method::kUnknown:
            break;
    }
    return "unknown";
}

Residency::Method Residency::detect(int fd, const struct stat &status) {
    struct statfs system;
    if (fstatfs(fd, &system) != 0) return Method::kUnknown;
    const auto type = static_cast<long>(system.f_type);
    if (type == kTmpfs || type == kRamfs || type == kHugetlbfs) return Method::kMemory;
    char page[kPage];
    // One page and no readahead, which would bring in what is about to be read directly; afterwards as it was, for a
    // file whose reads are all buffered.
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    const ssize_t got = pread(fd, page, sizeof page, 0);
    posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
    if (got <= 0) return Method::kUnknown;
    uint64_t cached = 0;
    if (cachestat_pages(fd, 0, static_cast<uint64_t>(got), &cached) && cached >= 1) return Method::kCachestat;
    std::vector<unsigned char> pages;
    if (mincore_is_true(fd, status) && mincore_pages(fd, 0, static_cast<uint64_t>(got), &pages) &&
        (pages[0] & 1)) {
        return Method::kMincore;
    }
    return Method::kUnknown;
}

std::optional<bool> Residency::alike(Method method, int fd, uint64_t begin, uint64_t end) {
    uint64_t cached = 0;
    const uint64_t first = round_down(begin, system_page()), last = round_up(end, system_page());
    if (method != Method::kCachestat || !cachestat_pages(fd, first, last, &cached)) return {};
    if (cached != 0 && cached < (last - first) / system_page()) return {};
    return cached != 0;
}

double Residency::share(const char *path) {
    constexpr uint64_t kStretches = 16, kStretch = 1 << 20;
    const Descriptor opened(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    const int fd = opened.get();
    if (fd < 0) return -1;
    struct stat status;
    double found = -1;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
        const auto nbytes = static_cast<uint64_t>(status.st_size);
        const Method method = detect(fd, status);
        uint64_t asked = 0, cached = 0;
        for (uint64_t i = 0; i < kStretches && method != Method::kUnknown && method != Method::kMemory; i++) {
            const uint64_t begin = round_down(nbytes / kStretches * i, system_page());
            const uint64_t end = std::min(begin + kStretch, nbytes);
            for (const Segment &part : segments(method, fd, begin, end)) {
                asked += part.end - part.begin;
                if (part.resident) cached += part.end - part.begin;
            }
        }
        if (method == Method::kMemory) found = 1;
        if (asked > 0) found = static_cast<double>(cached) / static_cast<double>(asked);
    }
    return found;
}

std::vector<Segment> Residency::segments(Method method, int fd, uint64_t begin, uint64_t end) {
    std::vector<Segment> found;
    const uint64_t first = round_down(begin, system_page());
    const uint64_t last = round_up(end, system_page());
    bool answered = true;
    if (method == Method::kCachestat) {
        answered = bisect(fd, first, last, &found);
    } else if (method == Method::kMincore) {
        std::vector<unsigned char> pages;
        answered = mincore_pages(fd, first, last, &pages);
        for (size_t i = 0; answered && i < pages.size(); i++) {
            append(&found, first + i * system_page(), first + (i + 1) * system_page(), (pages[i] & 1) != 0);
        }
    } else {
        answered = false;
    }
    if (!answered) return {{begin, end, true}};
    found.front().begin = begin;
    found.back().end = end;
    return found;
}

}  // namespace tl
