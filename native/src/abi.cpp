// The C interface: checks what the caller must keep to, and turns failures into the caller's structures.
#include "arena.hpp"
#include "backends.hpp"
#include "engine.hpp"
#include "guard.hpp"
#include "keeper.hpp"
#include "residency.hpp"
#include "shim/driver.hpp"

struct tl_engine {
    explicit tl_engine(const tl_options &options) : engine(options) {}
    tl::Engine engine;
};

namespace {

using tl::Failure;
using tl::failure;
using tl::guarded;
using tl::wrong_size;

template <class Function>
tl_status on_engine(tl_engine *engine, tl_error *error, Function function) {
    return guarded(error, [&]() -> Failure {
        if (!engine) return failure(TL_ERR_ARGUMENT, "no engine");
        if (engine->engine.forked())
            return failure(TL_ERR_FORKED, "the engine belongs to the parent process");
        return function(engine->engine);
    });
}

tl::Stream stream(uint64_t handle) {
    return reinterpret_cast<tl::Stream>(handle);
}

}  // namespace

uint32_t tl_abi_version(void) {
    return TL_ABI_VERSION;
}

const char *tl_backend_not_built(uint32_t backend) {
    return tl::backend_not_built(backend);
}

tl_status tl_backend_probe(uint32_t backend, const char *path, tl_error *error) {
    return guarded(error, [&]() -> Failure {
        if (!path) return failure(TL_ERR_ARGUMENT, "no path");
        if (const char *why = tl::backend_not_built(backend)) return failure(TL_ERR_BACKEND, why);
        tl_options options{};
        options.struct_size = sizeof options;
        options.abi_version = TL_ABI_VERSION;
        options.chunk_bytes = options.slot_bytes = tl::kPage;
        options.threads = options.io_depth = options.backend_count = 1;
        options.backends[0] = backend;
        return tl::probe(options, path);
    });
}

double tl_cached_share(const char *path) {
    double share = -1;
    guarded(nullptr, [&]() -> Failure {
        if (path) share = tl::Residency::share(path);
        return {};
    });
    return share;
}

tl_status tl_driver_probe(int32_t device_kind, int32_t *device_count, tl_error *error) {
    return guarded(error, [&]() -> Failure {
        if (!device_count) return failure(TL_ERR_ARGUMENT, "no place for the count");
        Failure why;
        tl::Driver *driver = tl::driver_for(device_kind, &why);
        return driver ? driver->device_count(device_count) : why;
    });
}

tl_status tl_engine_create(const tl_options *options, tl_engine **engine, tl_error *error) {
    return guarded(error, [&]() -> Failure {
        if (!options || !engine) return failure(TL_ERR_ARGUMENT, "no options or no place for the engine");
        if (options->struct_size != sizeof(tl_options)) return wrong_size("tl_options");
        if (options->abi_version != TL_ABI_VERSION) {
            return failure(TL_ERR_ABI, "the caller speaks version " + std::to_string(options->abi_version) +
                                           " of the interface, the library " +
                                           std::to_string(TL_ABI_VERSION));
        }
        auto made = std::make_unique<tl_engine>(*options);
        if (Failure f = made->engine.start()) return f;
        *engine = made.release();
        return {};
    });
}

tl_status tl_pinned_release(uint64_t *nbytes, tl_error *error) {
    return guarded(error, [&]() -> Failure {
        if (!nbytes) return failure(TL_ERR_ARGUMENT, "no place for the number of bytes");
        *nbytes = tl::release_rings();
        return {};
    });
}

tl_status tl_engine_add_file(tl_engine *engine, const char *path, uint64_t device, uint64_t inode,
                             uint64_t nbytes, int32_t *file, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        if (!path || !file) return failure(TL_ERR_ARGUMENT, "no path or no place for the index");
        return e.add_file(path, device, inode, nbytes, file);
    });
}

