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

// At most limit bytes of a fill. Of rows whole ones; of a range, if that is not all, up to where a block of the file ends,
// so that no block is read for two slots or chunks.
uint64_t at_most(const Fill &fill, uint64_t limit) {
    if (fill.nbytes <= limit) return fill.nbytes;
    if (fill.strided()) return round_down(limit, fill.row_nbytes);
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
uint64_t PlanBuilder::place(const Rest &rest, bool joins) const {
    const Slot &slot = *slots_.back();
    if (slot.copies.empty()) return 0;
    const Copy &last = slot.copies.back();
    if (joins) return last.where + (rest.fill.where - last.destination);
    const Staged &before = staged_.back();
    if (before.file == rest.file && before.fill.end() == rest.fill.file_offset) return used_;
    // Rows are moved once more in any case, so no place is better for them.
    if (rest.fill.nbytes < kWorthAligning || rest.fill.strided()) return round_up(used_, kLine);
    const uint64_t misfit = (rest.fill.file_offset - slot.shift - used_) % kPage;
    return used_ + misfit;
}

uint64_t PlanBuilder::take(const Rest &rest, bool joins) {
    if (!slot_open_) open();
    Slot &slot = *slots_.back();
    Fill fill = rest.fill;
    const uint64_t destination = fill.where;
    const bool first = used_ == 0;
    const uint64_t where = shape_.device ? place(rest, joins && !first) : used_;
    const uint64_t room = where < shape_.slot_bytes ? shape_.slot_bytes - where : 0;
    const uint64_t taken = at_most(fill, room);
    // A long piece that direct reads could not bring in place here, or one that would leave a stub, opens a new slot.
    const bool misfit = shape_.device && !fill.strided() && fill.nbytes >= shape_.chunk_bytes &&
                        (fill.file_offset - slot.shift - where) % kPage != 0;
    // A piece to be digested stays whole: it is digested where it lies in its slot.
    const bool whole = (rest.flags & TL_PIECE_DIGEST) != 0;
    const bool stub = taken < fill.nbytes && (whole || taken == 0 || room < shape_.slot_bytes / 8);
    if (!first && (misfit || stub)) {
        close();
        return 0;
    }
    fill.nbytes = taken;
    if (shape_.device) fill.where = where;
    if (whole) slot.digests.push_back({pieces_, fill.file_offset, taken, fill.where});
    stage(rest.file, fill);
    used_ = where + taken;
    if (!shape_.device) return taken;
    if (first) slot.shift = fill.file_offset % kPage;
    if (joins && !first) {
        slot.copies.back().nbytes = where + taken - slot.copies.back().where;
    } else if (!first && slot.copies.back().where + slot.copies.back().nbytes == where &&
               slot.copies.back().destination + slot.copies.back().nbytes == destination) {
        slot.copies.back().nbytes += taken;
    } else {
        slot.copies.push_back({where, taken, destination});
    }
    return taken;
}

void PlanBuilder::stage(int file, const Fill &fill) {
    if (!staged_.empty() && !fill.strided()) {
        Staged &before = staged_.back();
        if (before.file == file && !before.fill.strided() && before.fill.end() == fill.file_offset &&
            before.fill.where + before.fill.nbytes == fill.where) {
            before.fill.nbytes += fill.nbytes;
            return;
        }
    }
    staged_.push_back({file, fill});
}

void PlanBuilder::add(const tl_piece &piece) {
    // Behind a piece of no bytes there is no copy to join.
    const bool joins = (piece.flags & TL_PIECE_JOIN) != 0 && before_has_bytes_;
    before_has_bytes_ = piece.nbytes > 0;
    const uint64_t rows = std::max<uint64_t>(piece.rows, 1), row = piece.nbytes / rows;
    Rest rest{piece.file, piece.flags, {piece.file_offset, piece.nbytes, piece.destination}};
    if (rows == 1 || piece.stride == row) {
        add_all(rest, joins);
    } else if (row <= shape_.chunk_bytes) {
        rest.fill.row_nbytes = row;
        rest.fill.stride = piece.stride;
        add_all(rest, joins);
    } else {
        // Each row is several reads, so a plan of ranges is no larger than for as many bytes that lie together.
        for (uint64_t i = 0; i < rows; i++) {
            rest.fill = {piece.file_offset + i * piece.stride, row, piece.destination + i * row};
            add_all(rest, joins && i == 0);
        }
    }
    pieces_++;
}

void PlanBuilder::add_all(Rest rest, bool joins) {
    while (rest.fill.nbytes > 0) {
        const uint64_t taken = take(rest, joins);
        rest.fill.drop(taken);
        if (rest.fill.nbytes > 0 && taken > 0) {
            close();
            joins = false;  // what is left opens a slot of its own
        }
    }
}

// Of rows so many that all of them with what is read of the gaps come to about a chunk; a gap of a page and more is not
// read, but the read that it costs takes about as long as a page.
uint64_t PlanBuilder::most_of_a_chunk(const Fill &fill) const {
    if (!fill.strided()) return shape_.chunk_bytes;
    const uint64_t each = fill.row_nbytes + std::min(fill.stride - fill.row_nbytes, kPage);
    return std::max<uint64_t>(shape_.chunk_bytes / each, 1) * fill.row_nbytes;
}

// Adds one fill of the open slot to its last chunk where one read can bring both, else begins new chunks with it.
void PlanBuilder::cut_into_chunks(const Staged &staged) {
    Slot &slot = *slots_.back();
    Fill rest = staged.fill;
    if (!slot.chunks.empty() && !rest.strided() && !slot.fills.back().strided()) {
        Chunk &last = slot.chunks.back();
        const Fill &before = slot.fills.back();
        const uint64_t end = rest.end();
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
        const auto index = static_cast<uint32_t>(slot.fills.size());
        Fill fill = rest;
        fill.nbytes = at_most(rest, most_of_a_chunk(rest));
        slot.fills.push_back(fill);
        slot.chunks.push_back({&slot, staged.file, index, 1, fill.file_offset, fill.end()});
        rest.drop(fill.nbytes);
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

namespace {

// Of a piece with rows, whose other fields are checked.
Failure check_rows(const tl_piece &p, const std::string &name, uint64_t file_nbytes) {
    if (p.rows == 0 && p.stride != 0) return failure(TL_ERR_ARGUMENT, name + " has a stride but no rows");
    if (p.rows == 0) return {};
    if (p.nbytes == 0 || p.nbytes % p.rows != 0) {
        return failure(TL_ERR_ARGUMENT, name + " has " + std::to_string(p.nbytes) + " bytes in " +
                                            std::to_string(p.rows) + " rows: not as many in each, or none");
    }
    const uint64_t row = p.nbytes / p.rows;
    if (p.stride < row) {
        return failure(TL_ERR_ARGUMENT, name + " has rows of " + std::to_string(row) + " bytes every " +
                                            std::to_string(p.stride) + " bytes: they overlap");
    }
    uint64_t end;
    if (__builtin_mul_overflow(p.rows - 1, p.stride, &end) || __builtin_add_overflow(end, row, &end) ||
        __builtin_add_overflow(end, p.file_offset, &end) || end > file_nbytes) {
        return failure(TL_ERR_ARGUMENT, name + " has rows that reach past the end of its file, which has " +
                                            std::to_string(file_nbytes) + " bytes");
    }
    if (p.flags & TL_PIECE_DIGEST)
        return failure(TL_ERR_ARGUMENT, name + " has rows, which are not digested");
    return {};
}

}  // namespace

Failure check_piece(const tl_piece *pieces, uint64_t i, const std::vector<uint64_t> &files,
                    uint64_t slot_bytes) {
    const tl_piece &p = pieces[i];
    if (p.file < 0 || static_cast<size_t>(p.file) >= files.size()) {
        return failure(TL_ERR_ARGUMENT,
                       "piece " + std::to_string(i) + " names file " + std::to_string(p.file));
    }
    if (p.file_offset + p.nbytes < p.file_offset || p.destination + p.nbytes < p.destination ||
        p.file_offset + p.nbytes > static_cast<uint64_t>(INT64_MAX)) {
        return failure(TL_ERR_ARGUMENT, "piece " + std::to_string(i) + " has a range that wraps around");
    }
    const uint64_t file_nbytes = files[static_cast<size_t>(p.file)];
    // Before anything is planned: a plan is as large as its bytes are many.
    if (p.rows == 0 && p.file_offset + p.nbytes > file_nbytes) {
        return failure(TL_ERR_ARGUMENT, "piece " + std::to_string(i) +
                                            " reaches past the end of its file, which has " +
                                            std::to_string(file_nbytes) + " bytes");
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
    return check_rows(p, "piece " + std::to_string(i), file_nbytes);
}

}  // namespace tl
