// The least that tests need: TEST(name) { REQUIRE(condition); } and a main that runs them.
#pragma once

#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Test {
    const char *name;
    void (*run)();
};

inline std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

struct Registration {
    Registration(const char *name, void (*run)()) {
        tests().push_back({name, run});
    }
};

template <class A, class B>
void equal(const A &a, const B &b, const char *what, const char *file, int line) {
    if (!(a == b)) {
        std::ostringstream text;
        text << file << ":" << line << ": " << what << ": " << a << " != " << b;
        throw Failure(text.str());
    }
}

inline void holds(bool condition, const std::string &what, const char *file, int line) {
    if (!condition) {
        throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
    }
}

// Runs the tests whose name contains one of the arguments, all without arguments.
inline int main(int argc, char **argv) {
    int failed = 0;
    for (const Test &test : tests()) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; ++i) {
            wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
        }
        if (!wanted) {
            continue;
        }
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        try {
            test.run();
        } catch (const std::exception &error) {
            std::printf("FAILED %s\n  %s\n", test.name, error.what());
            ++failed;
        }
        std::fflush(stdout);
    }
    return failed ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                                           \
    static void name();                                                      \
    static const check::Registration registration_of_##name{#name, &(name)}; \
    static void name()
#define REQUIRE(condition) check::holds(condition, #condition, __FILE__, __LINE__)
#define REQUIRE_SAYING(condition, text) \
    check::holds(condition, std::string(#condition ": ") + (text), __FILE__, __LINE__)
#define REQUIRE_EQ(a, b) check::equal(a, b, #a " == " #b, __FILE__, __LINE__)
#define TEST_MAIN                       \
    int main(int argc, char **argv) {   \
        return check::main(argc, argv); \
    }
