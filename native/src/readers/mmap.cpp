// A shared map of the part that is wanted, copied by the kernel: where the file was cut short, process_vm_readv answers
// EFAULT where a memcpy would end the process with SIGBUS.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "readers/reader.hpp"

namespace tl {

int64_t mmap_copy(const File &file, const iovec *buffers, int count, uint64_t offset) {
    uint64_t wanted = 0;
    for (int i = 0; i < count; i++) wanted += buffers[i].iov_len;
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t begin = round_down(offset, page);
    const uint64_t nbytes = offset + wanted - begin;
    void *map = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, file.plain_fd, static_cast<off_t>(begin));
    if (map == MAP_FAILED) return -errno;
    iovec source{static_cast<char *>(map) + (offset - begin), wanted};
    ssize_t got = process_vm_readv(getpid(), buffers, static_cast<unsigned long>(count), &source, 1, 0);
    const int os_errno = errno;
    munmap(map, nbytes);
    struct stat status;
    if (fstat(file.plain_fd, &status) != 0) return -errno;
    // The rest of the last page reads as zeros: what lies behind the end of the file does not count.
    const auto size = static_cast<uint64_t>(status.st_size);
    const uint64_t there = size > offset ? size - offset : 0;
    if (got < 0) return os_errno == EFAULT && there < wanted ? 0 : -os_errno;
    return static_cast<int64_t>(std::min<uint64_t>(static_cast<uint64_t>(got), there));
}

}  // namespace tl
