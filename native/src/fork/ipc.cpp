#include "fork/ipc.hpp"

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

namespace tl {
namespace {

struct Mapped {
    uint64_t address = 0;
    uint64_t nbytes = 0;
    uint64_t users = 0;
};

// Of a key that needs no memory: what is mapped has to be found when it is given back.
using Key = std::tuple<Driver *, int32_t, std::array<char, sizeof(IpcHandle)>>;

std::mutex mutex;
std::map<Key, Mapped> mappings;

Key key_of(Driver *driver, int32_t device, const IpcHandle &handle) {
    Key key{driver, device, {}};
    std::memcpy(std::get<2>(key).data(), handle.bytes, sizeof handle.bytes);
    return key;
}

// The driver says how large it is, not who has passed it.
Failure open(Driver *driver, const IpcHandle &handle, Mapped *mapped) {
    if (Failure f = driver->ipc_open(handle, &mapped->address)) return f;
    uint64_t begin = 0, there = 0;
    if (Failure f = driver->address_range(mapped->address, &begin, &there)) {
        driver->ipc_close(mapped->address);
        return f;
    }
    mapped->nbytes = begin + there - mapped->address;
    return {};
}

}  // namespace

Failure ipc_export(Driver *driver, uint64_t address, uint64_t nbytes, IpcHandle *handle, uint64_t *offset) {
    uint64_t begin = 0, there = 0;
    if (Failure f = driver->address_range(address, &begin, &there)) return f;
    *offset = address - begin;
    if (begin > address || *offset > there || nbytes > there - *offset)
        return failure(TL_ERR_DRIVER, "the region lies in several allocations of the device");
    return driver->ipc_export(begin, handle);
}

Failure ipc_map(Driver *driver, int32_t device, const IpcHandle &handle, uint64_t *address,
                uint64_t *nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto key = key_of(driver, device, handle);
    Mapped &mapped = mappings[key];
    if (mapped.users == 0) {
        if (Failure f = open(driver, handle, &mapped)) {
            mappings.erase(key);
            return f;
        }
    }
    mapped.users++;
    *address = mapped.address;
    *nbytes = mapped.nbytes;
    return {};
}

void ipc_unmap(Driver *driver, int32_t device, const IpcHandle &handle) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = mappings.find(key_of(driver, device, handle));
    if (found == mappings.end() || --found->second.users > 0) return;
    driver->ipc_close(found->second.address);
    mappings.erase(found);
}

}  // namespace tl
