// Rings that outlive their engine, for the next one: at most one a device, and with it the device's context.
#pragma once

#include <memory>

#include "ring.hpp"

namespace tl {

// The ring of an engine that has retained and bound its device: the kept one where it is large enough, else a new one. A
// kept one that is too small goes first: a load has no second ring beside its own.
std::unique_ptr<Ring> take_ring(Driver *driver, int device, uint64_t slot_bytes, uint64_t pinned_bytes);

// Keeps the ring of an engine that has ended, the device still bound. Not one with memory that could not be pinned, for
// the next engine shall try again; not one that was taken before rings were let go; and of two the one with more memory.
void keep_ring(std::unique_ptr<Ring> ring);

// Keeps the ring of an engine that has ended, the device still bound, for release_rings() alone.
void set_ring_aside(std::unique_ptr<Ring> ring);

// Gives back what is kept and what was set aside; its bytes. Rings of engines at work are not kept when these end.
uint64_t release_rings();

}  // namespace tl
