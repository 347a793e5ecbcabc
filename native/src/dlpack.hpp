// The structures of DLPack's C interface, version 0.x ("dltensor" capsules), as its specification lays them out.
#pragma once

#include <cstdint>

namespace tl {

struct DLDevice {
    int32_t device_type;
    int32_t device_id;
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
};

struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(DLManagedTensor *self);
};

}  // namespace tl
