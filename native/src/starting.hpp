// Threads of ours: how they are started. They take no signal, for signals belong to the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace tl {

// Calls start(), which makes a thread. 0, or the errno of why there is none; what start() does besides is undone by itself.
template <class Start>
int start_thread(Start start) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a thread inherits it
    int code = 0;
    try {
        start();
    } catch (const std::system_error &error) {
        code = error.code().value();
    } catch (const std::bad_alloc &) {
        code = ENOMEM;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return code;
}

}  // namespace tl
