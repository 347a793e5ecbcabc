// What goes over the wire, little endian, after a handshake that is none of its business:
//
//   fork   ChunkRequest
//   seed   Answer, and where its outcome is TL_CHUNK_OK the bytes and a Trailer
//
// and again, until one side closes. A region and an offset are numbers of the manifest, never addresses. The epoch in
// the trailer is read behind the last byte: if it is that of the request, all bytes are of that epoch.
//
// A fork that can reach the seed's memory itself says so in its request. Then in place of each block the digest of it
// comes (zeros where none is wanted), as early, part by part, as the block itself might have under the seed's limit; the fork
// copies that block, and says Copied behind the last one. Only then the seed reads the epoch for its trailer.
#pragma once

#include <bit>
#include <cstdint>

namespace tl {

static_assert(std::endian::native == std::endian::little, "structures go over the wire as they are");

inline constexpr uint32_t kRequest = 0x51524c54;  // "TLRQ"
inline constexpr uint32_t kAnswer = 0x4e414c54;   // "TLAN"
inline constexpr uint32_t kTrailer = 0x52544c54;  // "TLTR"
inline constexpr uint32_t kCopied = 0x50434c54;   // "TLCP"

// What is digested and sent, or received and digested, while it is in a processor core's own cache.
inline constexpr uint64_t kBlock = 256u << 10;

struct ChunkRequest {
    uint32_t magic;
    uint32_t region;
    uint64_t offset;
    uint64_t nbytes;
    uint64_t epoch;
    uint32_t digest;
    uint32_t copies;  // not 0: the fork reads the memory itself
};

struct Answer {
    uint32_t magic;
    int32_t outcome;
    uint64_t epoch;
};

struct Copied {
    uint32_t magic;
};

struct Trailer {
    uint32_t magic;
    uint32_t has_digest;
    uint64_t epoch;
    uint8_t digest[16];
};

static_assert(sizeof(ChunkRequest) == 40 && sizeof(Answer) == 16 && sizeof(Trailer) == 32);

}  // namespace tl
