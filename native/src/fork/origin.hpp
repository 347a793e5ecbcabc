// The seed's memory as a fork on its host reaches it: what no socket has to carry.
#pragma once

#include "common.hpp"
#include "tensorlift_fork.h"

namespace tl {

class Origin {
public:
    explicit Origin(const tl_origin &origin) : origin_(origin) {}

    // Bytes [offset, offset + nbytes) of the region, all of them, or why not. Never a byte beside it.
    Failure copy(uint64_t offset, char *to, uint64_t nbytes) const;

private:
    Failure from_file(uint64_t at, char *to, uint64_t nbytes) const;
    Failure from_process(uint64_t at, char *to, uint64_t nbytes) const;

    const tl_origin origin_;
};

}  // namespace tl
