#include "backends.hpp"

#include <sys/stat.h>

namespace tl {
namespace {

constexpr const char *kBackendNames[TL_BACKEND_COUNT] = {
    "AUTO", "PREAD", "URING", "MMAP", "URING_BUFFERED", "AIO", "AIO_BUFFERED", "BUFFERED", "CUFILE"};
constexpr const char *kPathNames[TL_PATH_COUNT] = {
    "buffered pread",    "direct pread", "direct io_uring", "mmap",
    "buffered io_uring", "direct AIO",   "buffered AIO",    "cuFile"};

// The one deep path of a back end that reads everything by it; -1 for the others.
int only_path(uint32_t backend) {
    switch (backend) {
        case TL_BACKEND_URING:
            return TL_PATH_URING_DIRECT;
        case TL_BACKEND_URING_BUFFERED:
            return TL_PATH_URING_BUFFERED;
        case TL_BACKEND_AIO:
            return TL_PATH_AIO_DIRECT;
        case TL_BACKEND_AIO_BUFFERED:
            return TL_PATH_AIO_BUFFERED;
        default:
            return -1;
    }
}

std::string reason(int os_errno) {
    return std::strerror(os_errno);
}

// For reads that are to wait for storage: direct by the given path if the file allows it, else through the cache.
int path_for_missing(File *file, int direct_path) {
    if (direct_path < 0) return TL_PATH_PREAD_BUFFERED;
    const int refusal = file->open_direct();
    if (refusal == 0) return direct_path;
    if (!file->shortage) file->note("direct I/O refused: " + reason(refusal));
    return TL_PATH_PREAD_BUFFERED;
}

// direct_path: for what is not cached; -1 to go through the cache with it too.
void route_by_residency(File *file, int direct_path) {
    Route &route = file->route;
    struct stat status;
    file->residency = fstat(file->plain_fd, &status) == 0 ? Residency::detect(file->plain_fd, status)
                                                          : Residency::Method::kUnknown;
    if (file->residency == Residency::Method::kMemory) {
        route.cached_path = TL_PATH_PREAD_BUFFERED;
    } else if (file->residency == Residency::Method::kUnknown) {
        file->note("the kernel does not tell what is cached: all reads are buffered");
        route.deep_path = TL_PATH_PREAD_BUFFERED;
    } else {
        route.cached_path = TL_PATH_PREAD_BUFFERED;
        route.deep_path = path_for_missing(file, direct_path);
        route.by_residency = true;
    }
}

// Tried without a read: what that refuses leads to the next back end as well.
std::string try_cufile(File *file, int32_t device_kind) {
    if (device_kind != TL_DEVICE_CUDA) return "cuFile reads to the memory of CUDA devices alone";
    std::string why = cufile_driver_refusal();
    if (why.empty()) why = file->open_cufile();
    if (!why.empty()) return why;
    if (!nvidia_fs_loaded()) {
        file->note(
            "CUFILE: nvidia-fs is not loaded: cuFile reads in compatibility mode, through host memory");
    }
    file->route.deep_path = TL_PATH_CUFILE;
    file->route.cached_path = TL_PATH_PREAD_BUFFERED;  // what has to be digested, see Engine::fetch_range
    return {};
}

// Why the back end cannot read this file; empty if it can, with the route set.
std::string try_backend(File *file, uint32_t backend, int32_t device_kind) {
    file->route = Route{};
    file->route.backend = static_cast<int>(backend);
    if (const char *why = backend_not_built(backend)) return why;
    switch (backend) {
        case TL_BACKEND_AUTO: {
            // Whether the machine allows io_uring shows at the first read that needs it.
            const bool uring = backend_not_built(TL_BACKEND_URING) == nullptr;
            route_by_residency(file, uring ? TL_PATH_URING_DIRECT : TL_PATH_PREAD_DIRECT);
            return {};
        }
        case TL_BACKEND_PREAD:
            route_by_residency(file, TL_PATH_PREAD_DIRECT);
            return {};
        case TL_BACKEND_BUFFERED:
            route_by_residency(file, -1);
            return {};
        case TL_BACKEND_MMAP: {
            char byte;
            const iovec buffer{&byte, 1};
            const int64_t got = mmap_copy(*file, &buffer, 1, 0);
            if (got < 0) return "map or process_vm_readv refused: " + reason(static_cast<int>(-got));
            file->route.cached_path = TL_PATH_MMAP;
            return {};
        }
        case TL_BACKEND_CUFILE:
            return try_cufile(file, device_kind);
        default: {
            const int path = only_path(backend);
            const int refusal = is_direct(path) ? file->open_direct() : 0;
            if (refusal != 0) return "direct I/O refused: " + reason(refusal);
            file->route.deep_path = path;
            return {};
        }
    }
}

}  // namespace

const char *backend_name(int backend) {
    return backend >= 0 && backend < TL_BACKEND_COUNT ? kBackendNames[backend] : "none";
}

const char *path_name(int path) {
    return path >= 0 && path < TL_PATH_COUNT ? kPathNames[path] : "none";
}

const char *backend_not_built(uint32_t backend) {
    if (backend >= TL_BACKEND_COUNT) return "unknown back end";
#ifndef TL_HAVE_URING
    if (backend == TL_BACKEND_URING || backend == TL_BACKEND_URING_BUFFERED) {
        return "liburing was not there when the library was built";
    }
#endif
    return nullptr;
}

std::unique_ptr<DeepReader> make_deep_reader(RequestSink *sink, int path, const DeepLimits &limits) {
    switch (path) {
        case TL_PATH_URING_DIRECT:
        case TL_PATH_URING_BUFFERED:
            return make_uring(sink, path, limits);
        case TL_PATH_AIO_DIRECT:
        case TL_PATH_AIO_BUFFERED:
            return make_aio(sink, path, limits);
        case TL_PATH_CUFILE:
            return make_cufile(sink, limits);
        default:
            return make_pread(sink, path, limits);
    }
}

Failure choose_route(File *file, const tl_options &options) {
    for (; file->candidate < options.backend_count; file->candidate++) {
        const uint32_t backend = options.backends[file->candidate];
        const std::string why = try_backend(file, backend, options.device_kind);
        if (file->shortage) return file->open_failed(file->shortage);
        if (why.empty()) {
            file->routed = true;
            return {};
        }
        file->note(std::string(backend_name(static_cast<int>(backend))) + ": " + why);
    }
    file->route = Route{};
    Failure f = failure(TL_ERR_BACKEND, file->notes);
    f.file = file->index;
    return f;
}

Failure drop_path(File *file, int path, const std::string &why, const tl_options &options) {
    Route &route = file->route;
    if (route.cached_path != path && route.deep_path != path) return {};  // another thread was first
    const std::string what = std::string(path_name(path)) + " refused: " + why;
    if (route.by_residency && is_direct(path)) {
        file->note(what);
        route.deep_path = path == TL_PATH_URING_DIRECT ? TL_PATH_PREAD_DIRECT : TL_PATH_PREAD_BUFFERED;
        return {};
    }
    file->note(std::string(backend_name(route.backend)) + ": " + what);
    file->candidate++;
    return choose_route(file, options);
}

}  // namespace tl
