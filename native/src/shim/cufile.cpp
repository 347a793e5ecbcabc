// libcufile.so.0. Signatures, structures and codes as in the reference of the cuFile API (cufile.h).
#include "shim/cufile.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "descriptor.hpp"
#include "file.hpp"
#include "shim/library.hpp"

namespace tl {
namespace {

// CUfileError_t. err: CUfileOpError; cu_err: CUresult, where err says that CUDA failed.
struct Status {
    int err;
    int cu_err;
};

// CUfileDescr_t
struct FileDescription {
    int type;
    union {
        int fd;
        void *handle;
    };
    const void *fs_ops;
};

constexpr int kOpaqueFd = 1;         // CU_FILE_HANDLE_TYPE_OPAQUE_FD
constexpr int kFirstError = 5001;    // CUFILEOP_BASE_ERR + 1
constexpr int kCudaError = 5011;     // CU_FILE_CUDA_DRIVER_ERROR
constexpr int kAlreadyOpen = 5026;   // CU_FILE_DRIVER_ALREADY_OPEN: by another library of this process
constexpr int kFirstDescriptor = 3;  // after stdin, stdout, stderr

// CUfileOpError from 5001 on; its text is made in cufile.h, so that the library has none.
constexpr const char *kErrors[] = {"DRIVER_NOT_INITIALIZED",
                                   "DRIVER_INVALID_PROPS",
                                   "DRIVER_UNSUPPORTED_LIMIT",
                                   "DRIVER_VERSION_MISMATCH",
                                   "DRIVER_VERSION_READ_ERROR",
                                   "DRIVER_CLOSING",
                                   "PLATFORM_NOT_SUPPORTED",
                                   "IO_NOT_SUPPORTED",
                                   "DEVICE_NOT_SUPPORTED",
                                   "NVFS_DRIVER_ERROR",
                                   "CUDA_DRIVER_ERROR",
                                   "CUDA_POINTER_INVALID",
                                   "CUDA_MEMORY_TYPE_INVALID",
                                   "CUDA_POINTER_RANGE_ERROR",
                                   "CUDA_CONTEXT_MISMATCH",
                                   "INVALID_MAPPING_SIZE",
                                   "INVALID_MAPPING_RANGE",
                                   "INVALID_FILE_TYPE",
                                   "INVALID_FILE_OPEN_FLAG",
                                   "DIO_NOT_SET",
                                   "5021",
                                   "INVALID_VALUE",
                                   "MEMORY_ALREADY_REGISTERED",
                                   "MEMORY_NOT_REGISTERED",
                                   "PERMISSION_DENIED",
                                   "DRIVER_ALREADY_OPEN",
                                   "HANDLE_NOT_REGISTERED",
                                   "HANDLE_ALREADY_REGISTERED",
                                   "DEVICE_NOT_FOUND",
                                   "INTERNAL_ERROR",
                                   "GETNEWFD_FAILED",
                                   "5032",
                                   "NVFS_SETUP_ERROR",
                                   "IO_DISABLED",
                                   "BATCH_SUBMIT_FAILED",
                                   "GPU_MEMORY_PINNING_FAILED"};

std::string answered(const char *call, int code) {
    const int at = code - kFirstError;
    const bool known = at >= 0 && at < static_cast<int>(std::size(kErrors));
    return std::string(call) + " answered " + (known ? std::string("CU_FILE_") + kErrors[at] : "error") +
           " (" + std::to_string(code) + ")";
}

std::string answered(const char *call, const Status &status) {
    std::string text = answered(call, status.err);
    if (status.err == kCudaError) text += ", CUDA's error " + std::to_string(status.cu_err);
    return text;
}

class Cufile {
public:
    Cufile() : library_({"libcufile.so.0"}) {
        library_.find(driver_open_, "cuFileDriverOpen");
        library_.find(register_, "cuFileHandleRegister");
        library_.find(deregister_, "cuFileHandleDeregister");
        library_.find(read_, "cuFileRead");
    }

    const std::string &why() const {
        return library_.why();
    }

    // A refusal is not kept: what is missing now may be there later.
    std::string open_driver() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (driver_is_open_) return {};
        const Status status = driver_open_();
        if (status.err != 0 && status.err != kAlreadyOpen) return answered("cuFileDriverOpen", status);
        driver_is_open_ = true;
        return {};
    }

    std::string open(int fd, void **handle) {
        FileDescription description{};
        description.type = kOpaqueFd;
        description.fd = fd;
        const Status status = register_(handle, &description);
        return status.err == 0 ? std::string() : answered("cuFileHandleRegister", status);
    }

    void close(void *handle) {
        deregister_(handle);
    }

    ssize_t read(void *handle, char *destination, uint64_t nbytes, uint64_t offset) {
        return read_(handle, destination, nbytes, static_cast<off_t>(offset), 0);
    }

private:
    Library library_;
    std::mutex mutex_;
    bool driver_is_open_ = false;
    Status (*driver_open_)() = nullptr;
    Status (*register_)(void **, FileDescription *) = nullptr;
    void (*deregister_)(void *) = nullptr;
    ssize_t (*read_)(void *, void *, size_t, off_t, off_t) = nullptr;
};

Cufile *cufile(Failure *why) {
    return opened_once<Cufile>("cuFile", why);
}

// Where there is a handle, the library is open.
Cufile *cufile() {
    Failure why;
    return cufile(&why);
}

}  // namespace

std::string cufile_driver_refusal() {
    Failure why;
    Cufile *library = cufile(&why);
    return library ? library->open_driver() : why.message;
}

bool nvidia_fs_loaded() {
    return access("/proc/driver/nvidia-fs", F_OK) == 0;
}

std::string CufileHandle::open(int fd, int *shortage) {
    Descriptor own(fcntl(fd, F_DUPFD_CLOEXEC, kFirstDescriptor));
    if (own.get() < 0) {
        if (no_descriptors(errno)) *shortage = errno;
        return std::strerror(errno);
    }
    void *handle = nullptr;
    std::string why = cufile()->open(own.get(), &handle);
    if (!why.empty()) return why;
    close();
    handle_ = handle;
    fd_ = own.take();
    return {};
}

int64_t CufileHandle::read(char *destination, uint64_t nbytes, uint64_t offset, std::string *why) const {
    const ssize_t got = cufile()->read(handle_, destination, nbytes, offset);
    if (got == -1) {
        *why = std::string("cuFileRead answered -1: ") + std::strerror(errno);
    } else if (got < 0) {
        *why = answered("cuFileRead", static_cast<int>(-got));
    }
    return got;
}

void CufileHandle::close() {
    if (fd_ < 0) return;
    cufile()->close(handle_);
    ::close(fd_);
    handle_ = nullptr;
    fd_ = -1;
}

}  // namespace tl
