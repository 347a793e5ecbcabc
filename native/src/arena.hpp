// Reference counted memory that tensors share.
#pragma once

#include <atomic>

#include "common.hpp"

struct tl_arena {
    std::atomic<uint64_t> references{1};
    void *memory = nullptr;  // what give_back takes: the memory itself, or a DLManagedTensor
    uint64_t nbytes = 0;
    void (*give_back)(tl_arena *self) = nullptr;
};

namespace tl {

// As the functions of the C interface that have these names.
Failure arena_host(uint64_t nbytes, tl_arena **arena, uint64_t *address);
Failure arena_adopt(void *dl_managed_tensor, tl_arena **arena, uint64_t *address);
uint64_t arenas_alive();

void arena_hold(tl_arena *arena);
void arena_drop(tl_arena *arena);

}  // namespace tl
