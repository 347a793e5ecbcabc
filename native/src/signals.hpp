// Threads of ours take no signal: signals belong to the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace tl {

// Threads that are started while it lives inherit that all is blocked.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() {
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }

private:
    sigset_t before_;
};

}  // namespace tl
