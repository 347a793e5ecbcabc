// What of a chunk's range is wanted, and where it goes: fills are ranges, or rows with gaps between them.
#pragma once

#include <algorithm>

#include "plan.hpp"

namespace tl {

// Calls use(where, from, to) for each contiguous part of the chunk's fills in [begin, end) of the file, in order; where is
// that of its first byte.
template <class Use>
void each_part(const Chunk &chunk, uint64_t begin, uint64_t end, Use use) {
    const Fill *fill = &chunk.fill();
    for (const Fill *last = fill + chunk.fill_count; fill != last; fill++) {
        const uint64_t until = std::min(end, fill->end());
        if (!fill->strided()) {
            const uint64_t from = std::max(begin, fill->file_offset);
            if (from < until) use(fill->where + (from - fill->file_offset), from, until);
            continue;
        }
        const uint64_t before = begin > fill->file_offset ? (begin - fill->file_offset) / fill->stride : 0;
        uint64_t row = fill->file_offset + before * fill->stride;
        uint64_t where = fill->where + before * fill->row_nbytes;
        for (; row < until; row += fill->stride, where += fill->row_nbytes) {
            const uint64_t from = std::max(begin, row);
            const uint64_t to = std::min(until, row + fill->row_nbytes);
            if (from < to) use(where + (from - row), from, to);
        }
    }
}

// Whether the chunk has gaps of so many bytes and more, which are not to be read.
inline bool is_sparse(const Chunk &chunk, uint64_t gap) {
    const Fill &fill = chunk.fill();
    return fill.strided() && fill.stride - fill.row_nbytes >= gap;
}

// Calls use(from, to) for each range that is to be read at a time: all, or the rows one by one where the chunk is sparse.
template <class Use>
void each_stretch(const Chunk &chunk, uint64_t begin, uint64_t end, uint64_t gap, Use use) {
    if (!is_sparse(chunk, gap)) return use(begin, end);
    each_part(chunk, begin, end, [&](uint64_t, uint64_t from, uint64_t to) { use(from, to); });
}

// Whether [begin, end) of the file lies in one part of the chunk; then *where is that of its first byte.
inline bool is_one_part(const Chunk &chunk, uint64_t begin, uint64_t end, uint64_t *where) {
    const Fill &fill = chunk.fill();
    if (chunk.fill_count != 1 || begin >= end) return false;
    const uint64_t behind = begin - fill.file_offset;
    if (!fill.strided()) {
        *where = fill.where + behind;
        return true;
    }
    const uint64_t row = behind / fill.stride, inside = behind % fill.stride;
    *where = fill.where + row * fill.row_nbytes + inside;
    return inside + (end - begin) <= fill.row_nbytes;
}

// base is null for a CPU, where fills hold addresses.
inline char *address(char *base, uint64_t where) {
    return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(base) + where);
}

}  // namespace tl
