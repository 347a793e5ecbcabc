// What libFuzzer gives, taken from its begin; zeros behind its end. And a check that ends the program, so that the input is
// kept.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define REQUIRE(condition)                                                               \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                \
        }                                                                                \
    } while (false)

class Input {
public:
    Input(const uint8_t *bytes, size_t nbytes) : at_(bytes), end_(bytes + nbytes) {}

    template <class T>
    T take() {
        T value{};
        const size_t nbytes = std::min(sizeof value, left());
        if (nbytes) std::memcpy(&value, at_, nbytes);
        at_ += nbytes;
        return value;
    }
    std::vector<uint8_t> rest() {
        std::vector<uint8_t> all(at_, end_);
        at_ = end_;
        return all;
    }
    size_t left() const {
        return static_cast<size_t>(end_ - at_);
    }

private:
    const uint8_t *at_, *end_;
};

// Bytes that tell where they are.
inline std::vector<uint8_t> pattern(size_t nbytes, uint32_t seed) {
    std::vector<uint8_t> bytes(nbytes);
    for (size_t i = 0; i < nbytes; i++) bytes[i] = static_cast<uint8_t>(i * 131 + (i >> 8) * 29 + seed);
    return bytes;
}
