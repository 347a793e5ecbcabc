// All that the stand-in remembers.
#pragma once

#include "stream.hpp"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace standin {

struct Event {
    std::shared_ptr<Latch> last;  // of the last record; none: complete
};

struct Rule {
    std::int64_t nth;
    std::int32_t code;
};

struct State {
    std::mutex mutex;  // all but the registrations
    bool initialised = false;
    int devices = 2;
    std::int64_t contexts = 0;
    std::uint64_t next_handle = 0x1000;
    std::map<std::uint64_t, std::shared_ptr<Stream>> streams;
    std::vector<std::shared_ptr<Stream>> destroyed;
    std::map<std::uint64_t, Event> events;
    std::map<std::uint64_t, std::shared_ptr<Latch>> gates;
    std::set<std::uint64_t> opened;  // allocations of "another process"
    std::map<std::string, std::uint64_t> calls;
    std::map<std::string, Rule> rules;
    std::mt19937_64 fails;
    std::uint32_t fails_in_a_million = 0;
    std::set<std::pair<std::thread::id, std::string>> failed_before;  // at random, the last time
    std::int32_t random_code = 0;
    std::uint64_t blocking_streams = 0;
    bool busy = false;  // with work that is on no stream of ours
    std::condition_variable rests;
    std::mt19937_64 random{1};
    std::uint64_t jitter_us = 0;

    std::atomic<std::uint64_t> delay_us{0};
    std::atomic<std::uint64_t> allocation_bytes{
        0};  // of each allocation, at multiples of itself; 0: all is one
    std::atomic<std::uint64_t> unpinned_copies{0};
    std::atomic<std::uint64_t> lost_copies{0};

    std::shared_mutex registry_mutex;  // shared while a copy reads, so that memory does not go under it
    std::map<std::uintptr_t, std::size_t> registry;
    std::uint64_t registered = 0;
    std::uint64_t registered_peak = 0;
};

State &state();

// The stream of a handle, none if there is no such stream; 0 makes the default stream at its first use.
std::shared_ptr<Stream> find_stream(std::uint64_t handle);
std::uint64_t add_stream(bool counted);
int remove_stream(std::uint64_t handle);

}  // namespace standin
