// The C interface of sender and receiver.
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "fork/blocks.hpp"
#include "fork/ipc.hpp"
#include "fork/origin.hpp"
#include "fork/sender.hpp"
#include "guard.hpp"

struct tl_sender {
    tl_sender(std::vector<tl_region> regions, uint64_t rate, uint64_t burst, uint32_t idle_milliseconds)
        : sender(std::move(regions), rate, burst, idle_milliseconds) {}
    tl::Sender sender;
};

struct tl_staging {
    std::unique_ptr<tl::Stage> stage;
};

namespace {

using tl::Failure;
using tl::failure;

template <class Function>
tl_status on_sender(tl_sender *sender, tl_error *error, Function function) {
    return tl::guarded(error, [&]() -> Failure {
        if (!sender) return failure(TL_ERR_ARGUMENT, "no sender");
        if (sender->sender.forked())
            return failure(TL_ERR_FORKED, "the sender belongs to the parent process");
        return function(sender->sender);
    });
}

// Where the bytes of a chunk go, block by block from its first to its last.
class Places {
public:
    Places(const tl_place *places, uint64_t count, tl::Stage *stage)
        : next_(places), end_(places + count), stage_(stage) {}

    static Failure check(const tl_place *places, uint64_t count, uint64_t nbytes) {
        uint64_t from = 0;
        for (uint64_t k = 0; k < count; k++) {
            const tl_place &place = places[k];
            if (place.offset < from || place.offset > nbytes || place.nbytes > nbytes - place.offset)
                return failure(TL_ERR_ARGUMENT,
                               "place " + std::to_string(k) + " is not in the chunk, or not in order");
            from = place.offset + place.nbytes;
        }
        return {};
    }

    // The memory of the bytes [at, at + nbytes), where it is the host's and in one piece; else scratch or a slot of the
    // stage, which scatter() empties.
    Failure memory(uint64_t at, uint64_t nbytes, char **to) {
        while (next_ != end_ && next_->offset + next_->nbytes <= at) next_++;
        if (stage_) {
            const uint64_t inside = at % tl::Stage::kSlotBytes;
            if (inside == 0) {
                if (Failure f = stage_->take(slot(at), &memory_)) return f;
            }
            *to = memory_ + inside;
            return {};
        }
        if (next_ != end_ && next_->offset <= at && at + nbytes <= next_->offset + next_->nbytes) {
            *to = reinterpret_cast<char *>(next_->address) + (at - next_->offset);
            return {};
        }
        if (scratch_.empty()) scratch_.resize(tl::kBlock);
        *to = scratch_.data();
        return {};
    }
    // What memory() and scatter() do, straight from another process's memory on the device.
    Failure across(uint64_t at, uint64_t nbytes, uint64_t source) {
        while (next_ != end_ && next_->offset + next_->nbytes <= at) next_++;
        return each(at, nbytes, [&](uint64_t to, uint64_t from, uint64_t part) {
            return stage_->across(to, source + from, part);
        });
    }
    Failure finish() const {
        return stage_->finish();
    }
    Failure scatter(uint64_t at, uint64_t nbytes, const char *from) const {
        if (!stage_ && from != scratch_.data()) return {};
        if (Failure f = each(at, nbytes, [&](uint64_t to, uint64_t begin, uint64_t part) -> Failure {
                if (stage_) return stage_->to_device(to, from + begin, part);
                std::memcpy(reinterpret_cast<char *>(to), from + begin, part);
                return {};
            }))
            return f;
        const bool full = (at + nbytes) % tl::Stage::kSlotBytes == 0;
        return stage_ && full ? stage_->settle(slot(at)) : Failure{};
    }

private:
    // For each place that wants some of these bytes: its address, where they begin in the block, how many.
    template <class Function>
    Failure each(uint64_t at, uint64_t nbytes, Function function) const {
        for (const tl_place *place = next_; place != end_ && place->offset < at + nbytes; place++) {
            const uint64_t begin = std::max(at, place->offset);
            const uint64_t end = std::min(at + nbytes, place->offset + place->nbytes);
            if (begin >= end) continue;
            if (Failure f = function(place->address + (begin - place->offset), begin - at, end - begin))
                return f;
        }
        return {};
    }
    static uint64_t slot(uint64_t at) {
        return at / tl::Stage::kSlotBytes % tl::Stage::kSlots;
    }

