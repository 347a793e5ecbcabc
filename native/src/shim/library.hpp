// A shared library opened at run time, with the reason kept when it cannot be.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>

#include "common.hpp"

namespace tl {

class Library {
public:
    // Opens the first of the names that is there; one that the process has already is preferred, whatever its place.
    explicit Library(std::initializer_list<const char *> names) {
        for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
            for (const char *name : names) {
                handle_ = dlopen(name, flags);
                if (handle_) return;
                const char *error = dlerror();
                if (why_.empty() && flags == RTLD_NOW && error) why_ = error;
            }
        }
    }

    template <class Function>
    void find(Function &function, const char *name) {
        if (!handle_) return;
        void *symbol = dlsym(handle_, name);
        std::memcpy(&function, &symbol, sizeof symbol);
        if (!symbol && why_.empty()) why_ = std::string("the driver library has no ") + name;
    }

    const std::string &why() const {
        return why_;
    }

private:
    void *handle_ = nullptr;
    std::string why_;
};

// The one object for a driver's library, made at the first call that finds it: one that is missing now may be there later.
// Never destroyed: threads of an engine may outlive static destructors when the process exits.
template <class Implementation>
Implementation *opened_once(const char *name, Failure *why) {
    static std::mutex mutex;
    static Implementation *opened = nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    if (opened) return opened;
    auto fresh = std::make_unique<Implementation>();
    if (fresh->why().empty()) return opened = fresh.release();
    *why = failure(TL_ERR_DRIVER, std::string(name) + "'s driver cannot be used: " + fresh->why());
    return nullptr;
}

}  // namespace tl
