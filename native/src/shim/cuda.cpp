// libcuda.so.1. Signatures and constants as in CUDA's driver API reference.
#include <mutex>
#include <vector>

#include "shim/driver.hpp"
#include "shim/library.hpp"

namespace tl {
namespace {

constexpr unsigned kStreamNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventBlockingNoTime = 3;  // CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
constexpr unsigned kIpcPeers = 1;             // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
using Context = void *;

class Cuda final : public Driver {
public:
    Cuda() : library_({"libcuda.so.1", "libcuda.so"}) {
        library_.find(init_, "cuInit");
        library_.find(count_, "cuDeviceGetCount");
        library_.find(get_, "cuDeviceGet");
        library_.find(retain_, "cuDevicePrimaryCtxRetain");
        library_.find(release_, "cuDevicePrimaryCtxRelease_v2");
        library_.find(context_get_, "cuCtxGetCurrent");
        library_.find(context_set_, "cuCtxSetCurrent");
        library_.find(register_, "cuMemHostRegister_v2");
        library_.find(unregister_, "cuMemHostUnregister");
        library_.find(stream_create_, "cuStreamCreate");
        library_.find(stream_destroy_, "cuStreamDestroy_v2");
        library_.find(stream_synchronize_, "cuStreamSynchronize");
        library_.find(stream_wait_, "cuStreamWaitEvent");
        library_.find(event_create_, "cuEventCreate");
        library_.find(event_destroy_, "cuEventDestroy_v2");
        library_.find(event_record_, "cuEventRecord");
        library_.find(event_synchronize_, "cuEventSynchronize");
        library_.find(range_, "cuMemGetAddressRange_v2");
        library_.find(copy_, "cuMemcpyHtoDAsync_v2");
        library_.find(copy_back_, "cuMemcpyDtoHAsync_v2");
        library_.find(copy_inside_, "cuMemcpyDtoDAsync_v2");
        library_.find(ipc_get_, "cuIpcGetMemHandle");
        library_.find(ipc_open_, "cuIpcOpenMemHandle_v2");
        library_.find(ipc_close_, "cuIpcCloseMemHandle");
        library_.find(error_name_, "cuGetErrorName");
    }

    const std::string &why() const {
        return library_.why();
    }

    Failure device_count(int *count) override {
        Failure f = check(init_(0), "cuInit");
        return f ? f : check(count_(count), "cuDeviceGetCount");
    }

    Failure retain(int device) override {
        int handle = 0;
        Context context = nullptr;
        if (Failure f = check(get_(&handle, device), "cuDeviceGet")) return f;
        const auto at = static_cast<size_t>(device);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (devices_.size() <= at) devices_.resize(at + 1);  // before there is what it keeps
        }
        if (Failure f = check(retain_(&context, handle), "cuDevicePrimaryCtxRetain")) return f;
        std::lock_guard<std::mutex> lock(mutex_);
        devices_[at] = {handle, context};
        return {};
    }

    void release(int device) override {
        int handle = 0;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            handle = devices_[static_cast<size_t>(device)].handle;
        }
        release_(handle);
    }

