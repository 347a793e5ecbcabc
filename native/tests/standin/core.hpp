// What the two sets of entry points share: streams, events, registered memory, and faults to inject.
#pragma once

#include <cstddef>
#include <cstdint>

namespace standin {

// Codes on which CUDA and HIP agree (cuda.h CUresult, hip_runtime_api.h hipError_t).
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kNotInitialized = 3;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidContext = 201;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kNotReady = 600;
inline constexpr int kAlreadyRegistered = 712;
inline constexpr int kNotRegistered = 713;

inline constexpr unsigned kStreamNonBlocking = 1;

const char *error_name(int code);

// Counts a call; the code to answer if this one is to fail, else 0.
int enter(const char *entry);

void initialise();
bool initialised();
int device_count();
void retain_context(int step);

int register_memory(void *address, std::size_t nbytes);
int unregister_memory(void *address);

int stream_create(std::uint64_t *stream, unsigned flags);
int stream_destroy(std::uint64_t stream);
int stream_synchronize(std::uint64_t stream);
int stream_wait_event(std::uint64_t stream, std::uint64_t event);
int event_create(std::uint64_t *event);
int event_destroy(std::uint64_t event);
int event_record(std::uint64_t event, std::uint64_t stream);
int event_synchronize(std::uint64_t event);
int event_query(std::uint64_t event);
int address_range(std::uint64_t address, std::uint64_t *begin, std::uint64_t *nbytes);
int copy_to_device(std::uint64_t destination, const void *source, std::size_t nbytes, std::uint64_t stream);
int copy_to_host(void *destination, std::uint64_t source, std::size_t nbytes, std::uint64_t stream);
// Handles are good in this process alone, where their memory is; as in a driver, one at a time of each allocation.
struct IpcHandle {
    char bytes[64];
};
int ipc_export(std::uint64_t address, IpcHandle *handle);
int ipc_open(const IpcHandle &handle, std::uint64_t *address);
int ipc_close(std::uint64_t address);
int copy_on_device(std::uint64_t destination, std::uint64_t source, std::size_t nbytes, std::uint64_t stream);

// Names of the entry points of this library, NULL at the end; each set defines its own.
extern const char *const kEntries[];

}  // namespace standin
