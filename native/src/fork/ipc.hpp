// Memory of a device that another process of the host has, as CUDA IPC passes it.
#pragma once

#include "shim/driver.hpp"

namespace tl {

// The handle of the allocation that holds all of these bytes, and how far into it they begin. The device is current.
Failure ipc_export(Driver *driver, uint64_t address, uint64_t nbytes, IpcHandle *handle, uint64_t *offset);

// Where the allocation is in this process, and how large: mapped once a device, however many connections read it. Each
// call is one ipc_unmap's. The device is current.
Failure ipc_map(Driver *driver, int32_t device, const IpcHandle &handle, uint64_t *address, uint64_t *nbytes);
void ipc_unmap(Driver *driver, int32_t device, const IpcHandle &handle);

}  // namespace tl
