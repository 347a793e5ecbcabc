// Files of memory that other processes may read: sealed, and of huge pages where the kernel gives them.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "guard.hpp"
#include "tensorlift_fork.h"

// Linux 5.1 and 6.1, which not every build machine's headers have.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace {

using tl::Failure;
using tl::os_failure;

constexpr uint64_t kHuge = 2u << 20;
// No process can make it shorter, and none but this one can write to it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

// What is made so far: undone, unless it is given away.
struct Made {
    int fd = -1;
    char *address = static_cast<char *>(MAP_FAILED);
    uint64_t nbytes = 0;

    ~Made() {
        if (address != MAP_FAILED) munmap(address, nbytes);
        if (fd >= 0) close(fd);
    }
};

// Huge pages are of use where the address in memory and the one in the file are alike.
char *map_aligned(int fd, uint64_t nbytes, int access) {
    const uint64_t room = nbytes + kHuge;
    void *around = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (around == MAP_FAILED) return static_cast<char *>(MAP_FAILED);
    char *begin = static_cast<char *>(around);
    char *to = reinterpret_cast<char *>(tl::round_up(reinterpret_cast<uint64_t>(begin), kHuge));
    char *end = to + tl::round_up(nbytes, tl::kPage);
    if (mmap(to, nbytes, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(around, room);
        return static_cast<char *>(MAP_FAILED);
    }
    if (to > begin) munmap(begin, static_cast<size_t>(to - begin));
    if (end < begin + room) munmap(end, static_cast<size_t>(begin + room - end));
    return to;
}

// Copying small pages of a file takes half as long again as huge ones. A page has to be there to be made a huge one.
void make_huge(const Made &made) {
    for (uint64_t at = 0; at + kHuge <= made.nbytes; at += kHuge) {
        if (pwrite(made.fd, "", 1, static_cast<off_t>(at)) != 1) return;
        if (madvise(made.address + at, kHuge, MADV_COLLAPSE) != 0) return;
    }
}

Failure make(uint64_t nbytes, Made &made) {
    made.nbytes = nbytes;
    made.fd = memfd_create("tensorlift", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd < 0) return os_failure(TL_ERR_MEMORY, errno, "cannot make a file of memory");
    if (ftruncate(made.fd, static_cast<off_t>(nbytes)) != 0)
        return os_failure(TL_ERR_MEMORY, errno, "cannot make a file of memory so large");
    made.address = map_aligned(made.fd, nbytes, PROT_READ | PROT_WRITE);
    if (made.address == MAP_FAILED) return os_failure(TL_ERR_MEMORY, errno, "cannot map a file of memory");
    make_huge(made);
    // All of it now: what is missing later would be a signal, not an error.
    int found;
    do {
        found = fallocate(made.fd, 0, 0, static_cast<off_t>(nbytes));
    } while (found != 0 && errno == EINTR);
    if (found != 0) return os_failure(TL_ERR_MEMORY, errno, "there is no memory for a file of it");
    if (fcntl(made.fd, F_ADD_SEALS, kSeals) != 0)
        return os_failure(TL_ERR_MEMORY, errno, "cannot seal a file of memory (Linux 5.1 or newer can)");
    return {};
}

}  // namespace

tl_status tl_shared_create(uint64_t nbytes, int32_t *fd, uint64_t *address, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!fd || !address) return tl::failure(TL_ERR_ARGUMENT, "no place for descriptor and address");
        if (nbytes == 0) return tl::failure(TL_ERR_ARGUMENT, "nbytes is 0");
        Made made;
        if (Failure f = make(nbytes, made)) return f;
        *fd = std::exchange(made.fd, -1);
        *address = reinterpret_cast<uint64_t>(made.address);
        made.address = static_cast<char *>(MAP_FAILED);
        return {};
    });
}

void tl_shared_release(int32_t fd, uint64_t address, uint64_t nbytes) {
    munmap(reinterpret_cast<void *>(address), nbytes);
    if (fd >= 0) close(fd);
}

tl_status tl_shared_map(int32_t fd, uint64_t *address, uint64_t *nbytes, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!address || !nbytes) return tl::failure(TL_ERR_ARGUMENT, "no place for address and size");
        const int seals = fcntl(fd, F_GET_SEALS);
        struct stat stat {};
        if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &stat) != 0 || stat.st_size <= 0)
            return tl::failure(TL_ERR_ARGUMENT, "this is no file of memory that stays as large as it is");
        *nbytes = static_cast<uint64_t>(stat.st_size);
        char *mapped = map_aligned(fd, *nbytes, PROT_READ);
        if (mapped == MAP_FAILED) return os_failure(TL_ERR_MEMORY, errno, "cannot map a file of memory");
        *address = reinterpret_cast<uint64_t>(mapped);
        return {};
    });
}
