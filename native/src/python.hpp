// The few functions of the running Python that make objects, looked up in the process: the library needs no headers and
// serves every Python. To be called with the GIL.
#pragma once

#include <cstdint>

namespace tl {

struct Python {
    void *(*list_new)(intptr_t) = nullptr;
    int (*list_set)(void *, intptr_t, void *) = nullptr;  // takes the reference over, as tuple_set
    void *(*tuple_new)(intptr_t) = nullptr;
    int (*tuple_set)(void *, intptr_t, void *) = nullptr;
    void *(*integer)(long long) = nullptr;
    void *(*text)(const char *, intptr_t, const char *errors) = nullptr;  // from UTF-8
    void *(*bytes)(const char *, intptr_t) = nullptr;
    void *(*capsule_new)(void *, const char *, void (*)(void *)) = nullptr;
    int (*capsule_is_valid)(void *, const char *) = nullptr;
    void *(*capsule_get)(void *, const char *) = nullptr;
    void (*incref)(void *) = nullptr;
    void (*decref)(void *) = nullptr;
    void *(*no_memory)() = nullptr;
    bool there = false;
};

const Python &python();

}  // namespace tl
