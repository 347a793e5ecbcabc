// From pieces to work: slots, the fills that bring their bytes, the copies that move them.
//
//   pieces    |----- run -----|gap|--- run ---|            one arena, destinations in order
//   slots     |== slot 0 ==|== slot 1 ==|== 2 =|           one staging buffer each; a copy never spans two
//   chunks    |--|--|--|---|--|--|---...                   one read each, cut where the file's blocks end
//
// A slot mirrors its part of an arena (where = offset in the slot = offset in the arena), so that one copy moves it.
// For a CPU there is no staging: a slot is then only the unit in which tickets are counted, and where is an address.
#pragma once

#include <memory>
#include <vector>

#include "common.hpp"
#include "digest.hpp"

namespace tl {

// A range of a file, or rows of one that lie `stride` apart there and one after another in memory.
struct Fill {
    uint64_t file_offset;
    uint64_t nbytes;          // of all rows
    uint64_t where;           // address (CPU) or offset from the slot's base (device)
    uint64_t row_nbytes = 0;  // 0: a range
    uint64_t stride = 0;

    bool strided() const {
        return row_nbytes != 0;
    }
    // Of what it spans in the file.
    uint64_t end() const {
        return file_offset + (strided() ? (nbytes / row_nbytes - 1) * stride + row_nbytes : nbytes);
    }
    // Leaves out what was taken from its begin: whole rows.
    void drop(uint64_t taken) {
        file_offset += strided() ? taken / row_nbytes * stride : taken;
        where += taken;
        nbytes -= taken;
    }
};

struct Copy {
    uint64_t where;
    uint64_t nbytes;
    uint64_t destination;
};

// Bytes of a piece that are to be digested, at the latest once the slot is filled.
struct DigestJob {
    uint64_t piece;  // counted over the engine's life
    uint64_t file_offset;
    uint64_t nbytes;
    uint64_t where;  // as in Fill
    bool made = false;
    Digest digest{};

    uint64_t end() const {
        return file_offset + nbytes;
    }
};

struct Slot;

struct Range {
    uint64_t begin;
    uint64_t end;
};

// Fills of one file, in the order of their offsets, that one read brings (gaps between them are smaller than a page). A
// strided fill has a chunk of its own, and a read for each row where the gaps are larger.
struct Chunk {
    Slot *slot;
    int file;
    uint32_t first_fill;
    uint32_t fill_count;
    uint64_t begin;  // range of the file from the first to the last fill
    uint64_t end;
    size_t first_digest = 0;  // of the slot's digests, those whose bytes this chunk brings whole
    size_t digest_count = 0;
    uint32_t pending = 1;  // parts not there yet, the one who splits it included; under the engine's lock
    std::vector<Range> straight = {};  // of the file: what came past the slot; under the engine's lock

    const Fill &fill() const;  // the first
};

struct Slot {
    uint64_t index = 0;   // counted over the engine's life
    uint64_t ticket = 0;  // pieces that are complete once this slot and all before it are
    uint64_t place = 0;   // in the ring, from the moment that its first chunk is taken
    uint64_t fence = 0;   // of its submission, see Copier::pass_fence
    uint64_t shift = 0;   // added to the base, so that direct reads of the first fill land in place
    std::vector<Fill> fills;
    std::vector<Copy> copies;
    std::vector<Chunk> chunks;
    std::vector<DigestJob> digests;
    size_t chunks_left = 0;  // under the engine's lock, as the rest
    bool landed = false;
    bool copied = false;
};

inline const Fill &Chunk::fill() const {
    return slot->fills[first_fill];
}

struct PlanShape {
    bool device = false;
    uint64_t chunk_bytes = 0;
    uint64_t slot_bytes = 0;
};

// Whether piece i of a call is one that can be read, given the bytes of each file.
Failure check_piece(const tl_piece *pieces, uint64_t i, const std::vector<uint64_t> &files,
                    uint64_t slot_bytes);

// Cuts the pieces of one submission into slots. Pure: no engine, no file.
class PlanBuilder {
public:
    explicit PlanBuilder(const PlanShape &shape) : shape_(shape) {}

    // first_ticket: pieces submitted before. Every slot is complete when add() of all pieces and finish() are done.
    void add(const tl_piece &piece);
    std::vector<std::unique_ptr<Slot>> finish(uint64_t first_ticket);

private:
    struct Staged {
        int file;
        Fill fill;
    };

    // What is left of a piece to be placed; the fill's `where` is its destination.
    struct Rest {
        int file;
        uint32_t flags;
        Fill fill;
    };

    void add_all(Rest rest, bool joins);
    // Takes as much of the rest of a piece as the open slot has room for, opening one where needed; the bytes taken.
    uint64_t take(const Rest &rest, bool joins);
    uint64_t place(const Rest &rest, bool joins) const;
    void open();
    void close();
    // Adds to the open slot; what follows the fill before in file and slot becomes part of it, so that reads are cut at
    // block edges and not at the edges of pieces.
    void stage(int file, const Fill &fill);
    void cut_into_chunks(const Staged &staged);
    uint64_t most_of_a_chunk(const Fill &fill) const;
    void give_digests_to_chunks();

    PlanShape shape_;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::vector<Staged> staged_;  // fills of the open slot
    bool slot_open_ = false;
    bool before_has_bytes_ = false;
    uint64_t used_ = 0;  // end of what the open slot holds
    uint64_t pieces_ = 0;
};

}  // namespace tl
