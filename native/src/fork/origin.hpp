// The seed's memory as a fork on its host reaches it: what no socket has to carry.
#pragma once

#include "common.hpp"
#include "fork/stage.hpp"
#include "tensorlift_fork.h"

namespace tl {

class Origin {
public:
    // stage: of the device, for TL_ORIGIN_DEVICE; may be null for the others.
    Origin(const tl_origin &origin, Stage *stage) : origin_(origin), stage_(stage) {}

    bool on_device() const {
        return origin_.kind == TL_ORIGIN_DEVICE && stage_ != nullptr;
    }
    // Where bytes [offset, offset + nbytes) of the region begin, if it has them.
    Failure find(uint64_t offset, uint64_t nbytes, uint64_t *at) const;

    // Bytes [offset, offset + nbytes) of the region, all of them, or why not. Never a byte beside it. seen: where they are in
    // the caches after it, to be digested; what is wrong in either of the two is noticed, for the seed digests before that.
    Failure copy(uint64_t offset, char *to, uint64_t nbytes, const char **seen) const;

private:
    Failure from_process(uint64_t at, char *to, uint64_t nbytes) const;

    const tl_origin origin_;
    Stage *const stage_;
};

}  // namespace tl
