// Between the C interface and what is behind it: failures into the caller's structures, no exception across.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "common.hpp"

namespace tl {

inline tl_status report(const Failure &f, tl_error *error) {
    if (!error || error->struct_size != sizeof(tl_error)) return f.status;
    error->status = f.status;
    error->os_errno = f.os_errno;
    error->driver_code = f.driver_code;
    error->file = f.file;
    error->offset = f.offset;
    error->wanted = f.wanted;
    error->got = f.got;
    copy_text(error->message, sizeof error->message, f.message);
    return f.status;
}

// Of an exception, whose text may be longer than there is memory for.
inline tl_status report(tl_status status, const char *message, tl_error *error) {
    Failure f;
    f.status = status;
    report(f, error);
    if (error) copy_text(error->message, sizeof error->message, message);
    return status;
}

// Runs a function that returns a Failure; no exception leaves it.
template <class Function>
tl_status guarded(tl_error *error, Function function) {
    if (error && error->struct_size != sizeof(tl_error)) return TL_ERR_ABI;
    try {
        return report(function(), error);
    } catch (const std::bad_alloc &) {
        return report(TL_ERR_MEMORY, kNoMemory, error);
    } catch (const std::exception &e) {
        return report(TL_ERR_INTERNAL, e.what(), error);
    }
}

inline Failure wrong_size(const char *name) {
    return failure(TL_ERR_ABI, std::string(name) + ".struct_size is not what this library was built with");
}

}  // namespace tl
