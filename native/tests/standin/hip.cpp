// The entry points of libamdhip64.so (HIP runtime API, hip_runtime_api.h) that the engine uses. HIP needs no
// initialisation and no context: each thread has a current device, which is 0 at first.
#include "entry.hpp"

#include <cstddef>
#include <cstdint>

using namespace standin;

namespace {

thread_local int current_device __attribute__((tls_model("initial-exec"))) = 0;

#define HIP_ENTER(name)                      \
    if (const int injected = enter(#name)) { \
        return injected;                     \
    }

}  // namespace

const char *const standin::kEntries[] = {"hipInit",
                                         "hipGetDeviceCount",
                                         "hipSetDevice",
                                         "hipGetDevice",
                                         "hipHostRegister",
                                         "hipHostUnregister",
                                         "hipStreamCreateWithFlags",
                                         "hipStreamDestroy",
                                         "hipStreamSynchronize",
                                         "hipStreamWaitEvent",
                                         "hipEventCreateWithFlags",
                                         "hipEventDestroy",
                                         "hipEventRecord",
                                         "hipEventSynchronize",
                                         "hipEventQuery",
                                         "hipMemGetAddressRange",
                                         "hipMemcpyHtoDAsync",
                                         "hipMemcpyDtoHAsync",
                                         "hipMemcpyDtoDAsync",
                                         "hipIpcGetMemHandle",
                                         "hipIpcOpenMemHandle",
                                         "hipIpcCloseMemHandle",
                                         nullptr};

STANDIN_ENTRY int hipInit(unsigned) {
    HIP_ENTER(hipInit);
    initialise();
    return kSuccess;
}

STANDIN_ENTRY int hipGetDeviceCount(int *count) {
    HIP_ENTER(hipGetDeviceCount);
    *count = device_count();
    return kSuccess;
}

STANDIN_ENTRY int hipSetDevice(int device) {
    HIP_ENTER(hipSetDevice);
    if (device < 0 || device >= device_count()) {
        return kInvalidDevice;
    }
    current_device = device;
    return kSuccess;
}

STANDIN_ENTRY int hipGetDevice(int *device) {
    HIP_ENTER(hipGetDevice);
    *device = current_device;
    return kSuccess;
}

STANDIN_ENTRY int hipHostRegister(void *address, std::size_t nbytes, unsigned) {
    HIP_ENTER(hipHostRegister);
    return register_memory(address, nbytes);
}

STANDIN_ENTRY int hipHostUnregister(void *address) {
    STANDIN_NEVERTHELESS(hipHostUnregister, unregister_memory(address));
}

STANDIN_ENTRY int hipStreamCreateWithFlags(std::uint64_t *stream, unsigned flags) {
    HIP_ENTER(hipStreamCreateWithFlags);
    return stream_create(stream, flags);
}

STANDIN_ENTRY int hipStreamDestroy(std::uint64_t stream) {
    STANDIN_NEVERTHELESS(hipStreamDestroy, stream_destroy(stream));
}

STANDIN_ENTRY int hipStreamSynchronize(std::uint64_t stream) {
    STANDIN_NEVERTHELESS(hipStreamSynchronize, stream_synchronize(stream));
}

STANDIN_ENTRY int hipStreamWaitEvent(std::uint64_t stream, std::uint64_t event, unsigned) {
    HIP_ENTER(hipStreamWaitEvent);
    return stream_wait_event(stream, event);
}

STANDIN_ENTRY int hipEventCreateWithFlags(std::uint64_t *event, unsigned) {
    HIP_ENTER(hipEventCreateWithFlags);
    return event_create(event);
}

STANDIN_ENTRY int hipEventDestroy(std::uint64_t event) {
    STANDIN_NEVERTHELESS(hipEventDestroy, event_destroy(event));
}

STANDIN_ENTRY int hipEventRecord(std::uint64_t event, std::uint64_t stream) {
    HIP_ENTER(hipEventRecord);
    return event_record(event, stream);
}

STANDIN_ENTRY int hipEventSynchronize(std::uint64_t event) {
    STANDIN_NEVERTHELESS(hipEventSynchronize, event_synchronize(event));
}

STANDIN_ENTRY int hipEventQuery(std::uint64_t event) {
    HIP_ENTER(hipEventQuery);
    return event_query(event);
}

STANDIN_ENTRY int hipMemGetAddressRange(std::uint64_t *begin, std::size_t *nbytes, std::uint64_t address) {
    HIP_ENTER(hipMemGetAddressRange);
    return address_range(address, begin, nbytes);
}

STANDIN_ENTRY int hipMemcpyHtoDAsync(std::uint64_t destination, const void *source, std::size_t nbytes,
                                     std::uint64_t stream) {
    HIP_ENTER(hipMemcpyHtoDAsync);
    return copy_to_device(destination, source, nbytes, stream);
}

STANDIN_ENTRY int hipMemcpyDtoHAsync(void *destination, std::uint64_t source, std::size_t nbytes,
                                     std::uint64_t stream) {
    HIP_ENTER(hipMemcpyDtoHAsync);
    return copy_to_host(destination, source, nbytes, stream);
}

STANDIN_ENTRY int hipMemcpyDtoDAsync(std::uint64_t destination, std::uint64_t source, std::size_t nbytes,
                                     std::uint64_t stream) {
    HIP_ENTER(hipMemcpyDtoDAsync);
    return copy_on_device(destination, source, nbytes, stream);
}

STANDIN_ENTRY int hipIpcGetMemHandle(IpcHandle *handle, std::uint64_t address) {
    HIP_ENTER(hipIpcGetMemHandle);
    return ipc_export(address, handle);
}

STANDIN_ENTRY int hipIpcOpenMemHandle(std::uint64_t *address, IpcHandle handle, unsigned) {
    HIP_ENTER(hipIpcOpenMemHandle);
    return ipc_open(handle, address);
}

STANDIN_ENTRY int hipIpcCloseMemHandle(std::uint64_t address) {
    STANDIN_NEVERTHELESS(hipIpcCloseMemHandle, ipc_close(address));
}

STANDIN_ENTRY const char *hipGetErrorName(int code) {
    return error_name(code);
}

STANDIN_ENTRY const char *hipGetErrorString(int code) {
    return code == kSuccess ? "no error" : "an error of the stand-in driver";
}
