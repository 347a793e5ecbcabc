#include "python.hpp"

#include <dlfcn.h>

#include <cstring>

namespace tl {
namespace {

template <class Function>
bool find(Function &function, const char *name) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    std::memcpy(&function, &symbol, sizeof symbol);
    return symbol != nullptr;
}

}  // namespace

const Python &python() {
    static const Python found = [] {
        Python p;
        p.there = find(p.list_new, "PyList_New") & find(p.list_set, "PyList_SetItem") &
                  find(p.tuple_new, "PyTuple_New") & find(p.tuple_set, "PyTuple_SetItem") &
                  find(p.integer, "PyLong_FromLongLong") & find(p.text, "PyUnicode_DecodeUTF8") &
                  find(p.bytes, "PyBytes_FromStringAndSize") & find(p.capsule_new, "PyCapsule_New") &
                  find(p.capsule_is_valid, "PyCapsule_IsValid") &
                  find(p.capsule_get, "PyCapsule_GetPointer") & find(p.incref, "Py_IncRef") &
                  find(p.decref, "Py_DecRef") & find(p.no_memory, "PyErr_NoMemory");
        return p;
    }();
    return found;
}

}  // namespace tl
