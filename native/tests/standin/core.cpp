#include "core.hpp"

#include "state.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace standin {
// Never freed: threads of streams may outlive the statics of a process that exits.
State &state() {
    static State *const the = new State;
    return *the;
}

std::shared_ptr<Stream> find_stream(std::uint64_t handle) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    auto found = s.streams.find(handle);
    if (found != s.streams.end()) {
        return found->second;
    }
    if (handle != 0) {
        return nullptr;
    }
    return s.streams.emplace(0, std::make_shared<Stream>(false)).first->second;
}

namespace {

bool is_registered(const void *source, std::size_t nbytes) {
    const auto &registry = state().registry;
    const auto begin = reinterpret_cast<std::uintptr_t>(source);
    auto after = registry.upper_bound(begin);
    if (after == registry.begin()) {
        return false;
    }
    --after;
    return begin + nbytes <= after->first + after->second;
}

std::uint64_t delay_of_a_copy() {
    State &s = state();
    std::lock_guard lock(s.mutex);
    return s.delay_us + (s.jitter_us ? s.random() % s.jitter_us : 0);
}

// host: which of the two was registered.
void run_copy(void *destination, const void *source, const void *host, std::size_t nbytes,
              std::uint64_t delay_us) {
    if (delay_us != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    }
    State &s = state();
    std::shared_lock lock(s.registry_mutex);
    if (!is_registered(host, nbytes)) {
        ++s.lost_copies;
        return;
    }
    std::memcpy(destination, source, nbytes);
}

bool crosses_allocations(std::uint64_t address, std::size_t nbytes) {
    const std::uint64_t one = state().allocation_bytes;
    return one != 0 && address / one != (address + nbytes - 1) / one;
}

}  // namespace

std::uint64_t add_stream(bool counted) {
    State &s = state();
    auto stream = std::make_shared<Stream>(counted);
    std::lock_guard lock(s.mutex);
    s.next_handle += 16;
    s.streams.emplace(s.next_handle, std::move(stream));
    return s.next_handle;
}

int remove_stream(std::uint64_t handle) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    auto found = s.streams.find(handle);
    if (handle == 0 || found == s.streams.end()) {
        return kInvalidHandle;
    }
    found->second->close();
    s.destroyed.push_back(std::move(found->second));
    s.streams.erase(found);
    return kSuccess;
}

const char *error_name(int code) {
    switch (code) {
        case kSuccess:
            return "STANDIN_SUCCESS";
        case kInvalidValue:
            return "STANDIN_INVALID_VALUE";
        case kNotInitialized:
            return "STANDIN_NOT_INITIALIZED";
        case kInvalidDevice:
            return "STANDIN_INVALID_DEVICE";
        case kInvalidContext:
            return "STANDIN_INVALID_CONTEXT";
        case kInvalidHandle:
            return "STANDIN_INVALID_HANDLE";
        case kNotReady:
            return "STANDIN_NOT_READY";
        case kAlreadyRegistered:
            return "STANDIN_ALREADY_REGISTERED";
        case kNotRegistered:
            return "STANDIN_NOT_REGISTERED";
        default:
            return "STANDIN_INJECTED";
    }
}

int enter(const char *entry) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    ++s.calls[entry];
    if (s.failed_before.erase({std::this_thread::get_id(), entry}) == 0 && s.fails_in_a_million > 0 &&
        s.fails() % 1000000 < s.fails_in_a_million) {
        s.failed_before.emplace(std::this_thread::get_id(), entry);
        return s.random_code;
    }
    auto rule = s.rules.find(entry);
    if (rule == s.rules.end()) {
        return kSuccess;
    }
    Rule &r = rule->second;
    const int code = r.code;
    if (r.nth == 1) {
        s.rules.erase(rule);
        return code;
    }
    if (r.nth == -1) {
        return code;
    }
    r.nth += r.nth > 0 ? -1 : 1;
    return kSuccess;
}

void initialise() {
    std::lock_guard lock(state().mutex);
    state().initialised = true;
}

bool initialised() {
    std::lock_guard lock(state().mutex);
    return state().initialised;
}

int device_count() {
    std::lock_guard lock(state().mutex);
    return state().devices;
}

void retain_context(int step) {
    std::lock_guard lock(state().mutex);
    state().contexts += step;
}

int register_memory(void *address, std::size_t nbytes) {
    if (address == nullptr || nbytes == 0) {
        return kInvalidValue;
    }
    State &s = state();
    std::unique_lock lock(s.registry_mutex);
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    auto after = s.registry.lower_bound(begin);
    if (after != s.registry.end() && after->first < begin + nbytes) {
        return kAlreadyRegistered;
    }
    if (after != s.registry.begin() && std::prev(after)->first + std::prev(after)->second > begin) {
        return kAlreadyRegistered;
    }
    s.registry.emplace(begin, nbytes);
    s.registered += nbytes;
    s.registered_peak = std::max(s.registered_peak, s.registered);
    return kSuccess;
}

int unregister_memory(void *address) {
    State &s = state();
    {
        std::unique_lock lock(s.mutex);
        s.rests.wait(lock, [&] { return !s.busy; });
    }
    std::unique_lock lock(s.registry_mutex);
    auto found = s.registry.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == s.registry.end()) {
        return kNotRegistered;
    }
    s.registered -= found->second;
    s.registry.erase(found);
    return kSuccess;
}

int stream_create(std::uint64_t *stream, unsigned flags) {
    *stream = add_stream(true);
    if ((flags & kStreamNonBlocking) == 0) {
        std::lock_guard lock(state().mutex);
        ++state().blocking_streams;
    }
    return kSuccess;
}

