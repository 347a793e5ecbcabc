// What every part of the engine shares: failures as values, rounding, time.
#pragma once

#include <time.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

#include "tensorlift.h"

namespace tl {

// Pages of the page cache, and the block that direct reads keep to unless a file asks for more.
inline constexpr uint64_t kPage = 4096;

// MADV_POPULATE_WRITE (Linux 5.14), which not every build machine's headers have.
inline constexpr int kPopulateWrite = 23;

constexpr uint64_t round_down(uint64_t value, uint64_t unit) {
    return value / unit * unit;
}
constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
    return round_down(value + unit - 1, unit);
}

inline uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// The outcome of an operation: TL_OK, or what went wrong and where. A value, never thrown.
struct Failure {
    tl_status status = TL_OK;
    int os_errno = 0;
    int driver_code = 0;
    int file = -1;
    uint64_t offset = 0;
    uint64_t wanted = 0;
    uint64_t got = 0;
    std::string message;

    explicit operator bool() const {
        return status != TL_OK;
    }
};

inline Failure failure(tl_status status, std::string message) {
    Failure f;
    f.status = status;
    f.message = std::move(message);
    return f;
}

// Takes the place of a text that there is no memory for. So short that it needs none.
inline constexpr const char *kNoMemory = "no host memory";

// Gives a failure the text that make() returns.
template <class Make>
void explain(Failure *failure, Make make) {
    try {
        failure->message = make();
    } catch (const std::bad_alloc &) {
        failure->message = kNoMemory;
    }
}

// Keeps the first of several failures.
inline void keep_first(Failure *first, const Failure &failure) {
    if (*first) return;
    try {
        *first = failure;
    } catch (const std::bad_alloc &) {  // the text comes last
        first->message = kNoMemory;
    }
}

inline Failure os_failure(tl_status status, int os_errno, const char *what) {
    Failure f;
    f.status = status;
    f.os_errno = os_errno;
    explain(&f, [&] { return std::string(what) + ": " + std::strerror(os_errno); });
    return f;
}

// Copies a text into a fixed field of the C interface, cut at a whole UTF-8 character.
inline void copy_text(char *field, size_t size, std::string_view text) {
    size_t n = text.size() < size ? text.size() : size - 1;
    if (n < text.size()) {
        while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) n--;
    }
    std::memcpy(field, text.data(), n);
    field[n] = 0;
}

}  // namespace tl
