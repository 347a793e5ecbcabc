// The seed's side: regions of memory, and a thread for each connection that reads them.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "digest.hpp"
#include "fork/bucket.hpp"
#include "fork/socket.hpp"
#include "fork/stage.hpp"
#include "fork/wire.hpp"
#include "tensorlift_fork.h"

namespace tl {

class Sender {
public:
    Sender(std::vector<tl_region> regions, uint64_t rate, uint64_t burst, uint32_t idle_milliseconds)
        : regions_(std::move(regions)),
          bucket_(rate, burst, now_ns()),
          idle_milliseconds_(idle_milliseconds),
          process_(getpid()) {}
    ~Sender();

    Failure serve(int fd);
    void set_epoch(uint64_t epoch, bool open);
    void stats(tl_sender_stats *stats);
    bool forked() const {
        return getpid() != process_;
    }

private:
    // Of a connection: one for each device that it has asked bytes of.
    using Stages = std::vector<std::unique_ptr<Stage>>;
    struct Connection {
        explicit Connection(int fd) : fd(fd) {}
        int fd;
        std::atomic<bool> ended{false};
        std::thread thread;
    };

    void work(Connection &connection);
    Failure converse(Socket &socket);
    Failure answer(Socket &socket, const ChunkRequest &request, Stages &stages, bool *done);
    Failure send_bytes(Socket &socket, const ChunkRequest &request, Stage *stage);
    Failure send_block(Socket &socket, const char *bytes, uint64_t nbytes, const Digest &digest);
    static Stage *stage_of(const tl_region &region, Stages &stages, Failure *why);
    Failure pause(uint64_t nanoseconds);
    bool inside(const ChunkRequest &request) const;
    void collect();

    const std::vector<tl_region> regions_;
    Bucket bucket_;
    const uint32_t idle_milliseconds_;
    const pid_t process_;
    std::atomic<bool> stop_{false};
    // Of one moment: an epoch that is open.
    std::mutex state_mutex_;
    uint64_t epoch_ = 0;
    bool open_ = true;
    std::mutex mutex_;
    std::condition_variable stopped_;
    std::list<Connection> connections_;
    std::atomic<uint64_t> sent_bytes_{0}, sent_chunks_{0}, refused_{0}, stale_{0}, bad_{0};
};

}  // namespace tl