int stream_destroy(std::uint64_t stream) {
    return remove_stream(stream);
}

int stream_synchronize(std::uint64_t stream) {
    auto found = find_stream(stream);
    if (!found) {
        return kInvalidHandle;
    }
    found->synchronize();
    return kSuccess;
}

int event_create(std::uint64_t *event) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    s.next_handle += 16;
    s.events.emplace(s.next_handle, Event{});
    *event = s.next_handle;
    return kSuccess;
}

int event_destroy(std::uint64_t event) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    return s.events.erase(event) ? kSuccess : kInvalidHandle;
}

int event_record(std::uint64_t event, std::uint64_t stream) {
    auto target = find_stream(stream);
    State &s = state();
    std::lock_guard lock(s.mutex);
    auto found = s.events.find(event);
    if (!target || found == s.events.end()) {
        return kInvalidHandle;
    }
    auto latch = std::make_shared<Latch>();
    found->second.last = latch;
    target->push([latch] { latch->open(); });
    return kSuccess;
}

// The last record of an event; false where there is no such event.
static bool last_record(std::uint64_t event, std::shared_ptr<Latch> *latch) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    auto found = s.events.find(event);
    if (found == s.events.end()) {
        return false;
    }
    *latch = found->second.last;
    return true;
}

int stream_wait_event(std::uint64_t stream, std::uint64_t event) {
    auto target = find_stream(stream);
    std::shared_ptr<Latch> latch;
    if (!target || !last_record(event, &latch)) {
        return kInvalidHandle;
    }
    if (latch) {
        target->push_wait(latch);
    }
    return kSuccess;
}

int event_synchronize(std::uint64_t event) {
    std::shared_ptr<Latch> latch;
    if (!last_record(event, &latch)) {
        return kInvalidHandle;
    }
    if (latch) {
        latch->wait();
    }
    return kSuccess;
}

int event_query(std::uint64_t event) {
    std::shared_ptr<Latch> latch;
    if (!last_record(event, &latch)) {
        return kInvalidHandle;
    }
    return !latch || latch->is_open() ? kSuccess : kNotReady;
}

int address_range(std::uint64_t address, std::uint64_t *begin, std::uint64_t *nbytes) {
    const std::uint64_t one = state().allocation_bytes;
    *begin = one == 0 ? 0 : address / one * one;
    *nbytes = one == 0 ? std::uint64_t{1} << 63 : one;
    return kSuccess;
}

int copy_to_device(std::uint64_t destination, const void *source, std::size_t nbytes, std::uint64_t stream) {
    auto target = find_stream(stream);
    if (!target) {
        return kInvalidHandle;
    }
    if (destination == 0 || source == nullptr || crosses_allocations(destination, nbytes)) {
        return kInvalidValue;
    }
    State &s = state();
    const std::uint64_t delay_us = delay_of_a_copy();
    bool pinned;
    {
        std::shared_lock lock(s.registry_mutex);
        pinned = is_registered(source, nbytes);
    }
    if (pinned) {
        void *to = reinterpret_cast<void *>(destination);
        target->push([=] { run_copy(to, source, source, nbytes, delay_us); });
        return kSuccess;
    }
    // Pageable memory is staged during the call: the caller may change it afterwards.
    ++s.unpinned_copies;
    const char *bytes = static_cast<const char *>(source);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
    target->push([=] { std::memcpy(reinterpret_cast<void *>(destination), staged->data(), nbytes); });
    return kSuccess;
}

int copy_to_host(void *destination, std::uint64_t source, std::size_t nbytes, std::uint64_t stream) {
    auto target = find_stream(stream);
    if (!target) {
        return kInvalidHandle;
    }
    if (destination == nullptr || source == 0 || crosses_allocations(source, nbytes)) {
        return kInvalidValue;
    }
    const std::uint64_t delay_us = delay_of_a_copy();
    const void *from = reinterpret_cast<const void *>(source);
    State &s = state();
    bool pinned;
    {
        std::shared_lock lock(s.registry_mutex);
        pinned = is_registered(destination, nbytes);
    }
    if (pinned) {
        target->push([=] { run_copy(destination, from, destination, nbytes, delay_us); });
        return kSuccess;
    }
    // To pageable memory the call returns when the bytes are there.
    ++s.unpinned_copies;
    target->push([=] { std::memcpy(destination, from, nbytes); });
    target->synchronize();
    return kSuccess;
}

int ipc_export(std::uint64_t address, IpcHandle *handle) {
    const std::uint64_t one = state().allocation_bytes;
    if (one == 0 || address % one != 0) {
        return kInvalidValue;
    }
    *handle = {};
    std::memcpy(handle->bytes, &address, sizeof address);
    return kSuccess;
}

int ipc_open(const IpcHandle &handle, std::uint64_t *address) {
    std::memcpy(address, handle.bytes, sizeof *address);
    State &s = state();
    std::lock_guard lock(s.mutex);
    return s.opened.insert(*address).second ? kSuccess : kInvalidValue;
}

int ipc_close(std::uint64_t address) {
    State &s = state();
    std::lock_guard lock(s.mutex);
    return s.opened.erase(address) ? kSuccess : kInvalidValue;
}

int copy_on_device(std::uint64_t destination, std::uint64_t source, std::size_t nbytes,
                   std::uint64_t stream) {
    auto target = find_stream(stream);
    if (!target) {
        return kInvalidHandle;
    }
    target->push([=] {
        std::memcpy(reinterpret_cast<void *>(destination), reinterpret_cast<const void *>(source), nbytes);
    });
    return kSuccess;
}

}  // namespace standin
