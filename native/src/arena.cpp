#include "arena.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <new>

#include "dlpack.hpp"

namespace tl {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
std::atomic<uint64_t> live{0};

// From here on a map of its own; less comes from the heap, since a process may have 65,530 maps (vm.max_map_count).
constexpr uint64_t kSmallestMap = 64 << 10;

// Zeros from the heap, at a cache line.
void *heap_memory(uint64_t nbytes) {
    const uint64_t rounded = round_up(nbytes, 64);
    void *memory = std::aligned_alloc(64, rounded);
    if (memory) std::memset(memory, 0, rounded);
    return memory;
}

// Anonymous memory, at a multiple of the huge page where it is that large.
void *map_memory(uint64_t nbytes) {
    const uint64_t extra = nbytes >= kHugePage ? kHugePage : 0;
    void *map = mmap(nullptr, nbytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    if (extra == 0) return map;
    char *begin = static_cast<char *>(map);
    char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<uintptr_t>(begin), kHugePage));
    const auto before = static_cast<uint64_t>(aligned - begin);
    if (before > 0) munmap(begin, before);
    if (before < extra) munmap(aligned + nbytes, extra - before);
    // Decides the speed of reading into fresh memory: 8 GB/s with huge pages, 3 without (measured on two cores).
    madvise(aligned, nbytes, MADV_HUGEPAGE);
    return aligned;
}

}  // namespace

void arena_hold(tl_arena *arena) {
    arena->references.fetch_add(1, std::memory_order_relaxed);
}

void arena_drop(tl_arena *arena) {
    if (arena->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    arena->give_back(arena);
    delete arena;
    live--;
}

uint64_t arenas_alive() {
    return live.load();
}

Failure arena_host(uint64_t nbytes, tl_arena **arena, uint64_t *address) {
    if (nbytes == 0 || nbytes > static_cast<uint64_t>(INT64_MAX)) {
        return failure(TL_ERR_ARGUMENT, "an arena needs from 1 byte to 8 EiB");
    }
    const bool small = nbytes < kSmallestMap;
    auto *made = new (std::nothrow) tl_arena;
    void *memory = !made ? nullptr : small ? heap_memory(nbytes) : map_memory(round_up(nbytes, kPage));
    if (!memory) {
        delete made;
        return os_failure(TL_ERR_MEMORY, ENOMEM,
                          "cannot have " + std::to_string(nbytes) + " bytes of host memory");
    }
    made->memory = memory;
    made->nbytes = nbytes;
    made->give_back = small ? [](tl_arena *self) { std::free(self->memory); }
                            : [](tl_arena *self) { munmap(self->memory, round_up(self->nbytes, kPage)); };
    live++;
    *arena = made;
    *address = reinterpret_cast<uint64_t>(memory);
    return {};
}

Failure arena_adopt(void *dl_managed_tensor, tl_arena **arena, uint64_t *address) {
    if (!dl_managed_tensor) return failure(TL_ERR_ARGUMENT, "no tensor to adopt");
    auto *made = new (std::nothrow) tl_arena;
    if (!made) return failure(TL_ERR_MEMORY, "no memory for an arena");
    made->memory = dl_managed_tensor;
    made->give_back = [](tl_arena *self) {
        auto *managed = static_cast<DLManagedTensor *>(self->memory);
        if (managed->deleter) managed->deleter(managed);
    };
    live++;
    const DLTensor &tensor = static_cast<DLManagedTensor *>(dl_managed_tensor)->tensor;
    *arena = made;
    *address = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
    return {};
}

}  // namespace tl
