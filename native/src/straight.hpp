// What of a slot goes straight to the device, past the slot, and what is left for its copies.
#pragma once

#include <vector>

#include "plan.hpp"

namespace tl {

// Bytes that lie in one piece both in their slot and on the device, and in the file unless they are rows.
struct Part {
    uint64_t begin;  // range of the file
    uint64_t end;
    Copy copy;
};

// The parts that make up [begin, end) of the chunk's file, in order; bytes between its fills are in none.
std::vector<Part> device_parts(const Chunk &chunk, uint64_t begin, uint64_t end);

// The copies that a filled slot needs: all of its own where nothing came straight, else of exactly what did not.
std::vector<Copy> copies_left(const Slot &slot);

}  // namespace tl
