// The entry points of libcuda.so.1 (CUDA driver API, cuda.h) that the engine uses.
#include "entry.hpp"

#include <cstddef>
#include <cstdint>

using namespace standin;

namespace {

// Device of the context that is current on this thread, -1 for none: as with the driver a thread starts without one, and
// what needs one is refused. Initial-exec: the thread sanitizer of GCC 12
// fails on other thread-local variables of libraries opened at run time.
thread_local int current_device __attribute__((tls_model("initial-exec"))) = -1;

std::uintptr_t context_of(int device) {
    return 0xC0DE0000u + static_cast<unsigned>(device) + 1;
}

int need_context() {
    return current_device < 0 ? kInvalidContext : kSuccess;
}

}  // namespace

#define NEED_CONTEXT()                        \
    if (const int missing = need_context()) { \
        return missing;                       \
    }

const char *const standin::kEntries[] = {"cuInit",
                                         "cuDriverGetVersion",
                                         "cuDeviceGetCount",
                                         "cuDeviceGet",
                                         "cuDevicePrimaryCtxRetain",
                                         "cuDevicePrimaryCtxRelease_v2",
                                         "cuCtxSetCurrent",
                                         "cuCtxGetCurrent",
                                         "cuMemHostRegister_v2",
                                         "cuMemHostUnregister",
                                         "cuStreamCreate",
                                         "cuStreamDestroy_v2",
                                         "cuStreamSynchronize",
                                         "cuStreamWaitEvent",
                                         "cuEventCreate",
                                         "cuEventDestroy_v2",
                                         "cuEventRecord",
                                         "cuEventSynchronize",
                                         "cuEventQuery",
                                         "cuMemGetAddressRange_v2",
                                         "cuMemcpyHtoDAsync_v2",
                                         "cuMemcpyDtoHAsync_v2",
                                         "cuMemcpyDtoDAsync_v2",
                                         "cuIpcGetMemHandle",
                                         "cuIpcOpenMemHandle_v2",
                                         "cuIpcCloseMemHandle",
                                         nullptr};

STANDIN_ENTRY int cuInit(unsigned) {
    if (const int injected = enter("cuInit")) {
        return injected;
    }
    initialise();
    return kSuccess;
}

STANDIN_ENTRY int cuDriverGetVersion(int *version) {
    if (const int injected = enter("cuDriverGetVersion")) {
        return injected;
    }
    *version = 12000;
    return kSuccess;
}

STANDIN_ENTRY int cuDeviceGetCount(int *count) {
    STANDIN_ENTER(cuDeviceGetCount);
    *count = device_count();
    return kSuccess;
}

STANDIN_ENTRY int cuDeviceGet(int *device, int ordinal) {
    STANDIN_ENTER(cuDeviceGet);
    if (ordinal < 0 || ordinal >= device_count()) {
        return kInvalidDevice;
    }
    *device = ordinal;
    return kSuccess;
}

STANDIN_ENTRY int cuDevicePrimaryCtxRetain(std::uintptr_t *context, int device) {
    STANDIN_ENTER(cuDevicePrimaryCtxRetain);
    if (device < 0 || device >= device_count()) {
        return kInvalidDevice;
    }
    *context = context_of(device);
    retain_context(1);
    return kSuccess;
}

STANDIN_ENTRY int cuDevicePrimaryCtxRelease_v2(int) {
    STANDIN_NEVERTHELESS(cuDevicePrimaryCtxRelease_v2, (retain_context(-1), kSuccess));
}

STANDIN_ENTRY int cuCtxSetCurrent(std::uintptr_t context) {
    STANDIN_ENTER(cuCtxSetCurrent);
    if (context == 0) {
        current_device = -1;
        return kSuccess;
    }
    for (int device = 0; device < device_count(); ++device) {
        if (context_of(device) == context) {
            current_device = device;
            return kSuccess;
        }
    }
    return kInvalidContext;
}

STANDIN_ENTRY int cuCtxGetCurrent(std::uintptr_t *context) {
    STANDIN_ENTER(cuCtxGetCurrent);
    *context = current_device < 0 ? 0 : context_of(current_device);
    return kSuccess;
}

STANDIN_ENTRY int cuMemHostRegister_v2(void *address, std::size_t nbytes, unsigned) {
    STANDIN_ENTER(cuMemHostRegister_v2);
    NEED_CONTEXT();
    return register_memory(address, nbytes);
}

STANDIN_ENTRY int cuMemHostUnregister(void *address) {
    STANDIN_NEVERTHELESS(cuMemHostUnregister,
                         current_device < 0 ? kInvalidContext : unregister_memory(address));
}

