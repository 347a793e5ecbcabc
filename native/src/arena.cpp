#include "arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "dlpack.hpp"

namespace tl {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
std::atomic<uint64_t> live{0};

// What was adopted and lives, by its first byte.
struct Adopted {
    std::mutex mutex;
    std::map<uint64_t, tl_arena *> by_begin;
};

// Never destroyed: tensors may outlive static destructors.
Adopted &adopted() {
    static auto *all = new Adopted;
    return *all;
}

// Makes the owner's stream, in whose order the memory will be used again, wait for the others that have used it.
void order_users(const tl_arena &arena) {
    Failure why;
    Driver *driver = driver_for(arena.device_kind, &why);
    if (!driver) return;
    Bound bound(driver, arena.device_index, true);
    if (bound.failure()) return;
    for (Stream user : arena.users) {
        Event event = nullptr;
        if (driver->event_create(&event)) {
            driver->stream_synchronize(user);
            continue;
        }
        if (driver->event_record(event, user) || driver->stream_wait(arena.owner, event)) {
            driver->stream_synchronize(user);
        }
        driver->event_destroy(event);
    }
}

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
    if (arena->begin != 0) {
        std::lock_guard<std::mutex> lock(adopted().mutex);
        adopted().by_begin.erase(arena->begin);
    }
    if (!arena->users.empty()) order_users(*arena);
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
        const std::string what = "cannot have " + std::to_string(nbytes) + " bytes of host memory";
        return os_failure(TL_ERR_MEMORY, ENOMEM, what.c_str());
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

Failure arena_adopt(void *dl_managed_tensor, int32_t device_kind, int32_t device_index, Stream owner,
                    tl_arena **arena, uint64_t *address) {
    if (!dl_managed_tensor) return failure(TL_ERR_ARGUMENT, "no tensor to adopt");
    auto made = std::make_unique<tl_arena>();
    const DLTensor &tensor = static_cast<DLManagedTensor *>(dl_managed_tensor)->tensor;
    made->memory = dl_managed_tensor;
    made->begin = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
    made->nbytes = static_cast<uint64_t>(tensor.dtype.bits) * tensor.dtype.lanes / 8;
    for (int32_t i = 0; i < tensor.ndim; i++) made->nbytes *= static_cast<uint64_t>(tensor.shape[i]);
    made->device_kind = device_kind;
    made->device_index = device_index;
    made->owner = owner;
    made->give_back = [](tl_arena *self) {
        auto *managed = static_cast<DLManagedTensor *>(self->memory);
        if (managed->deleter) managed->deleter(managed);
    };
    {
        std::lock_guard<std::mutex> lock(adopted().mutex);
        adopted().by_begin[made->begin] = made.get();
    }
    live++;
    *address = made->begin;
    *arena = made.release();
    return {};
}

Failure arena_record_stream(uint64_t address, Stream stream) {
    std::lock_guard<std::mutex> lock(adopted().mutex);
    const auto &all = adopted().by_begin;
    const auto next = all.upper_bound(address);
    tl_arena *arena = next == all.begin() ? nullptr : std::prev(next)->second;
    if (!arena || address - arena->begin >= arena->nbytes || arena->device_kind == TL_DEVICE_CPU) {
        return failure(TL_ERR_ARGUMENT, "no arena of a device has this address");
    }
    std::vector<Stream> &users = arena->users;
    if (stream != arena->owner && std::find(users.begin(), users.end(), stream) == users.end()) {
        users.push_back(stream);
    }
    return {};
}

}  // namespace tl
