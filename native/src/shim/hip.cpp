// libamdhip64. Signatures and constants as in HIP's runtime API reference. Not run on hardware so far.
#include "shim/driver.hpp"
#include "shim/library.hpp"

namespace tl {
namespace {

constexpr unsigned kStreamNonBlocking = 1;    // hipStreamNonBlocking
constexpr unsigned kEventBlockingNoTime = 3;  // hipEventBlockingSync | hipEventDisableTiming
constexpr unsigned kIpcPeers = 1;             // hipIpcMemLazyEnablePeerAccess

class Hip final : public Driver {
public:
    Hip() : library_({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"}) {
        library_.find(init_, "hipInit");
        library_.find(count_, "hipGetDeviceCount");
        library_.find(set_, "hipSetDevice");
        library_.find(get_, "hipGetDevice");
        library_.find(register_, "hipHostRegister");
        library_.find(unregister_, "hipHostUnregister");
        library_.find(stream_create_, "hipStreamCreateWithFlags");
        library_.find(stream_destroy_, "hipStreamDestroy");
        library_.find(stream_synchronize_, "hipStreamSynchronize");
        library_.find(stream_wait_, "hipStreamWaitEvent");
        library_.find(event_create_, "hipEventCreateWithFlags");
        library_.find(event_destroy_, "hipEventDestroy");
        library_.find(event_record_, "hipEventRecord");
        library_.find(event_synchronize_, "hipEventSynchronize");
        library_.find(range_, "hipMemGetAddressRange");
        library_.find(copy_, "hipMemcpyHtoDAsync");
        library_.find(copy_back_, "hipMemcpyDtoHAsync");
        library_.find(copy_inside_, "hipMemcpyDtoDAsync");
        library_.find(ipc_get_, "hipIpcGetMemHandle");
        library_.find(ipc_open_, "hipIpcOpenMemHandle");
        library_.find(ipc_close_, "hipIpcCloseMemHandle");
        library_.find(error_name_, "hipGetErrorName");
    }

    const std::string &why() const {
        return library_.why();
    }

    Failure device_count(int *count) override {
        Failure f = check(init_(0), "hipInit");
        return f ? f : check(count_(count), "hipGetDeviceCount");
    }

    // HIP has one context a device, which is made by its first use and stays.
    Failure retain(int) override {
        return {};
    }
    void release(int) override {}

    Failure bind(int device, void **previous) override {
        if (previous) {
            int current = 0;
            if (Failure f = check(get_(&current), "hipGetDevice")) return f;
            *previous = reinterpret_cast<void *>(static_cast<intptr_t>(current));
        }
        return check(set_(device), "hipSetDevice");
    }
    void restore(void *previous) override {
        set_(static_cast<int>(reinterpret_cast<intptr_t>(previous)));
    }

    Failure register_host(void *address, uint64_t nbytes) override {
        return check(register_(address, nbytes, 0), "hipHostRegister");
    }
    Failure unregister_host(void *address) override {
        return check(unregister_(address), "hipHostUnregister");
    }
    Failure stream_create(Stream *stream) override {
        return check(stream_create_(stream, kStreamNonBlocking), "hipStreamCreateWithFlags");
    }
    Failure stream_destroy(Stream stream) override {
        return check(stream_destroy_(stream), "hipStreamDestroy");
    }
    Failure stream_synchronize(Stream stream) override {
        return check(stream_synchronize_(stream), "hipStreamSynchronize");
    }
    Failure stream_wait(Stream stream, Event event) override {
        return check(stream_wait_(stream, event, 0), "hipStreamWaitEvent");
    }
    Failure event_create(Event *event) override {
        return check(event_create_(event, kEventBlockingNoTime), "hipEventCreateWithFlags");
    }
    Failure event_destroy(Event event) override {
        return check(event_destroy_(event), "hipEventDestroy");
    }
    Failure event_record(Event event, Stream stream) override {
        return check(event_record_(event, stream), "hipEventRecord");
    }
    Failure event_synchronize(Event event) override {
        return check(event_synchronize_(event), "hipEventSynchronize");
    }
    Failure address_range(uint64_t address, uint64_t *begin, uint64_t *nbytes) override {
        return check(range_(begin, nbytes, address), "hipMemGetAddressRange");
    }
    Failure copy_to_device(uint64_t destination, const void *source, uint64_t nbytes,
                           Stream stream) override {
        return check(copy_(reinterpret_cast<void *>(destination), const_cast<void *>(source), nbytes, stream),
                     "hipMemcpyHtoDAsync");
    }
    Failure copy_to_host(void *destination, uint64_t source, uint64_t nbytes, Stream stream) override {
        return check(copy_back_(destination, reinterpret_cast<void *>(source), nbytes, stream),
                     "hipMemcpyDtoHAsync");
    }
    Failure copy_on_device(uint64_t destination, uint64_t source, uint64_t nbytes, Stream stream) override {
        return check(copy_inside_(reinterpret_cast<void *>(destination), reinterpret_cast<void *>(source),
                                  nbytes, stream),
                     "hipMemcpyDtoDAsync");
    }
    Failure ipc_export(uint64_t address, IpcHandle *handle) override {
        return check(ipc_get_(handle, reinterpret_cast<void *>(address)), "hipIpcGetMemHandle");
    }
    Failure ipc_open(const IpcHandle &handle, uint64_t *address) override {
        void *found = nullptr;
        if (Failure f = check(ipc_open_(&found, handle, kIpcPeers), "hipIpcOpenMemHandle")) return f;
        *address = reinterpret_cast<uint64_t>(found);
        return {};
    }
    Failure ipc_close(uint64_t address) override {
        return check(ipc_close_(reinterpret_cast<void *>(address)), "hipIpcCloseMemHandle");
    }

private:
    Failure check(int code, const char *call) {
        if (code == 0) return {};
        return driver_failure(call, code, error_name_(code));
    }

    Library library_;
    int (*init_)(unsigned) = nullptr;
    int (*count_)(int *) = nullptr;
    int (*set_)(int) = nullptr;
    int (*get_)(int *) = nullptr;
    int (*register_)(void *, size_t, unsigned) = nullptr;
    int (*unregister_)(void *) = nullptr;
    int (*stream_create_)(Stream *, unsigned) = nullptr;
    int (*stream_destroy_)(Stream) = nullptr;
    int (*stream_synchronize_)(Stream) = nullptr;
    int (*stream_wait_)(Stream, Event, unsigned) = nullptr;
    int (*event_create_)(Event *, unsigned) = nullptr;
    int (*event_destroy_)(Event) = nullptr;
    int (*event_record_)(Event, Stream) = nullptr;
    int (*event_synchronize_)(Event) = nullptr;
    int (*range_)(uint64_t *, uint64_t *, uint64_t) = nullptr;
    int (*copy_)(void *, void *, size_t, Stream) = nullptr;
    int (*copy_back_)(void *, void *, size_t, Stream) = nullptr;
    int (*copy_inside_)(void *, void *, size_t, Stream) = nullptr;
    int (*ipc_get_)(IpcHandle *, void *) = nullptr;
    int (*ipc_open_)(void **, IpcHandle, unsigned) = nullptr;
    int (*ipc_close_)(void *) = nullptr;
    const char *(*error_name_)(int) = nullptr;
};

}  // namespace

Driver *hip_driver(Failure *why) {
    return opened_once<Hip>("ROCm", why);
}

}  // namespace tl
