// A connected stream socket that is waited for no longer than its owner says.
#pragma once

#include <atomic>
#include <cstdint>

#include "common.hpp"

namespace tl {

// Others read it meanwhile.
inline void count(uint64_t *counter, uint64_t nbytes) {
    std::atomic_ref<uint64_t>(*counter).fetch_add(nbytes, std::memory_order_relaxed);
}

class Socket {
public:
    // stop: looked at before each wait; who sets it shuts the socket down, which ends a wait that is under way.
    Socket(int fd, uint32_t idle_milliseconds, const std::atomic<bool> *stop)
        : fd_(fd), idle_milliseconds_(idle_milliseconds), stop_(stop) {}

    // All of it, or why not; got: how much. A peer that closes before the first byte of a receive is no failure where
    // closed is given, and sets it.
    Failure send(const void *bytes, uint64_t nbytes);
    // counter: of bytes as they come.
    Failure receive(void *bytes, uint64_t nbytes, bool *closed = nullptr, uint64_t *counter = nullptr);
    // As many as are there, at least one; done goes up by them.
    Failure receive_some(void *bytes, uint64_t nbytes, uint64_t *done, bool *closed = nullptr);

    // Sleeps for so long as nothing comes.
    Failure wait_for_request(bool *closed);

private:
    Failure ready(short events, bool forever, uint64_t done, uint64_t wanted);

    int fd_;
    uint32_t idle_milliseconds_;
    const std::atomic<bool> *stop_;
};

}  // namespace tl
