// Reads on the thread that asks, of what is cached: in place, or rows that lie close together through a buffer.
#include <cerrno>

#include "engine.hpp"
#include "readers/deep.hpp"
#include "rows.hpp"

namespace tl {
namespace {

// preadv(2) and process_vm_readv(2) take up to IOV_MAX buffers.
constexpr size_t kMostBuffers = 1024;
// Signals are blocked, so that only a file system may answer EINTR; one that goes on doing so does not work.
constexpr int kInterruptions = 100;
// Bytes of rows, with the gaps between them, that are read before they are packed: still in the processor's caches then.
constexpr uint64_t kPacked = 256 << 10;

// Drops what has arrived from the front of the buffers.
void advance(std::vector<iovec> *buffers, size_t *first, uint64_t nbytes) {
    while (nbytes > 0) {
        iovec &buffer = (*buffers)[*first];
        const uint64_t part = std::min<uint64_t>(nbytes, buffer.iov_len);
        buffer.iov_base = static_cast<char *>(buffer.iov_base) + part;
        buffer.iov_len -= part;
        nbytes -= part;
        if (buffer.iov_len == 0) (*first)++;
    }
}

}  // namespace

bool Engine::fetch_cached(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end) {
    bool came = true;
    each_stretch(*chunk, begin, end, kPage, [&](uint64_t from, uint64_t to) {
        uint64_t where;
        const bool packed = chunk->fill().strided() && !is_one_part(*chunk, from, to, &where);
        came = came && (packed ? fetch_packed(chunk, file, path, from, to)
                               : fetch_stretch(chunk, file, path, from, to));
    });
    return came;
}

bool Engine::fetch_stretch(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end) {
    char *base = slot_base(*chunk->slot);
    char gap[kPage];  // bytes between fills, which nobody wants
    std::vector<iovec> buffers;
    const uint64_t begin_ns = trace_.begin();
    uint64_t delivered = 0;
    uint64_t at = end;  // where the first buffer begins in the file
    uint64_t until = end;
    each_part(*chunk, begin, end, [&](uint64_t where, uint64_t from, uint64_t to) {
        if (buffers.empty()) {
            at = from;
        } else if (from > until) {
            buffers.push_back({gap, from - until});
        }
        buffers.push_back({address(base, where), to - from});
        delivered += to - from;
        until = to;
    });
    const Came came = read_all(chunk, file, path, {begin, end}, {at, until}, &buffers);
    if (came != Came::kHere) return came == Came::kElsewhere;
    bytes_[path] += delivered;
    trace_.end(begin_ns, TL_STAGE_READ, file->index, begin, end - begin, path);
    return true;
}

bool Engine::fetch_packed(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end) {
    thread_local Bounce bounce;
    char *const buffer = bounce.reserve(std::min(kPacked, end - begin));
    if (!buffer) {
        failed(failure(TL_ERR_MEMORY, "no memory for a buffer of reads"));
        return false;
    }
    char *base = slot_base(*chunk->slot);
    for (uint64_t next, at = begin; at < end; at = next) {
        next = std::min(end, at + kPacked);
        const uint64_t begin_ns = trace_.begin();
        std::vector<iovec> buffers{{buffer, next - at}};
        const Came came = read_all(chunk, file, path, {at, next}, {at, next}, &buffers);
        if (came == Came::kNever) return false;
        if (came == Came::kElsewhere) continue;
        bytes_[path] += unpack(*chunk, base, buffer, {at, next});
        trace_.end(begin_ns, TL_STAGE_READ, file->index, at, next - at, path);
    }
    return true;
}

uint64_t Engine::unpack(const Chunk &chunk, char *base, const char *bytes, Range range) {
    uint64_t delivered = 0;
    each_part(chunk, range.begin, range.end, [&](uint64_t where, uint64_t from, uint64_t to) {
        std::memcpy(address(base, where), bytes + (from - range.begin), to - from);
        delivered += to - from;
    });
    return delivered;
}

Engine::Came Engine::read_all(Chunk *chunk, File *file, int path, Range whole, Range wanted,
                              std::vector<iovec> *buffers) {
    const CachedRead read = path == TL_PATH_MMAP ? mmap_copy : pread_buffered;
    const auto [begin, end] = whole;
    uint64_t at = wanted.begin;
    int interrupted = 0;
    for (size_t first = 0; at < wanted.end;) {
        if (stopping()) return Came::kNever;
        const auto count = static_cast<int>(std::min(buffers->size() - first, kMostBuffers));
        const int64_t got = read(*file, buffers->data() + first, count, at);
        if (got == 0) {
            failed(file->truncated(begin, wanted.end - begin, at - begin));
            return Came::kNever;
        }
        if (got == -EINTR && interrupted++ < kInterruptions) continue;
        if (got < 0) {
            const int os_errno = static_cast<int>(-got);
            if (means_refused(os_errno)) {
                const bool came = path_refused(chunk, file, path, std::strerror(os_errno), begin, end);
                return came ? Came::kElsewhere : Came::kNever;
            }
            failed(file->read_failed(os_errno, begin, wanted.end - begin, at - begin));
            return Came::kNever;
        }
        reads_[path]++;
        at += static_cast<uint64_t>(got);
        advance(buffers, &first, static_cast<uint64_t>(got));
    }
    return Came::kHere;
}

}  // namespace tl