    const tl_place *next_, *end_;
    tl::Stage *stage_;
    char *memory_ = nullptr;  // of the slot
    std::vector<char> scratch_;
};

// The digest of a block that is copied: it comes in parts, as the block itself might have under the seed's limit, and so
// counts as it comes.
Failure digest_of_block(tl::Socket &socket, tl_chunk &chunk, uint64_t nbytes) {
    tl::Digest theirs;
    uint64_t counted = 0;
    for (uint64_t came = 0; came < sizeof theirs.bytes;) {
        if (Failure f = socket.receive_some(theirs.bytes + came, sizeof theirs.bytes - came, &came)) return f;
        const uint64_t until = came * nbytes / sizeof theirs.bytes;
        tl::count(&chunk.done, until - counted);
        counted = until;
    }
    return {};
}

// The next block of a chunk: what comes, or what is copied once its digest has come. seen: what is to be digested.
Failure bring(tl::Socket &socket, tl_chunk &chunk, const tl::Origin *origin, uint64_t at, char *to,
              uint64_t nbytes, const char **seen) {
    *seen = to;
    if (!origin) return socket.receive(to, nbytes, nullptr, &chunk.done);
    if (Failure f = digest_of_block(socket, chunk, nbytes)) return f;
    return origin->copy(chunk.offset + at, to, nbytes, seen);
}

// The same from device to device, where the host need not see the bytes.
Failure bring_across(tl::Socket &socket, tl_chunk &chunk, const tl::Origin &origin, uint64_t at,
                     uint64_t nbytes, Places &places) {
    if (Failure f = digest_of_block(socket, chunk, nbytes)) return f;
    uint64_t source = 0;
    if (Failure f = origin.find(chunk.offset + at, nbytes, &source)) return f;
    return places.across(at, nbytes, source);
}

Failure receive(tl::Socket &socket, tl_chunk &chunk, const tl::Origin *origin, Places places,
                tl::Blocks &blocks) {
    const bool across = origin && origin->on_device() && !blocks.wanted();
    for (uint64_t at = 0; at < chunk.nbytes; at += tl::kBlock) {
        const uint64_t nbytes = std::min(tl::kBlock, chunk.nbytes - at);
        if (across) {
            if (Failure f = bring_across(socket, chunk, *origin, at, nbytes, places)) return f;
            continue;
        }
        char *to = nullptr;
        if (Failure f = places.memory(at, nbytes, &to)) return f;
        const char *seen = nullptr;
        if (Failure f = bring(socket, chunk, origin, at, to, nbytes, &seen)) {
            f.got += at;
            f.wanted = chunk.nbytes;
            return f;
        }
        blocks.add(seen, nbytes);
        if (Failure f = places.scatter(at, nbytes, to)) return f;
    }
    if (!origin) return {};
    if (across) {
        if (Failure f = places.finish()) return f;
    }
    const tl::Copied copied{tl::kCopied};
    return socket.send(&copied, sizeof copied);
}

// What the seed answered, where it answered at all.
Failure fetch(tl::Socket &socket, tl_chunk &chunk, const tl::Origin *origin, Places places) {
    const tl::ChunkRequest request{tl::kRequest, chunk.region, chunk.offset,     chunk.nbytes,
                                   chunk.epoch,  chunk.digest, origin != nullptr};
    if (Failure f = socket.send(&request, sizeof request)) return f;
    tl::Answer answer{};
    if (Failure f = socket.receive(&answer, sizeof answer)) return f;
    if (answer.magic != tl::kAnswer || answer.outcome < TL_CHUNK_OK || answer.outcome > TL_CHUNK_RANGE)
        return failure(TL_ERR_READ, "what came is no answer of a seed");
    chunk.outcome = answer.outcome;
    chunk.verified = 0;
    chunk.seed_epoch = answer.epoch;
    if (answer.outcome != TL_CHUNK_OK) return {};
    tl::Blocks blocks(chunk.digest != 0);
    if (Failure f = receive(socket, chunk, origin, std::move(places), blocks)) return f;
    tl::Trailer trailer{};
    if (Failure f = socket.receive(&trailer, sizeof trailer)) return f;
    if (trailer.magic != tl::kTrailer) return failure(TL_ERR_READ, "what came is no end of a chunk");
    chunk.seed_epoch = trailer.epoch;
    uint8_t digest[16] = {};
    blocks.digest(digest);
    chunk.verified = blocks.wanted() && trailer.has_digest;
    if (chunk.verified && std::memcmp(digest, trailer.digest, sizeof digest) != 0)
        chunk.outcome = TL_CHUNK_WRONG;
    if (trailer.epoch != chunk.epoch) chunk.outcome = TL_CHUNK_STALE;
    return {};
}

Failure fetch_to_device(tl::Socket &socket, tl_chunk &chunk, const tl::Origin *origin, const tl_place *places,
                        uint64_t count, tl::Stage &stage) {
    const tl::Bound bound(stage.driver(), stage.device());
    if (bound.failure()) return bound.failure();
    Failure fetched = fetch(socket, chunk, origin, Places(places, count, &stage));
    Failure finished = stage.finish();
    return fetched ? fetched : finished;
}

// Why one of these devices cannot be read: better said now than to every fork.
Failure try_devices(const std::vector<tl_region> &regions) {
    std::vector<std::pair<int32_t, int32_t>> tried;
    for (const tl_region &region : regions) {
        const std::pair<int32_t, int32_t> device{region.device_kind, region.device_index};
        if (device.first == TL_DEVICE_CPU || std::find(tried.begin(), tried.end(), device) != tried.end())
            continue;
        Failure why;
        if (!tl::Stage::make(device.first, device.second, &why)) return why;
        tried.push_back(device);
    }
    return {};
}

}  // namespace

