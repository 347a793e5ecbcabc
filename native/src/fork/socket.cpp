#include "fork/socket.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace tl {
namespace {

bool again(int code) {
    return code == EAGAIN || code == EWOULDBLOCK || code == EINTR;
}

Failure lost(int code, const char *what, uint64_t done, uint64_t wanted) {
    Failure f = os_failure(TL_ERR_READ, code, what);
    f.got = done;
    f.wanted = wanted;
    return f;
}

}  // namespace

Failure Socket::send(const void *bytes, uint64_t nbytes) {
    const char *from = static_cast<const char *>(bytes);
    for (uint64_t done = 0; done < nbytes;) {
        const ssize_t sent = ::send(fd_, from + done, nbytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            done += static_cast<uint64_t>(sent);
        } else if (!again(errno)) {
            return lost(errno, "cannot send", done, nbytes);
        } else if (Failure f = ready(POLLOUT, false, done, nbytes)) {
            return f;
        }
    }
    return {};
}

Failure Socket::receive(void *bytes, uint64_t nbytes, bool *closed, uint64_t *counter) {
    char *to = static_cast<char *>(bytes);
    for (uint64_t done = 0; done < nbytes;) {
        const uint64_t before = done;
        if (Failure f = receive_some(to + done, nbytes - done, &done, done ? nullptr : closed)) {
            f.got = done;
            f.wanted = nbytes;
            return f;
        }
        if (closed && *closed) return {};
        if (counter) count(counter, done - before);
    }
    return {};
}

Failure Socket::receive_some(void *bytes, uint64_t nbytes, uint64_t *done, bool *closed) {
    while (true) {
        const ssize_t came = recv(fd_, bytes, nbytes, MSG_DONTWAIT);
        if (came > 0) {
            *done += static_cast<uint64_t>(came);
            return {};
        }
        if (came == 0 && closed) {
            *closed = true;
            return {};
        }
        if (came == 0) return failure(TL_ERR_READ, "the other side closed the connection");
        if (!again(errno)) return lost(errno, "cannot receive", 0, nbytes);
        if (Failure f = ready(POLLIN, false, 0, nbytes)) return f;
    }
}

Failure Socket::wait_for_request(bool *closed) {
    *closed = false;
    return ready(POLLIN, true, 0, 0);
}

// Whoever stops this thread shuts the socket down, which ends every wait at once.
Failure Socket::ready(short events, bool forever, uint64_t done, uint64_t wanted) {
    const uint64_t end = now_ns() + idle_milliseconds_ * 1000000ull;
    while (true) {
        if (stop_ && stop_->load(std::memory_order_acquire)) return failure(TL_ERR_CANCELLED, "stopped");
        const uint64_t now = now_ns();
        if (!forever && now >= end) {
            return lost(ETIMEDOUT, "the other side does nothing", done, wanted);
        }
        pollfd entry{fd_, events, 0};
        const int left =
            forever ? -1 : static_cast<int>(std::clamp<uint64_t>((end - now) / 1000000, 1, INT_MAX));
        const int found = poll(&entry, 1, left);
        if (found > 0) return {};
        if (found < 0 && errno != EINTR) return lost(errno, "cannot wait", done, wanted);
    }
}

}  // namespace tl
