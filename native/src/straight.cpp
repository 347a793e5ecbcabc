#include "straight.hpp"

#include <algorithm>

namespace tl {

std::vector<Part> device_parts(const Chunk &chunk, uint64_t begin, uint64_t end) {
    std::vector<Part> parts;
    const std::vector<Copy> &copies = chunk.slot->copies;
    for (uint32_t i = 0; i < chunk.fill_count; i++) {
        const Fill &fill = chunk.slot->fills[chunk.first_fill + i];
        // Rows never come straight, so that all of them is what is asked for.
        const uint64_t from = fill.strided() ? fill.file_offset : std::max(begin, fill.file_offset);
        const uint64_t to = fill.strided() ? from + fill.nbytes : std::min(end, fill.end());
        if (from >= to) continue;
        uint64_t where = fill.where + (from - fill.file_offset);
        const uint64_t last = where + (to - from);
        // Copies lie in the slot in order, and every byte of a fill is in one.
        auto copy = std::upper_bound(copies.begin(), copies.end(), where,
                                     [](uint64_t at, const Copy &c) { return at < c.where + c.nbytes; });
        for (; where < last; ++copy) {
            const uint64_t nbytes = std::min(last, copy->where + copy->nbytes) - where;
            const uint64_t at = fill.file_offset + (where - fill.where);
            parts.push_back({at, at + nbytes, {where, nbytes, copy->destination + (where - copy->where)}});
            where += nbytes;
        }
    }
    return parts;
}

std::vector<Copy> copies_left(const Slot &slot) {
    const auto came_straight = [](const Chunk &chunk) { return !chunk.straight.empty(); };
    if (std::none_of(slot.chunks.begin(), slot.chunks.end(), came_straight)) return slot.copies;
    std::vector<Copy> left;
    const auto add = [&left](const Chunk &chunk, uint64_t begin, uint64_t end) {
        for (const Part &part : device_parts(chunk, begin, end)) {
            const Copy &copy = part.copy;
            if (!left.empty() && left.back().where + left.back().nbytes == copy.where &&
                left.back().destination + left.back().nbytes == copy.destination) {
                left.back().nbytes += copy.nbytes;
            } else {
                left.push_back(copy);
            }
        }
    };
    for (const Chunk &chunk : slot.chunks) {
        std::vector<Range> straight = chunk.straight;
        std::sort(straight.begin(), straight.end(),
                  [](const Range &a, const Range &b) { return a.begin < b.begin; });
        uint64_t at = chunk.begin;
        for (const Range &range : straight) {
            add(chunk, at, range.begin);
            at = range.end;
        }
        add(chunk, at, chunk.end);
    }
    return left;
}

}  // namespace tl