tl_status tl_engine_submit(tl_engine *engine, const tl_piece *pieces, uint64_t count,
                           uint64_t consumer_stream, uint64_t *ticket, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        if ((!pieces && count > 0) || !ticket)
            return failure(TL_ERR_ARGUMENT, "no pieces or no place for the ticket");
        return e.submit(pieces, count, stream(consumer_stream), ticket);
    });
}

const uint64_t *tl_engine_landed(tl_engine *engine) {
    return engine ? engine->engine.landed() : nullptr;
}

tl_status tl_engine_wait(tl_engine *engine, uint64_t ticket, uint32_t timeout_ms, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) { return e.wait(ticket, timeout_ms); });
}

tl_status tl_engine_stream_wait(tl_engine *engine, uint64_t consumer_stream, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) { return e.stream_wait(stream(consumer_stream)); });
}

tl_status tl_engine_stats(tl_engine *engine, tl_stats *stats, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        if (!stats || stats->struct_size != sizeof(tl_stats)) return wrong_size("tl_stats");
        e.stats(stats);
        return {};
    });
}

tl_status tl_engine_file_info(tl_engine *engine, int32_t file, tl_file_info *info, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        if (!info || info->struct_size != sizeof(tl_file_info)) return wrong_size("tl_file_info");
        return e.file_info(file, info);
    });
}

tl_status tl_engine_digests(tl_engine *engine, uint64_t first, uint64_t count, uint8_t *digests,
                            tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        if (!digests && count > 0) return failure(TL_ERR_ARGUMENT, "no place for the digests");
        return e.digests(first, count, digests);
    });
}

tl_status tl_engine_trace(tl_engine *engine, uint64_t first, tl_trace_event *events, uint64_t capacity,
                          uint64_t *count, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        if ((!events && capacity > 0) || !count) return failure(TL_ERR_ARGUMENT, "no place for the events");
        e.await_copies();
        *count = e.trace().read(first, events, capacity);
        return {};
    });
}

void tl_digest(const void *bytes, uint64_t nbytes, uint8_t digest[16]) {
    const tl::Digest made = tl::digest_of(bytes, nbytes);
    std::memcpy(digest, made.bytes, sizeof made.bytes);
}

tl_status tl_engine_set_aside(tl_engine *engine, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        e.set_aside();
        return {};
    });
}

tl_status tl_engine_cancel(tl_engine *engine, tl_error *error) {
    return on_engine(engine, error, [&](tl::Engine &e) -> Failure {
        e.cancel();
        return {};
    });
}

tl_status tl_engine_destroy(tl_engine *engine, tl_error *error) {
    if (!engine) return TL_OK;
    // Its threads are not in the child of a fork: nothing of it can be ended there.
    if (engine->engine.forked()) return TL_OK;
    const tl_status status = guarded(error, [&] { return engine->engine.close(); });
    delete engine;
    return status;
}

tl_status tl_arena_host(uint64_t nbytes, tl_arena **arena, uint64_t *address, tl_error *error) {
    return guarded(error, [&]() -> Failure {
        if (!arena || !address) return failure(TL_ERR_ARGUMENT, "no place for the arena");
        return tl::arena_host(nbytes, arena, address);
    });
}

tl_status tl_arena_adopt(void *dl_managed_tensor, int32_t device_kind, int32_t device_index, uint64_t owner,
                         tl_arena **arena, uint64_t *address, tl_error *error) {
    return guarded(error, [&]() -> Failure {
        if (!arena || !address) return failure(TL_ERR_ARGUMENT, "no place for the arena");
        return tl::arena_adopt(dl_managed_tensor, device_kind, device_index,
                               reinterpret_cast<tl::Stream>(owner), arena, address);
    });
}

tl_status tl_arena_record_stream(uint64_t address, uint64_t stream, tl_error *error) {
    return guarded(error,
                   [&] { return tl::arena_record_stream(address, reinterpret_cast<tl::Stream>(stream)); });
}

void tl_arena_release(tl_arena *arena) {
    if (arena) tl::arena_drop(arena);
}

uint64_t tl_arena_live(void) {
    return tl::arenas_alive();
}
