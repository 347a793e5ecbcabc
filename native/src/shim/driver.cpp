#include "shim/driver.hpp"

#include <algorithm>

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

Failure driver_failure(const char *call, int code, const char *name) {
    Failure f;
    f.status = TL_ERR_DRIVER;
    f.driver_code = code;
    explain(&f, [&] {
        return std::string(call) + " answered " + (name ? name : "unknown error") + " (" +
               std::to_string(code) + ")";
    });
    return f;
}

uint64_t within_allocation(Driver *driver, uint64_t address, uint64_t nbytes) {
    uint64_t begin = 0, there = 0;
    if (driver->address_range(address, &begin, &there) || begin > address || address - begin >= there) {
        return nbytes;
    }
    return std::min(nbytes, there - (address - begin));
}

}  // namespace tl
