// Reference counted memory that tensors share.
#pragma once

#include <atomic>
#include <vector>

#include "common.hpp"
#include "shim/driver.hpp"

struct tl_arena {
    std::atomic<uint64_t> references{1};
    void *memory = nullptr;  // what give_back takes: the memory itself, or a DLManagedTensor
    uint64_t begin = 0;      // of what was adopted
    uint64_t nbytes = 0;
    void (*give_back)(tl_arena *self) = nullptr;
    // Of what was adopted: where it lies, the stream in whose order it is used again, and other streams that use it.
    int32_t device_kind = TL_DEVICE_CPU;
    int32_t device_index = 0;
    tl::Stream owner = nullptr;
    std::vector<tl::Stream> users;
};

namespace tl {

// As the functions of the C interface that have these names.
Failure arena_host(uint64_t nbytes, tl_arena **arena, uint64_t *address);
Failure arena_adopt(void *dl_managed_tensor, int32_t device_kind, int32_t device_index, Stream owner,
                    tl_arena **arena, uint64_t *address);
Failure arena_record_stream(uint64_t address, Stream stream);
uint64_t arenas_alive();

void arena_hold(tl_arena *arena);
void arena_drop(tl_arena *arena);

}  // namespace tl