STANDIN_ENTRY int cuStreamCreate(std::uint64_t *stream, unsigned flags) {
    STANDIN_ENTER(cuStreamCreate);
    NEED_CONTEXT();
    return stream_create(stream, flags);
}

STANDIN_ENTRY int cuStreamDestroy_v2(std::uint64_t stream) {
    STANDIN_NEVERTHELESS(cuStreamDestroy_v2, current_device < 0 ? kInvalidContext : stream_destroy(stream));
}

STANDIN_ENTRY int cuStreamSynchronize(std::uint64_t stream) {
    STANDIN_NEVERTHELESS(cuStreamSynchronize,
                         current_device < 0 ? kInvalidContext : stream_synchronize(stream));
}

STANDIN_ENTRY int cuStreamWaitEvent(std::uint64_t stream, std::uint64_t event, unsigned) {
    STANDIN_ENTER(cuStreamWaitEvent);
    NEED_CONTEXT();
    return stream_wait_event(stream, event);
}

STANDIN_ENTRY int cuEventCreate(std::uint64_t *event, unsigned) {
    STANDIN_ENTER(cuEventCreate);
    NEED_CONTEXT();
    return event_create(event);
}

STANDIN_ENTRY int cuEventDestroy_v2(std::uint64_t event) {
    STANDIN_NEVERTHELESS(cuEventDestroy_v2, current_device < 0 ? kInvalidContext : event_destroy(event));
}

STANDIN_ENTRY int cuEventRecord(std::uint64_t event, std::uint64_t stream) {
    STANDIN_ENTER(cuEventRecord);
    NEED_CONTEXT();
    return event_record(event, stream);
}

STANDIN_ENTRY int cuEventSynchronize(std::uint64_t event) {
    STANDIN_NEVERTHELESS(cuEventSynchronize, current_device < 0 ? kInvalidContext : event_synchronize(event));
}

STANDIN_ENTRY int cuEventQuery(std::uint64_t event) {
    STANDIN_ENTER(cuEventQuery);
    NEED_CONTEXT();
    return event_query(event);
}

STANDIN_ENTRY int cuMemGetAddressRange_v2(std::uint64_t *begin, std::size_t *nbytes, std::uint64_t address) {
    STANDIN_ENTER(cuMemGetAddressRange_v2);
    NEED_CONTEXT();
    return address_range(address, begin, nbytes);
}

STANDIN_ENTRY int cuMemcpyHtoDAsync_v2(std::uint64_t destination, const void *source, std::size_t nbytes,
                                       std::uint64_t stream) {
    STANDIN_ENTER(cuMemcpyHtoDAsync_v2);
    NEED_CONTEXT();
    return copy_to_device(destination, source, nbytes, stream);
}

STANDIN_ENTRY int cuMemcpyDtoHAsync_v2(void *destination, std::uint64_t source, std::size_t nbytes,
                                       std::uint64_t stream) {
    STANDIN_ENTER(cuMemcpyDtoHAsync_v2);
    NEED_CONTEXT();
    return copy_to_host(destination, source, nbytes, stream);
}

STANDIN_ENTRY int cuMemcpyDtoDAsync_v2(std::uint64_t destination, std::uint64_t source, std::size_t nbytes,
                                       std::uint64_t stream) {
    STANDIN_ENTER(cuMemcpyDtoDAsync_v2);
    NEED_CONTEXT();
    return copy_on_device(destination, source, nbytes, stream);
}

STANDIN_ENTRY int cuIpcGetMemHandle(IpcHandle *handle, std::uint64_t address) {
    STANDIN_ENTER(cuIpcGetMemHandle);
    NEED_CONTEXT();
    return ipc_export(address, handle);
}

STANDIN_ENTRY int cuIpcOpenMemHandle_v2(std::uint64_t *address, IpcHandle handle, unsigned) {
    STANDIN_ENTER(cuIpcOpenMemHandle_v2);
    NEED_CONTEXT();
    return ipc_open(handle, address);
}

STANDIN_ENTRY int cuIpcCloseMemHandle(std::uint64_t address) {
    STANDIN_NEVERTHELESS(cuIpcCloseMemHandle, ipc_close(address));
}

STANDIN_ENTRY int cuGetErrorName(int code, const char **text) {
    *text = error_name(code);
    return kSuccess;
}

STANDIN_ENTRY int cuGetErrorString(int code, const char **text) {
    *text = code == kSuccess ? "no error" : "an error of the stand-in driver";
    return kSuccess;
}
