#include "shim/driver.hpp"

namespace tl {

Driver *driver_for(int32_t device_kind, Failure *why) {
    switch (device_kind) {
        case TL_DEVICE_CUDA:
            return cuda_driver(why);
        case TL_DEVICE_HIP:
            return hip_driver(why);
        default:
            *why = failure(TL_ERR_ARGUMENT, "device_kind " + std::to_string(device_kind) + " has no driver");
            return nullptr;
    }
}

}  // namespace tl