    Failure bind(int device, void **previous) override {
        if (previous) {
            if (Failure f = check(context_get_(previous), "cuCtxGetCurrent")) return f;
        }
        Context context = nullptr;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            context = devices_[static_cast<size_t>(device)].context;
        }
        return check(context_set_(context), "cuCtxSetCurrent");
    }

    void restore(void *previous) override {
        context_set_(previous);
    }

    Failure register_host(void *address, uint64_t nbytes) override {
        return check(register_(address, nbytes, 0), "cuMemHostRegister");
    }
    Failure unregister_host(void *address) override {
        return check(unregister_(address), "cuMemHostUnregister");
    }
    Failure stream_create(Stream *stream) override {
        return check(stream_create_(stream, kStreamNonBlocking), "cuStreamCreate");
    }
    Failure stream_destroy(Stream stream) override {
        return check(stream_destroy_(stream), "cuStreamDestroy");
    }
    Failure stream_synchronize(Stream stream) override {
        return check(stream_synchronize_(stream), "cuStreamSynchronize");
    }
    Failure stream_wait(Stream stream, Event event) override {
        return check(stream_wait_(stream, event, 0), "cuStreamWaitEvent");
    }
    Failure event_create(Event *event) override {
        return check(event_create_(event, kEventBlockingNoTime), "cuEventCreate");
    }
    Failure event_destroy(Event event) override {
        return check(event_destroy_(event), "cuEventDestroy");
    }
    Failure event_record(Event event, Stream stream) override {
        return check(event_record_(event, stream), "cuEventRecord");
    }
    Failure event_synchronize(Event event) override {
        return check(event_synchronize_(event), "cuEventSynchronize");
    }
    Failure address_range(uint64_t address, uint64_t *begin, uint64_t *nbytes) override {
        return check(range_(begin, nbytes, address), "cuMemGetAddressRange");
    }
    Failure copy_to_device(uint64_t destination, const void *source, uint64_t nbytes,
                           Stream stream) override {
        return check(copy_(destination, source, nbytes, stream), "cuMemcpyHtoDAsync");
    }
    Failure copy_to_host(void *destination, uint64_t source, uint64_t nbytes, Stream stream) override {
        return check(copy_back_(destination, source, nbytes, stream), "cuMemcpyDtoHAsync");
    }
    Failure copy_on_device(uint64_t destination, uint64_t source, uint64_t nbytes, Stream stream) override {
        return check(copy_inside_(destination, source, nbytes, stream), "cuMemcpyDtoDAsync");
    }
    Failure ipc_export(uint64_t address, IpcHandle *handle) override {
        return check(ipc_get_(handle, address), "cuIpcGetMemHandle");
    }
    Failure ipc_open(const IpcHandle &handle, uint64_t *address) override {
        unsigned long long found = 0;
        if (Failure f = check(ipc_open_(&found, handle, kIpcPeers), "cuIpcOpenMemHandle")) return f;
        *address = found;
        return {};
    }
    Failure ipc_close(uint64_t address) override {
        return check(ipc_close_(address), "cuIpcCloseMemHandle");
    }

private:
    // Kept from retaining to releasing: giving back must not depend on a call that may fail.
    struct Retained {
        int handle;
        Context context;
    };

    Failure check(int code, const char *call) {
        if (code == 0) return {};
        const char *name = nullptr;
        if (error_name_(code, &name) != 0) name = nullptr;
        return driver_failure(call, code, name);
    }

    Library library_;
    std::mutex mutex_;
    std::vector<Retained> devices_;  // by ordinal
    int (*init_)(unsigned) = nullptr;
    int (*count_)(int *) = nullptr;
    int (*get_)(int *, int) = nullptr;
    int (*retain_)(Context *, int) = nullptr;
    int (*release_)(int) = nullptr;
    int (*context_get_)(Context *) = nullptr;
    int (*context_set_)(Context) = nullptr;
    int (*register_)(void *, size_t, unsigned) = nullptr;
    int (*unregister_)(void *) = nullptr;
    int (*stream_create_)(Stream *, unsigned) = nullptr;
    int (*stream_destroy_)(Stream) = nullptr;
    int (*stream_synchronize_)(Stream) = nullptr;
    int (*range_)(uint64_t *, uint64_t *, uint64_t) = nullptr;
    int (*stream_wait_)(Stream, Event, unsigned) = nullptr;
    int (*event_create_)(Event *, unsigned) = nullptr;
    int (*event_destroy_)(Event) = nullptr;
    int (*event_record_)(Event, Stream) = nullptr;
    int (*event_synchronize_)(Event) = nullptr;
    int (*copy_)(unsigned long long, const void *, size_t, Stream) = nullptr;
    int (*copy_back_)(void *, unsigned long long, size_t, Stream) = nullptr;
    int (*copy_inside_)(unsigned long long, unsigned long long, size_t, Stream) = nullptr;
    int (*ipc_get_)(IpcHandle *, unsigned long long) = nullptr;
    int (*ipc_open_)(unsigned long long *, IpcHandle, unsigned) = nullptr;
    int (*ipc_close_)(unsigned long long) = nullptr;
    int (*error_name_)(int, const char **) = nullptr;
};

}  // namespace

Driver *cuda_driver(Failure *why) {
    return opened_once<Cuda>("CUDA", why);
}

}  // namespace tl
