#include "backends.hpp"

#include <sys/stat.h>

#include "readers/reader.hpp"

namespace tl {
namespace {

constexpr const char *kBackendNames[TL_BACKEND_COUNT] = {"AUTO", "PREAD", "URING", "MMAP"};
constexpr const char *kPathNames[TL_PATH_COUNT] = {"buffered pread", "direct pread", "direct io_uring",
                                                   "mmap"};

std::string reason(int os_errno) {
    return std::strerror(os_errno);
}

// Direct reads by the given path, if the file allows them; otherwise noted.
bool allow_direct(File *file, int path) {
    const int refusal = file->open_direct();
    if (refusal == 0) {
        file->route.direct_path = path;
        return true;
    }
    if (!file->shortage) file->note(std::string("direct I/O refused at open: ") + reason(refusal));
    return false;
}

void route_by_residency(File *file, bool prefer_uring) {
    Route &route = file->route;
    route.cached_path = TL_PATH_PREAD_BUFFERED;
    struct stat status;
    file->residency = fstat(file->plain_fd, &status) == 0 ? Residency::detect(file->plain_fd, status)
                                                          : Residency::Method::kUnknown;
    if (file->residency == Residency::Method::kMemory) return;
    if (file->residency == Residency::Method::kUnknown) {
        file->note("the kernel does not tell what is cached: all reads are buffered");
        return;
    }
    // Whether the machine allows io_uring shows at the first read that needs it.
    const bool uring = prefer_uring && backend_not_built(TL_BACKEND_URING) == nullptr;
    route.by_residency = allow_direct(file, uring ? TL_PATH_URING_DIRECT : TL_PATH_PREAD_DIRECT);
}

// Why the back end cannot read this file; empty if it can, with the route set.
std::string try_backend(File *file, uint32_t backend) {
    file->route = Route{};
    file->route.backend = static_cast<int>(backend);
    switch (backend) {
        case TL_BACKEND_AUTO:
        case TL_BACKEND_PREAD:
            route_by_residency(file, backend == TL_BACKEND_AUTO);
            return {};
        case TL_BACKEND_URING: {
            if (const char *why = backend_not_built(backend)) return why;
            const int refusal = file->open_direct();
            if (refusal != 0) return "direct I/O refused at open: " + reason(refusal);
            file->route.direct_path = TL_PATH_URING_DIRECT;
            return {};
        }
        case TL_BACKEND_MMAP: {
            char byte;
            const iovec buffer{&byte, 1};
            const int64_t got = mmap_copy(*file, &buffer, 1, 0);
            if (got < 0) return "map or process_vm_readv refused: " + reason(static_cast<int>(-got));
            file->route.cached_path = TL_PATH_MMAP;
            return {};
        }
        default:
            return "unknown back end";
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
    if (backend == TL_BACKEND_URING) return "liburing was not there when the library was built";
#endif
    return nullptr;
}

Failure choose_route(File *file, const uint32_t *backends, size_t count) {
    for (; file->candidate < count; file->candidate++) {
        const uint32_t backend = backends[file->candidate];
        const std::string why = try_backend(file, backend);
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

Failure drop_path(File *file, int path, const std::string &why, const uint32_t *backends, size_t count) {
    Route &route = file->route;
    if (route.cached_path != path && route.direct_path != path) return {};  // another thread was first
    const std::string what = std::string(path_name(path)) + " refused: " + why;
    if (route.by_residency && path == TL_PATH_URING_DIRECT) {
        file->note(what);
        route.direct_path = TL_PATH_PREAD_DIRECT;
        return {};
    }
    if (route.by_residency && path == TL_PATH_PREAD_DIRECT) {
        file->note(what);
        route.direct_path = -1;
        route.by_residency = false;
        return {};
    }
    file->note(std::string(backend_name(route.backend)) + ": " + what);
    file->candidate++;
    return choose_route(file, backends, count);
}

}  // namespace tl
