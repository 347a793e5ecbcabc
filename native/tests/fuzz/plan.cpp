// Pieces as an enemy would write them: each that is refused has to be one that breaks a rule, what is taken is planned for
// slots as a device has them and read by an engine, and the bytes are compared with what the pieces say.
#include "plan.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "input.hpp"
#include "rows.hpp"

namespace {

constexpr uint8_t kCanary = 0xA5;
constexpr size_t kMemory = 96 << 10, kMostPieces = 24;
const std::vector<std::vector<uint8_t>> kFiles = {pattern(50'001, 1), pattern(9, 2), {}};

struct Case {
    tl_options options{};
    std::vector<tl_piece> pieces;  // destinations count from the memory's begin, plus 1: 0 is none
    uint64_t cut = 0;              // where chunks are read in two parts
};

// A piece that is right most of the time, or one of any numbers.
tl_piece piece_of(Input &input, uint64_t *end) {
    const auto kind = input.take<uint8_t>();
    tl_piece piece{};
    piece.file = kind % 8 == 7 ? input.take<int32_t>() : kind % 3;
    piece.flags = kind >> 4 == 15 ? input.take<uint32_t>() : kind >> 4 & 3;
    if (kind & 8) {
        piece.file_offset = input.take<uint64_t>();
        piece.nbytes = input.take<uint64_t>();
        piece.destination = input.take<uint64_t>();
        piece.rows = input.take<uint64_t>();
        piece.stride = input.take<uint64_t>();
        return piece;
    }
    piece.file_offset = input.take<uint16_t>();
    piece.nbytes = input.take<uint16_t>();
    if (!(kind & 128)) piece.nbytes %= 3000;
    piece.destination = *end + input.take<uint8_t>() + 1;
    if (kind & 64) {
        piece.rows = input.take<uint8_t>() % 64 + 1;
        piece.nbytes = piece.nbytes / 4 / piece.rows * piece.rows;
        piece.stride = piece.nbytes / piece.rows + input.take<uint16_t>() % 6000;
    }
    if (piece.nbytes < kMemory) *end = piece.destination + piece.nbytes;
    return piece;
}

Case case_of(Input &input) {
    const auto shape = input.take<uint16_t>();
    Case found;
    tl_options &o = found.options;
    o.struct_size = sizeof o;
    o.abi_version = TL_ABI_VERSION;
    o.chunk_bytes = tl::kPage * (shape % 4 + 1);
    o.slot_bytes = o.chunk_bytes * (shape / 4 % 4 + 1);
    o.threads = o.io_depth = shape / 16 % 3 + 1;
    o.backend_count = 1;
    constexpr uint32_t kReaders[] = {TL_BACKEND_PREAD, TL_BACKEND_MMAP, TL_BACKEND_AUTO, TL_BACKEND_BUFFERED};
    o.backends[0] = kReaders[shape / 64 % 4];
    found.cut = input.take<uint16_t>();
    uint64_t end = 0;
    while (input.left() && found.pieces.size() < kMostPieces && end < kMemory)
        found.pieces.push_back(piece_of(input, &end));
    return found;
}

// The rules of tensorlift.h, in numbers that cannot overflow.
bool is_right(const std::vector<tl_piece> &pieces, size_t i, uint64_t slot_bytes) {
    using Wide = unsigned __int128;
    const tl_piece &p = pieces[i];
    if (p.file < 0 || static_cast<size_t>(p.file) >= kFiles.size()) return false;
    if (p.nbytes && !p.destination) return false;
    if (Wide{p.destination} + p.nbytes > UINT64_MAX) return false;
    if (p.flags & ~(TL_PIECE_JOIN | TL_PIECE_DIGEST)) return false;
    if ((p.flags & TL_PIECE_DIGEST) && (p.nbytes > slot_bytes || p.rows)) return false;
    if ((p.flags & TL_PIECE_JOIN) && i && p.destination < pieces[i - 1].destination + pieces[i - 1].nbytes)
        return false;
    if (!p.rows && p.stride) return false;
    if (p.rows && (!p.nbytes || p.nbytes % p.rows || p.stride < p.nbytes / p.rows)) return false;
    const Wide span = p.rows ? Wide{p.rows - 1} * p.stride + p.nbytes / p.rows : Wide{p.nbytes};
    return p.file_offset + span <= kFiles[static_cast<size_t>(p.file)].size();
}

bool lies_in_memory(const tl_piece &p) {
    return p.nbytes == 0 || (p.destination - 1 <= kMemory && p.nbytes <= kMemory - (p.destination - 1));
}

struct Memory {
    std::vector<uint8_t> bytes = std::vector<uint8_t>(kMemory, kCanary);
    std::vector<uint8_t> any = std::vector<uint8_t>(kMemory, 0);  // padding, or wanted by two pieces
};

Memory wanted_of(const std::vector<tl_piece> &pieces) {
    Memory wanted;
    std::vector<uint8_t> written(kMemory, 0);
    uint64_t end = 0;
    for (size_t i = 0; i < pieces.size(); i++) {
        const tl_piece &p = pieces[i];
        const uint64_t rows = std::max<uint64_t>(p.rows, 1), row = p.nbytes / rows;
        for (uint64_t b = 0; b < p.nbytes; b++) {
            const uint64_t to = p.destination - 1 + b;
            wanted.bytes[to] = kFiles[static_cast<size_t>(p.file)]
                                     [p.file_offset + b / row * p.stride + (p.rows ? b % row : b)];
            wanted.any[to] |= written[to];
            written[to] = 1;
        }
        if ((p.flags & TL_PIECE_JOIN) && i && p.nbytes) {
            for (uint64_t at = end; at < std::min<uint64_t>(p.destination - 1, kMemory); at++)
                wanted.any[at] = 1;
        }
        if (p.nbytes) end = p.destination - 1 + p.nbytes;
    }
    return wanted;
}

void compare(const Memory &wanted, const std::vector<uint8_t> &found) {
    if (wanted.bytes == found) return;
    for (size_t i = 0; i < kMemory; i++) REQUIRE(wanted.any[i] || wanted.bytes[i] == found[i]);
}

// A slot filled chunk by chunk, its copies made: no byte of it beside the slot.
void carry_out(const tl::Slot &slot, const Case &c, std::vector<uint8_t> *memory) {
    std::vector<uint8_t> room(c.options.slot_bytes + tl::kPage, 0);
    for (const tl::Chunk &chunk : slot.chunks) {
        const std::vector<uint8_t> &file = kFiles[static_cast<size_t>(chunk.file)];
        REQUIRE(chunk.begin < chunk.end && chunk.end <= file.size());
        const uint64_t middle = std::clamp(c.cut, chunk.begin, chunk.end);
        const auto bring = [&](uint64_t where, uint64_t from, uint64_t to) {
            REQUIRE(from < to && to <= file.size());
            REQUIRE(where + slot.shift + (to - from) <= room.size());
            std::memcpy(room.data() + slot.shift + where, file.data() + from, to - from);
        };
        tl::each_part(chunk, chunk.begin, middle, bring);
        tl::each_part(chunk, middle, chunk.end, bring);
    }
    for (const tl::DigestJob &job : slot.digests) {
        REQUIRE(job.where + slot.shift + job.nbytes <= room.size());
        const uint8_t *from = room.data() + slot.shift + job.where;
        bool same = job.nbytes == 0;
        for (const auto &file : kFiles) {
            same |=
                job.end() <= file.size() && std::memcmp(from, file.data() + job.file_offset, job.nbytes) == 0;
        }
        REQUIRE(same);
    }
    for (const tl::Copy &copy : slot.copies) {
        REQUIRE(copy.where + copy.nbytes <= c.options.slot_bytes);
        REQUIRE(copy.destination - 1 + copy.nbytes <= kMemory);
        std::memcpy(memory->data() + (copy.destination - 1), room.data() + slot.shift + copy.where,
                    copy.nbytes);
    }
}

void plan_for_a_device(const Case &c, const Memory &wanted) {
    tl::PlanBuilder builder({true, c.options.chunk_bytes, c.options.slot_bytes});
    for (size_t i = 0; i < c.pieces.size(); i++) {
        tl_piece piece = c.pieces[i];
        if (i == 0) piece.flags &= ~TL_PIECE_JOIN;
        builder.add(piece);
    }
    std::vector<uint8_t> memory(kMemory, kCanary);
    uint64_t ticket = 0;
    for (const auto &slot : builder.finish(0)) {
        REQUIRE(slot->ticket >= ticket && slot->ticket <= c.pieces.size());
        ticket = slot->ticket;
        carry_out(*slot, c, &memory);
    }
    compare(wanted, memory);
}

// Paths of the files, which are memory.
const std::vector<std::string> &paths() {
    static const std::vector<std::string> made = [] {
        std::vector<std::string> all;
        for (const auto &bytes : kFiles) {
            const int fd = memfd_create("fuzz", 0);
            REQUIRE(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
            all.push_back("/proc/self/fd/" + std::to_string(fd));
        }
        return all;
    }();
    return made;
}

void read_by_an_engine(const Case &c, bool right, bool safe, const Memory *wanted) {
    tl_error error{};
    error.struct_size = sizeof error;
    tl_engine *engine = nullptr;
    REQUIRE(tl_engine_create(&c.options, &engine, &error) == TL_OK);
    for (size_t i = 0; i < kFiles.size(); i++) {
        int32_t file = -1;
        REQUIRE(tl_engine_add_file(engine, paths()[i].c_str(), 0, 0, kFiles[i].size(), &file, &error) ==
                TL_OK);
        REQUIRE(file == static_cast<int32_t>(i));
    }
    std::vector<uint8_t> memory(kMemory, kCanary);
    std::vector<tl_piece> pieces = c.pieces;
    for (tl_piece &p : pieces) {
        if (safe && p.destination) p.destination += reinterpret_cast<uint64_t>(memory.data()) - 1;
    }
    uint64_t ticket = 0;
    if (safe || !right) {
        const tl_status status = tl_engine_submit(engine, pieces.data(), pieces.size(), 0, &ticket, &error);
        REQUIRE(status == (right ? TL_OK : TL_ERR_ARGUMENT));
    }
    if (wanted) {
        REQUIRE(tl_engine_wait(engine, ticket, 60'000, &error) == TL_OK);
        compare(*wanted, memory);
        std::vector<uint8_t> digests(16 * pieces.size());
        REQUIRE(tl_engine_digests(engine, 0, pieces.size(), digests.data(), &error) == TL_OK);
        for (size_t i = 0; i < pieces.size(); i++) {
            uint8_t digest[16] = {};
            if ((pieces[i].flags & TL_PIECE_DIGEST) && pieces[i].nbytes) {
                const auto &file = kFiles[static_cast<size_t>(pieces[i].file)];
                tl_digest(file.data() + pieces[i].file_offset, pieces[i].nbytes, digest);
            }
            REQUIRE(std::memcmp(digest, digests.data() + 16 * i, sizeof digest) == 0);
        }
    }
    REQUIRE(tl_engine_destroy(engine, &error) == TL_OK);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes) {
    Input input(bytes, nbytes);
    const Case c = case_of(input);
    std::vector<uint64_t> sizes;
    for (const auto &file : kFiles) sizes.push_back(file.size());
    bool right = true, safe = true;
    for (size_t i = 0; i < c.pieces.size(); i++) {
        const bool now = is_right(c.pieces, i, c.options.slot_bytes);
        const bool taken = !tl::check_piece(c.pieces.data(), i, sizes, c.options.slot_bytes);
        REQUIRE(now == taken);
        right &= now;
        safe &= lies_in_memory(c.pieces[i]);
    }
    // Where destinations are the caller's, what lies nowhere is only planned for nothing.
    if (!right || !safe) {
        read_by_an_engine(c, right, safe, nullptr);
        return 0;
    }
    const Memory wanted = wanted_of(c.pieces);
    plan_for_a_device(c, wanted);
    read_by_an_engine(c, true, true, &wanted);
    return 0;
}
