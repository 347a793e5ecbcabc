#include "core.hpp"
#include "standin.h"
#include "state.hpp"

#include <cstring>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

using namespace standin;

STANDIN_API void standin_drain(void) {
    State &s = state();
    std::vector<std::shared_ptr<Stream>> live;
    std::vector<std::shared_ptr<Stream>> destroyed;
    {
        std::lock_guard lock(s.mutex);
        for (auto &[handle, stream] : s.streams) {
            live.push_back(stream);
        }
        destroyed.swap(s.destroyed);
    }
    for (auto &stream : live) {
        stream->synchronize();
    }
    destroyed.clear();  // joins their threads, which must not hold the lock
}

STANDIN_API void standin_settle(void) {
    State &s = state();
    std::vector<std::shared_ptr<Stream>> all;
    {
        std::lock_guard lock(s.mutex);
        all = s.destroyed;
        for (auto &[handle, stream] : s.streams) {
            all.push_back(stream);
        }
    }
    for (auto &stream : all) {
        stream->settle();
    }
}

STANDIN_API void standin_reset(void) {
    State &s = state();
    {
        std::lock_guard lock(s.mutex);
        for (auto &[id, gate] : s.gates) {
            gate->open();
        }
        for (auto &[handle, stream] : s.streams) {
            stream->close();
            s.destroyed.push_back(std::move(stream));
        }
        s.streams.clear();
    }
    standin_drain();
    {
        std::lock_guard lock(s.mutex);
        s.initialised = false;
        s.devices = 2;
        s.contexts = 0;
        s.events.clear();
        s.gates.clear();
        s.calls.clear();
        s.rules.clear();
        s.fails_in_a_million = 0;
        s.failed_before.clear();
        s.blocking_streams = 0;
        s.busy = false;
        s.rests.notify_all();
        s.jitter_us = 0;
        s.delay_us = 0;
        s.allocation_bytes = 0;
        s.unpinned_copies = 0;
        s.lost_copies = 0;
    }
    std::unique_lock lock(s.registry_mutex);
    s.registry.clear();
    s.registered = 0;
    s.registered_peak = 0;
}

STANDIN_API void standin_ready(void) {
    initialise();
}

STANDIN_API void standin_set_devices(int32_t count) {
    std::lock_guard lock(state().mutex);
    state().devices = count;
}

STANDIN_API void standin_set_copy_delay_us(uint64_t us) {
    state().delay_us = us;
}

STANDIN_API void standin_set_busy(int32_t busy) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    s.busy = busy != 0;
    s.rests.notify_all();
}

STANDIN_API void standin_set_allocation_bytes(uint64_t nbytes) {
    state().allocation_bytes = nbytes;
}

STANDIN_API void standin_set_copy_jitter_us(uint64_t jitter_us, uint64_t seed) {
    std::lock_guard lock(state().mutex);
    state().jitter_us = jitter_us;
    state().random.seed(seed);
}

STANDIN_API void standin_fail(const char *entry, int64_t nth, int32_t code) {
    std::lock_guard lock(state().mutex);
    if (nth == 0) {
        state().rules.erase(entry);
    } else {
        state().rules[entry] = Rule{nth, code};
    }
}

STANDIN_API void standin_fail_at_random(uint64_t seed, uint32_t in_a_million, int32_t code) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    s.fails.seed(seed);
    s.fails_in_a_million = in_a_million;
    s.random_code = code;
}

STANDIN_API uint64_t standin_calls(const char *entry) {
    std::lock_guard lock(state().mutex);
    auto found = state().calls.find(entry);
    return found == state().calls.end() ? 0 : found->second;
}

STANDIN_API const char *standin_entry(uint32_t index) {
    for (uint32_t i = 0; kEntries[i] != nullptr; ++i) {
        if (i == index) {
            return kEntries[i];
        }
    }
    return nullptr;
}

STANDIN_API uint64_t standin_registered_bytes(void) {
    std::shared_lock lock(state().registry_mutex);
    return state().registered;
}

STANDIN_API uint64_t standin_registered_peak_bytes(void) {
    std::shared_lock lock(state().registry_mutex);
    return state().registered_peak;
}

STANDIN_API uint64_t standin_live_streams(void) {
    std::lock_guard lock(state().mutex);
    uint64_t count = 0;
    for (auto &[handle, stream] : state().streams) {
        count += stream->counted() ? 1 : 0;
    }
    return count;
}

STANDIN_API uint64_t standin_live_events(void) {
    std::lock_guard lock(state().mutex);
    return state().events.size();
}

STANDIN_API uint64_t standin_mapped_allocations(void) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    return s.opened.size();
}

STANDIN_API int64_t standin_retained_contexts(void) {
    std::lock_guard lock(state().mutex);
    return state().contexts;
}

STANDIN_API uint64_t standin_unpinned_copies(void) {
    return state().unpinned_copies;
}
STANDIN_API uint64_t standin_lost_copies(void) {
    return state().lost_copies;
}

STANDIN_API uint64_t standin_blocking_streams(void) {
    std::lock_guard lock(state().mutex);
    return state().blocking_streams;
}

STANDIN_API uint64_t standin_stream(void) {
    return add_stream(false);
}
STANDIN_API void standin_stream_free(uint64_t stream) {
    remove_stream(stream);
}

STANDIN_API void standin_stream_sync(uint64_t stream) {
    if (auto found = find_stream(stream)) {
        found->synchronize();
    }
}

STANDIN_API void standin_memset(uint64_t stream, void *destination, int32_t value, uint64_t nbytes) {
    if (auto found = find_stream(stream)) {
        found->push([=] { std::memset(destination, value, nbytes); });
    }
}

STANDIN_API void standin_copy(uint64_t stream, void *destination, const void *source, uint64_t nbytes) {
    if (auto found = find_stream(stream)) {
        found->push([=] { std::memcpy(destination, source, nbytes); });
    }
}

STANDIN_API uint64_t standin_hold(uint64_t stream) {
    auto gate = std::make_shared<Latch>();
    uint64_t id;
    {
        std::lock_guard lock(state().mutex);
        id = state().next_handle += 16;
        state().gates.emplace(id, gate);
    }
    if (auto found = find_stream(stream)) {
        found->push_wait(gate);
    }
    return id;
}

STANDIN_API void standin_release(uint64_t gate) {
    std::lock_guard lock(state().mutex);
    auto found = state().gates.find(gate);
    if (found != state().gates.end()) {
        found->second->open();
        state().gates.erase(found);
    }
}
