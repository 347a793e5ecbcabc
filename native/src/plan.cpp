#include "plan.hpp"

#include <algorithm>
#include <string>

#include "digest.hpp"

namespace tl {
namespace {

// Pieces from here on are worth a place at which direct reads land without being moved again.
constexpr uint64_t kWorthAligning = 64 << 10;
// Alignment of small pieces that share a slot: a cache line, for the sake of the copy engine.
constexpr uint64_t kLine = 64;

// At most limit bytes of a piece; if that is not all, it ends where a block of the file ends, so that no block is read
// for two slots or chunks.
uint64_t up_to_a_block(const Fill &fill, uint64_t limit) {
    if (fill.nbytes <= limit) return fill.nbytes;
    const uint64_t end = round_down(fill.file_offset + limit, kPage);
    return end > fill.file_offset ? end - fill.file_offset : limit;
}

}  // namespace

void PlanBuilder::open() {
    slots_.push_back(std::make_unique<Slot>());
    slot_open_ = true;
    used_ = 0;
}

// Offset in the open slot at which the rest of a piece goes.
uint64_t PlanBuilder::place(const tl_piece &rest, bool joins) const {
    const Slot &slot = *slots_.back();
    if (slot.copies.empty()) return 0;
    const Copy &last = slot.copies.back();
    if (joins) return last.where + (rest.destination - last.destination);
    const Staged &before = staged_.back();
    if (before.file == rest.file && before.fill.file_offset + before.fill.nbytes == rest.file_offset)
        return used_;
    if (rest.nbytes < kWorthAligning) return round_up(used_, kLine);
    const uint64_t misfit = (rest.file_offset - slot.shift - used_) % kPage;
    return used_ + misfit;
}

uint64_t PlanBuilder::take(const tl_piece &rest, bool joins) {
    if (!slot_open_) open();
    Slot &slot = *slots_.back();
    const bool first = used_ == 0;
    const uint64_t where = shape_.device ? place(rest, joins && !first) : used_;
    const uint64_t room = where < shape_.slot_bytes ? shape_.slot_bytes - where : 0;
    const uint64_t taken = up_to_a_block({rest.file_offset, rest.nbytes, 0}, room);
    // A long piece that direct reads could not bring in place here, or one that would leave a stub, opens a new slot.
    const bool misfit = shape_.device && rest.nbytes >= shape_.chunk_bytes &&
                        (rest.file_offset - slot.shift - where) % kPage != 0;
    // A piece to be digested stays whole: it is digested where it lies in its slot.
    const bool whole = (rest.flags & TL_PIECE_DIGEST) != 0;
    if (!first && (misfit || (taken < rest.nbytes && (whole || room < shape_.slot_bytes / 8)))) {
        close();
        return 0;
    }
    if (whole)
        slot.digests.push_back({pieces_, rest.file_offset, taken, shape_.device ? where : rest.destination});
    if (!shape_.device) {
        stage(rest.file, {rest.file_offset, taken, rest.destination});
        used_ += taken;
        return taken;
    }
    if (first) slot.shift = rest.file_offset % kPage;
    if (joins && !first) {
        slot.copies.back().nbytes = where + taken - slot.copies.back().where;
    } else if (!first && slot.copies.back().where + slot.copies.back().nbytes == where &&
               slot.copies.back().destination + slot.copies.back().nbytes == rest.destination) {
        slot.copies.back().nbytes += taken;
    } else {
        slot.copies.push_back({where, taken, rest.destination});
    }
    stage(rest.file, {rest.file_offset, taken, where});
    used_ = where + taken;
    return taken;
}

void PlanBuilder::stage(int file, const Fill &fill) {
    if (!staged_.empty()) {
        Staged &before = staged_.back();
        if (before.file == file && before.fill.file_offset + before.fill.nbytes == fill.file_offset &&
            before.fill.where + before.fill.nbytes == fill.where) {
            before.fill.nbytes += fill.nbytes;
            return;
        }
    }
    staged_.push_back({file, fill});
}

void PlanBuilder::add(const tl_piece &piece) {
    tl_piece rest = piece;
    // Behind a piece of no bytes there is no copy to join.
    bool joins = (piece.flags & TL_PIECE_JOIN) != 0 && before_has_bytes_;
    before_has_bytes_ = piece.nbytes > 0;
    while (rest.nbytes > 0) {
        const uint64_t taken = take(rest, joins);
        rest.file_offset += taken;
        rest.destination += taken;
        rest.nbytes -= taken;
        if (rest.nbytes > 0 && taken > 0) {
            close();
            joins = false;  // what is left opens a slot of its own
        }
    }
    pieces_++;
}

// Adds one fill of the open slot to its last chunk where one read can bring both, else begins new chunks with it.
void PlanBuilder::cut_into_chunks(const Staged &staged) {
    Slot &slot = *slots_.back();
    Fill rest = staged.fill;
    if (!slot.chunks.empty()) {
        Chunk &last = slot.chunks.back();
        const Fill &before = slot.fills.back();
        const uint64_t end = rest.file_offset + rest.nbytes;
        if (last.file == staged.file && rest.file_offset >= last.end && rest.file_offset - last.end < kPage &&
            end - last.begin <= shape_.chunk_bytes) {
            if (rest.file_offset == last.end && before.where + before.nbytes == rest.where) {
                slot.fills.back().nbytes += rest.nbytes;
            } else {
                slot.fills.push_back(rest);
                last.fill_count++;
            }
            last.end = end;
            return;
        }
    }
    while (rest.nbytes > 0) {
        const uint64_t taken = up_to_a_block(rest, shape_.chunk_bytes);
        const auto index = static_cast<uint32_t>(slot.fills.size());
        slot.fills.push_back({rest.file_offset, taken, rest.where});
        slot.chunks.push_back({&slot, staged.file, index, 1, rest.file_offset, rest.file_offset + taken});
        rest = {rest.file_offset + taken, rest.nbytes - taken, rest.where + taken};
    }
}

// Digests and fills come in the order of the pieces, so each is looked at once. What lies in two chunks is nobody's.
void PlanBuilder::give_digests_to_chunks() {
    Slot &slot = *slots_.back();
    size_t next = 0;
    for (Chunk &chunk : slot.chunks) {
        chunk.first_digest = next;
        for (uint32_t i = 0; i < chunk.fill_count; i++) {
            const Fill &fill = slot.fills[chunk.first_fill + i];
            for (; next < slot.digests.size(); next++) {
                const DigestJob &job = slot.digests[next];
                const uint64_t behind = job.file_offset - fill.file_offset;
                if (behind >= fill.nbytes || job.where - fill.where != behind) break;
                if (behind + job.nbytes <= fill.nbytes) chunk.digest_count++;
            }
        }
    }
}

void PlanBuilder::close() {
    Slot &slot = *slots_.back();
    slot.ticket = pieces_;
    for (const Staged &staged : staged_) cut_into_chunks(staged);
    give_digests_to_chunks();
    slot.chunks_left = slot.chunks.size();
    staged_.clear();
    slot_open_ = false;
}

std::vector<std::unique_ptr<Slot>> PlanBuilder::finish(uint64_t first_ticket) {
    if (slot_open_) close();
    for (auto &slot : slots_) {
        slot->ticket += first_ticket;
        for (DigestJob &job : slot->digests) job.piece += first_ticket;
    }
    return std::move(slots_);
}

Failure check_piece(const tl_piece *pieces, uint64_t i, size_t file_count, uint64_t slot_bytes) {
    const tl_piece &p = pieces[i];
    if (p.file < 0 || static_cast<size_t>(p.file) >= file_count) {
        return failure(TL_ERR_ARGUMENT,
                       "piece " + std::to_string(i) + " names file " + std::to_string(p.file));
    }
    if (p.file_offset + p.nbytes < p.file_offset || p.destination + p.nbytes < p.destination ||
        p.file_offset + p.nbytes > static_cast<uint64_t>(INT64_MAX)) {
        return failure(TL_ERR_ARGUMENT, "piece " + std::to_string(i) + " has a range that wraps around");
    }
    if (p.nbytes > 0 && p.destination == 0) {
        return failure(TL_ERR_ARGUMENT, "piece " + std::to_string(i) + " has no destination");
    }
    if ((p.flags & TL_PIECE_DIGEST) && (!digests_built() || p.nbytes > slot_bytes)) {
        return failure(TL_ERR_ARGUMENT, digests_built() ? "a piece to be digested is larger than a slot"
                                                        : "xxHash was not there when the library was built");
    }
    if (p.flags & ~(TL_PIECE_JOIN | TL_PIECE_DIGEST)) {
        return failure(TL_ERR_ARGUMENT, "piece " + std::to_string(i) + " has unknown flags");
    }
    if ((p.flags & TL_PIECE_JOIN) && i > 0 &&
        p.destination < pieces[i - 1].destination + pieces[i - 1].nbytes) {
        return failure(TL_ERR_ARGUMENT, "piece " + std::to_string(i) + " joins one that lies behind it");
    }
    return {};
}

}  // namespace tl