tl_status tl_sender_create(const tl_region *regions, uint64_t count, uint64_t bytes_per_second,
                           uint64_t burst_bytes, uint32_t idle_milliseconds, tl_sender **sender,
                           tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!sender || (count && !regions))
            return failure(TL_ERR_ARGUMENT, "no regions or no place for the sender");
        if (idle_milliseconds == 0) return failure(TL_ERR_ARGUMENT, "idle_milliseconds is 0");
        std::vector<tl_region> given(regions, regions + count);
        if (Failure f = try_devices(given)) return f;
        *sender = new tl_sender(std::move(given), bytes_per_second, burst_bytes, idle_milliseconds);
        return {};
    });
}

tl_status tl_sender_serve(tl_sender *sender, int32_t fd, tl_error *error) {
    bool served = false;
    const tl_status status = on_sender(sender, error, [&](tl::Sender &on) {
        served = true;
        return on.serve(fd);
    });
    // Where it did not come so far.
    if (!served) close(fd);
    return status;
}

tl_status tl_sender_set_epoch(tl_sender *sender, uint64_t epoch, int32_t open, tl_error *error) {
    return on_sender(sender, error, [&](tl::Sender &on) -> Failure {
        on.set_epoch(epoch, open != 0);
        return {};
    });
}

tl_status tl_sender_stats_of(tl_sender *sender, tl_sender_stats *stats, tl_error *error) {
    return on_sender(sender, error, [&](tl::Sender &on) -> Failure {
        if (!stats || stats->struct_size != sizeof *stats) return tl::wrong_size("tl_sender_stats");
        on.stats(stats);
        return {};
    });
}

