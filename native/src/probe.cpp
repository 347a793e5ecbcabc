// One small read, to see whether a way of reading works on a file.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "engine.hpp"

namespace tl {
namespace {

// Without a device's memory to read to: whether its driver opens and takes the file.
Failure probe_cufile(tl_options options, const char *path, const struct stat &status) {
    options.device_kind = TL_DEVICE_CUDA;
    File file(0, path, status.st_dev, status.st_ino, static_cast<uint64_t>(status.st_size));
    if (Failure f = file.open_plain()) return f;
    return choose_route(&file, options);
}

}  // namespace

Failure probe(const tl_options &options, const char *path) {
    struct stat status;
    if (stat(path, &status) != 0) return os_failure(TL_ERR_OPEN, errno, "cannot ask about the file");
    if (options.backends[0] == TL_BACKEND_CUFILE) return probe_cufile(options, path, status);
    alignas(kPage) char page[kPage];
    Engine engine(options);
    if (Failure f = engine.start()) return f;
    int32_t file = 0;
    uint64_t ticket = 0;
    const auto nbytes = static_cast<uint64_t>(status.st_size);
    if (Failure f = engine.add_file(path, status.st_dev, status.st_ino, nbytes, &file)) return f;
    const tl_piece piece{0, std::min(kPage, nbytes), reinterpret_cast<uint64_t>(page), file, 0, 0, 0};
    if (Failure f = engine.submit(&piece, 1, nullptr, &ticket)) return f;
    for (;;) {
        Failure f = engine.wait(ticket, 1000);
        if (f.status != TL_PENDING) return f;
    }
}

}  // namespace tl
