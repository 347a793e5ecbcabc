// Tensors handed out as DLPack capsules, with their final dtype and shape: one Python call for all tensors of an arena,
// and no call of torch that would give the GIL away.
#include <cstdlib>

#include "arena.hpp"
#include "dlpack.hpp"
#include "python.hpp"

namespace tl {
namespace {

constexpr const char *kFresh = "dltensor";  // the name of a capsule that nobody has taken yet

// A tensor and, behind it, its shape and strides, in one allocation.
DLManagedTensor *make_tensor(tl_arena *arena, uint64_t address, const DLDataType &dtype, int32_t ndim,
                             const int64_t *shape, const DLDevice &device) {
    const auto dimensions = static_cast<size_t>(ndim);
    void *memory = std::malloc(sizeof(DLManagedTensor) + 2 * dimensions * sizeof(int64_t));
    if (!memory) return nullptr;
    auto *managed = static_cast<DLManagedTensor *>(memory);
    auto *sizes = reinterpret_cast<int64_t *>(managed + 1);
    int64_t *strides = sizes + dimensions;
    int64_t stride = 1;
    for (size_t i = dimensions; i-- > 0;) {
        sizes[i] = shape[i];
        strides[i] = stride;
        stride *= shape[i];
    }
    managed->tensor = {reinterpret_cast<void *>(address), device, ndim, dtype, sizes, strides, 0};
    managed->context = arena;
    managed->deleter = [](DLManagedTensor *self) {
        arena_drop(static_cast<tl_arena *>(self->context));
        std::free(self);
    };
    arena_hold(arena);
    return managed;
}

// Of a capsule that nobody took.
void drop_capsule(void *capsule) {
    if (!python().capsule_is_valid(capsule, kFresh)) return;
    auto *managed = static_cast<DLManagedTensor *>(python().capsule_get(capsule, kFresh));
    managed->deleter(managed);
}

}  // namespace
}  // namespace tl

void *tl_arena_capsules(tl_arena *arena, uint64_t address, uint64_t count, const uint64_t *offsets,
                        const uint8_t *codes, const uint8_t *bits, const uint16_t *lanes,
                        const int32_t *ndims, const int64_t *shapes, int32_t dl_device_type,
                        int32_t dl_device_id) {
    using namespace tl;
    const Python &py = python();
    if (!py.there) return nullptr;
    void *list = py.list_new(static_cast<intptr_t>(count));
    if (!list) return nullptr;
    for (uint64_t i = 0; i < count; i++) {
        DLManagedTensor *managed = make_tensor(arena, address + offsets[i], {codes[i], bits[i], lanes[i]},
                                               ndims[i], shapes, {dl_device_type, dl_device_id});
        void *capsule = managed ? py.capsule_new(managed, kFresh, drop_capsule) : py.no_memory();
        if (!capsule) {
            if (managed) managed->deleter(managed);
            py.decref(list);
            return nullptr;
        }
        py.list_set(list, static_cast<intptr_t>(i), capsule);
        shapes += ndims[i];
    }
    return list;
}
