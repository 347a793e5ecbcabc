#include "file.hpp"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "descriptor.hpp"

namespace tl {
namespace {

// Largest block of direct I/O that is worth using; a file system that wants more is read through the cache.
constexpr uint64_t kLargestBlock = 64 << 10;

// The smallest block that a direct read is not refused for; 0 if there is none. Only EINVAL says something about it: what
// else goes wrong is for the reader to meet.
uint64_t probe_block(int fd) {
    char *memory = static_cast<char *>(std::aligned_alloc(kLargestBlock, kLargestBlock));
    if (!memory) return kPage;
    uint64_t block = kPage;
    while (block <= kLargestBlock && pread(fd, memory, block, 0) < 0 && errno == EINVAL) block *= 2;
    std::free(memory);
    return block <= kLargestBlock ? block : 0;
}

int open_again(const char *path, int flags) {
    int fd;
    do {
        fd = open(path, flags);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0 || fd > 2) return fd;
    // The place of stdin, stdout or stderr, which this process has closed: others may use it as such.
    const int higher = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    const int os_errno = errno;
    ::close(fd);
    errno = os_errno;
    return higher;
}

}  // namespace

bool no_descriptors(int os_errno) {
    return os_errno == EMFILE || os_errno == ENFILE;
}

Failure File::open_plain() {
    if (plain_fd >= 0) return {};
    // Not blocking on a pipe that has taken the file's place.
    Descriptor fd(open_again(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (fd.get() < 0) return open_failed(errno);
    struct stat status;
    Failure f;
    if (fstat(fd.get(), &status) != 0) {
        f = os_failure(TL_ERR_OPEN, errno, "cannot ask about");
    } else if (!S_ISREG(status.st_mode)) {
        f = failure(TL_ERR_REPLACED, "is not a regular file any more");
    } else if (inode_ != 0 && (status.st_dev != device_ || status.st_ino != inode_)) {
        f = failure(TL_ERR_REPLACED, "was replaced by another file since its header was read");
    } else if (static_cast<uint64_t>(status.st_size) < nbytes_) {
        f = failure(TL_ERR_TRUNCATED, "is shorter than when its header was read");
        f.wanted = nbytes_;
        f.got = static_cast<uint64_t>(status.st_size);
    } else if (static_cast<uint64_t>(status.st_size) > nbytes_) {
        f = failure(TL_ERR_REPLACED, "has grown since its header was read");
        f.wanted = nbytes_;
        f.got = static_cast<uint64_t>(status.st_size);
    }
    if (f) {
        f.file = index;
        return f;
    }
    plain_fd = fd.take();
    return {};
}

int File::open_direct() {
    shortage = 0;
    if (direct_fd >= 0) return 0;
    // Through the open descriptor: the same file, even if its path leads elsewhere by now.
    const std::string same = "/proc/self/fd/" + std::to_string(plain_fd);
    int fd = open_again(same.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == ENOENT) {  // no /proc here
        fd = open_again(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT | O_NONBLOCK);
        struct stat plain, direct;
        if (fd >= 0 && (fstat(plain_fd, &plain) != 0 || fstat(fd, &direct) != 0 ||
                        plain.st_ino != direct.st_ino || plain.st_dev != direct.st_dev)) {
            ::close(fd);
            return ENOENT;
        }
    }
    if (fd < 0) {
        if (no_descriptors(errno)) shortage = errno;
        return errno;
    }
    block = 0;
#ifdef STATX_DIOALIGN
    struct statx answer {};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0 &&
        (answer.stx_mask & STATX_DIOALIGN) != 0) {
        const uint64_t wanted = std::max(answer.stx_dio_mem_align, answer.stx_dio_offset_align);
        if (wanted == 0 || wanted > kLargestBlock) {
            ::close(fd);
            return EINVAL;
        }
        block = std::max(kPage, wanted);
    }
#endif
    if (block == 0) block = probe_block(fd);
    if (block == 0) {
        ::close(fd);
        return EINVAL;
    }
    direct_fd = fd;
    return 0;
}

std::string File::open_cufile() {
    const int refusal = open_direct();
    if (shortage) return std::strerror(shortage);
    if (refusal != 0) note(std::string("CUFILE: direct I/O refused: ") + std::strerror(refusal));
    return cufile.open(refusal == 0 ? direct_fd : plain_fd, &shortage);
}

void File::close() {
    cufile.close();
    if (plain_fd >= 0) ::close(plain_fd);
    if (direct_fd >= 0) ::close(direct_fd);
    plain_fd = direct_fd = -1;
}

void File::note(const std::string &text) {
    if (notes.find(text) != std::string::npos) return;
    if (!notes.empty()) notes += '\n';
    notes += text;
}

Failure File::truncated(uint64_t offset, uint64_t wanted, uint64_t got) const {
    Failure f = failure(TL_ERR_TRUNCATED, "ended while it was read");
    f.file = index;
    f.offset = offset;
    f.wanted = wanted;
    f.got = got;
    return f;
}

Failure File::open_failed(int os_errno) const {
    Failure f = os_failure(TL_ERR_OPEN, os_errno, "cannot open");
    f.file = index;
    return f;
}

Failure File::read_failed(int os_errno, uint64_t offset, uint64_t wanted, uint64_t got) const {
    Failure f = os_failure(TL_ERR_READ, os_errno, "cannot read");
    f.file = index;
    f.offset = offset;
    f.wanted = wanted;
    f.got = got;
    return f;
}

}  // namespace tl
