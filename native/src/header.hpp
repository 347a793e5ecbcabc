// A header that was read: its text, and what the scanner found in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tensorlift.h"

struct tl_header {
    struct Entry {
        std::string_view name;  // into the text
        uint8_t dtype;
        uint32_t ndim;
        int64_t begin, end;
    };
    std::vector<Entry> entries;
    std::vector<int64_t> extents;  // of all shapes, one after another
    uint64_t metadata_begin = 0, metadata_end = 0;
    bool plain = false;
    bool tiled = true;  // each range begins where the one before it ends, the first at 0
    std::string_view text;
    std::unique_ptr<char[]> memory;  // of the text, where it is not somebody else's
    uint64_t file_bytes = 0, device = 0, inode = 0;
};

namespace tl {

inline constexpr uint64_t kHeaderLength = 8;  // bytes of the length field in front of the text

// The dtypes that are known: their codes, a space behind each, and the bits of an element of each.
struct Dtypes {
    std::string_view codes;
    const uint8_t *bits;
};

// Reads the text.
void scan(const Dtypes &dtypes, tl_header *header);

// Fills the facts of the C interface.
void tell(tl_header *header, uint64_t *facts);

}  // namespace tl