tl_status tl_sender_destroy(tl_sender *sender, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        delete sender;
        return {};
    });
}

tl_status tl_staging_create(int32_t device_kind, int32_t device_index, tl_staging **staging,
                            tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!staging) return failure(TL_ERR_ARGUMENT, "no place for the staging");
        Failure why;
        std::unique_ptr<tl::Stage> made = tl::Stage::make(device_kind, device_index, &why);
        if (made) *staging = new tl_staging{std::move(made)};
        return why;
    });
}

tl_status tl_staging_destroy(tl_staging *staging, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        delete staging;
        return {};
    });
}

tl_status tl_ipc_export(const tl_region *region, tl_ipc_handle *handle, uint64_t *offset, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!region || !handle || !offset) return failure(TL_ERR_ARGUMENT, "no region, or no place");
        Failure why;
        tl::Driver *driver = tl::driver_for(region->device_kind, &why);
        if (!driver) return why;
        if (Failure f = driver->retain(region->device_index)) return f;
        {
            const tl::Bound bound(driver, region->device_index);
            tl::IpcHandle found;
            why = bound.failure();
            if (!why) why = tl::ipc_export(driver, region->address, region->nbytes, &found, offset);
            if (!why) std::memcpy(handle->bytes, found.bytes, sizeof handle->bytes);
        }
        driver->release(region->device_index);
        return why;
    });
}

tl_status tl_staging_map(tl_staging *staging, const tl_ipc_handle *handle, uint64_t *address,
                         uint64_t *nbytes, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!staging || !handle || !address || !nbytes)
            return failure(TL_ERR_ARGUMENT, "no staging, or no place");
        tl::Stage &stage = *staging->stage;
        const tl::Bound bound(stage.driver(), stage.device());
        if (bound.failure()) return bound.failure();
        tl::IpcHandle given;
        std::memcpy(given.bytes, handle->bytes, sizeof given.bytes);
        return stage.map(given, address, nbytes);
    });
}

tl_status tl_chunk_fetch(int32_t fd, tl_chunk *chunk, const tl_place *places, uint64_t count,
                         tl_staging *staging, const tl_origin *origin, tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!chunk || chunk->struct_size != sizeof *chunk) return tl::wrong_size("tl_chunk");
        if (chunk->milliseconds == 0) return failure(TL_ERR_ARGUMENT, "milliseconds is 0");
        if (count && !places) return failure(TL_ERR_ARGUMENT, "no places");
        if (Failure f = Places::check(places, count, chunk->nbytes)) return f;
        tl::Socket socket(fd, chunk->milliseconds, nullptr);
        std::optional<tl::Origin> from;
        if (origin) from.emplace(*origin, staging ? staging->stage.get() : nullptr);
        const tl::Origin *reached = from ? &*from : nullptr;
        if (staging) return fetch_to_device(socket, *chunk, reached, places, count, *staging->stage);
        return fetch(socket, *chunk, reached, Places(places, count, nullptr));
    });
}

tl_status tl_origin_copy(const tl_origin *origin, uint64_t offset, void *to, uint64_t nbytes,
                         tl_error *error) {
    return tl::guarded(error, [&]() -> Failure {
        if (!origin || (nbytes && !to)) return failure(TL_ERR_ARGUMENT, "no origin or no place");
        const char *seen = nullptr;
        return tl::Origin(*origin, nullptr).copy(offset, static_cast<char *>(to), nbytes, &seen);
    });
}

void tl_tensor_digest(const void *bytes, uint64_t nbytes, uint8_t digest[16]) {
    constexpr uint64_t kDigested = 1u << 20;  // of files, whatever goes over a socket at once
    tl::Blocks blocks(true);
    for (uint64_t at = 0; at < nbytes; at += kDigested) {
        blocks.add(static_cast<const char *>(bytes) + at, std::min(kDigested, nbytes - at));
    }
    blocks.digest(digest);
}
