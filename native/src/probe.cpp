// One small read, to see whether a way of reading works on a file.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "engine.hpp"

namespace tl {

Failure probe(const tl_options &options, const char *path) {
    struct stat status;
    if (stat(path, &status) != 0) return os_failure(TL_ERR_OPEN, errno, "cannot ask about the file");
    alignas(kPage) char page[kPage];
    Engine engine(options);
    if (Failure f = engine.start()) return f;
    int32_t file = 0;
    uint64_t ticket = 0;
    const auto nbytes = static_cast<uint64_t>(status.st_size);
    if (Failure f = engine.add_file(path, status.st_dev, status.st_ino, nbytes, &file)) return f;
    const tl_piece piece{0, std::min(kPage, nbytes), reinterpret_cast<uint64_t>(page), file, 0};
    if (Failure f = engine.submit(&piece, 1, nullptr, &ticket)) return f;
    for (;;) {
        Failure f = engine.wait(ticket, 1000);
        if (f.status != TL_PENDING) return f;
    }
}

}  // namespace tl
