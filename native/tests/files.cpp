// Files that are not what they were said to be: an ordinary error, in every back end, whenever it shows.
#include "support.hpp"

#include <sys/stat.h>
#include <cerrno>
#include <cstdio>

namespace {

struct Outcome {
    tl_status status;
    tl_error error;
};

// Reads [from, from + nbytes) of a file that is announced with so many bytes.
Outcome read_part(Engine &engine, std::int32_t file, std::uint64_t from, std::uint64_t nbytes) {
    Bytes memory(nbytes, kCanary);
    engine.submit({{from, nbytes, reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}});
    const tl_status status = engine.wait();
    const tl_error error = engine.error;
    engine.destroy();  // before its memory goes
    return {status, error};
}

template <class Run>
void for_each_usable(Run run) {
    Folder folder;
    const std::string path = folder.file("data");
    for (const std::uint32_t backend : kBackends) {
        write_file(path, random_bytes(1000000, 2));
        const std::string reason = refusal(backend, path);
        if (!reason.empty()) {
            std::printf("  skipped %s: %s\n", backend_name(backend), reason.c_str());
            continue;
        }
        try {
            run(backend, folder, path);
        } catch (const std::exception &error) {
            throw check::Failure(std::string(backend_name(backend)) + ": " + error.what());
        }
    }
}

}  // namespace

TEST(shorter_than_announced) {
    for_each_usable([](std::uint32_t backend, const Folder &, const std::string &path) {
        Engine engine(options_for(TL_DEVICE_CPU, {backend}));
        const std::int32_t file = engine.add(path, 1000000);
        truncate_file(path, 700001);
        const Outcome outcome = read_part(engine, file, 0, 1000000);
        REQUIRE_EQ(outcome.status, TL_ERR_TRUNCATED);
        REQUIRE_EQ(outcome.error.status, static_cast<std::int32_t>(TL_ERR_TRUNCATED));
        REQUIRE_EQ(outcome.error.file, file);
        REQUIRE(outcome.error.wanted > outcome.error.got);
        REQUIRE(outcome.error.message[0] != 0);
    });
}

TEST(more_than_the_file_has_is_refused_before_it_is_planned) {
    // A plan of a petabyte would take gigabytes by itself.
    const Folder folder;
    write_file(folder.file("a"), random_bytes(10000, 1));
    for (const int kind : {static_cast<int>(TL_DEVICE_CPU), static_cast<int>(TL_DEVICE_CUDA)}) {
        if (kind == TL_DEVICE_CUDA) standin(kind);
        Engine engine(options_for(kind));
        const std::int32_t file = engine.add(folder.file("a"), 10000);
        Bytes memory(10000);
        const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
        for (const auto &[offset, nbytes] :
             std::vector<std::pair<std::uint64_t, std::uint64_t>>{{0, std::uint64_t{1} << 50},
                                                                  {0, 10001},
                                                                  {9999, 2},
                                                                  {10001, 0},
                                                                  {std::uint64_t{1} << 62, 1}}) {
            REQUIRE_EQ(engine.submit({{offset, nbytes, at, file, 0, 0, 0}}), TL_ERR_ARGUMENT);
            REQUIRE(std::strstr(engine.error.message, "past the end of its file") != nullptr);
        }
        REQUIRE_EQ(engine.submit({{0, 10000, at, file, 0, 0, 0}, {10000, 0, at, file, 0, 0, 0}}), TL_OK);
        REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        engine.destroy();
    }
}

TEST(emptied) {
    for_each_usable([](std::uint32_t backend, const Folder &, const std::string &path) {
        Engine engine(options_for(TL_DEVICE_CPU, {backend}));
        const std::int32_t file = engine.add(path, 1000000);
        truncate_file(path, 0);
        REQUIRE_EQ(read_part(engine, file, 4096, 100000).status, TL_ERR_TRUNCATED);
    });
}

TEST(truncated_between_two_reads) {
    for_each_usable([](std::uint32_t backend, const Folder &, const std::string &path) {
        Engine engine(options_for(TL_DEVICE_CPU, {backend}));
        const std::int32_t file = engine.add(path, 1000000);
        Bytes memory(1000000);
        const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
        engine.submit({{0, 300000, at, file, 0, 0, 0}});
        REQUIRE_SAYING(engine.wait() == TL_OK, engine.error.message);
        truncate_file(path, 400000);
        engine.submit({{300000, 700000, at + 300000, file, 0, 0, 0}});
        REQUIRE_EQ(engine.wait(), TL_ERR_TRUNCATED);
        // What had landed stays landed; what comes later gets the same answer.
        tl_error error = no_error();
        REQUIRE_EQ(tl_engine_wait(engine.get(), 1, 0, &error), TL_OK);
        REQUIRE_EQ(tl_engine_wait(engine.get(), 2, 0, &error), TL_ERR_TRUNCATED);
        engine.destroy();
    });
}

TEST(truncated_while_it_is_open_and_read) {
    // A held consumer stops a ring of two slots, so the file is open and half read when it is cut.
    const StandIn &device = standin(TL_DEVICE_CUDA);
    for_each_usable([&](std::uint32_t backend, const Folder &, const std::string &path) {
        tl_options options = options_for(TL_DEVICE_CUDA, {backend});
        options.pinned_bytes = 2 * options.slot_bytes;
        const std::uint64_t consumer = device.stream();
        const std::uint64_t gate = device.hold(consumer);
        Bytes memory(1000000);
        {
            Engine engine(options);
            const std::int32_t file = engine.add(path, 1000000);
            engine.submit({{0, 1000000, reinterpret_cast<std::uintptr_t>(memory.data()), file, 0, 0, 0}},
                          consumer);
            tl_error error = no_error();
            REQUIRE_EQ(tl_engine_wait(engine.get(), engine.ticket, 30, &error), TL_PENDING);
            truncate_file(path, 900000);
            device.release(gate);
            REQUIRE_EQ(engine.wait(), TL_ERR_TRUNCATED);
        }
        device.stream_sync(consumer);
        device.stream_free(consumer);
        device.require_clean();
    });
}

TEST(replaced_by_another_file) {
    for_each_usable([](std::uint32_t backend, const Folder &folder, const std::string &path) {
        Engine engine(options_for(TL_DEVICE_CPU, {backend}));
        const std::int32_t file = engine.add(path, 1000000);
        write_file(folder.file("other"), random_bytes(1000000, 77));
        REQUIRE_EQ(std::rename(folder.file("other").c_str(), path.c_str()), 0);
        const Outcome outcome = read_part(engine, file, 0, 1000);
        REQUIRE_EQ(outcome.status, TL_ERR_REPLACED);
        REQUIRE_EQ(outcome.error.file, file);
        REQUIRE(outcome.error.message[0] != 0);
    });
}

TEST(gone) {
    for_each_usable([](std::uint32_t backend, const Folder &, const std::string &path) {
        Engine engine(options_for(TL_DEVICE_CPU, {backend}));
        const std::int32_t file = engine.add(path, 1000000);
        REQUIRE_EQ(std::remove(path.c_str()), 0);
        const Outcome outcome = read_part(engine, file, 0, 1000);
        REQUIRE_EQ(outcome.status, TL_ERR_OPEN);
        REQUIRE_EQ(outcome.error.os_errno, ENOENT);
        REQUIRE_EQ(outcome.error.file, file);
        REQUIRE(outcome.error.message[0] != 0);
    });
}

TEST(a_folder_or_a_pipe) {
    for_each_usable([](std::uint32_t backend, const Folder &folder, const std::string &) {
        const std::string odd = folder.file(backend_name(backend));
        REQUIRE_EQ(mkdir(odd.c_str(), 0700), 0);
        const std::string pipe = odd + ".pipe";
        REQUIRE_EQ(mkfifo(pipe.c_str(), 0600), 0);
        for (const std::string &path : {odd, pipe}) {
            Engine engine(options_for(TL_DEVICE_CPU, {backend}));
            const Outcome outcome = read_part(engine, engine.add(path, 5000), 0, 1000);
            REQUIRE_SAYING(outcome.status != TL_OK && outcome.status != TL_PENDING, path);
            REQUIRE_SAYING(outcome.error.message[0] != 0, path);
        }
    });
}

TEST(grown_files_are_read_as_announced) {
    for_each_usable([](std::uint32_t backend, const Folder &, const std::string &path) {
        Engine engine(options_for(TL_DEVICE_CPU, {backend}));
        const std::int32_t file = engine.add(path, 1000000);
        truncate_file(path, 2000000);
        const Outcome outcome = read_part(engine, file, 999000, 1000);
        REQUIRE(outcome.status == TL_OK || outcome.status == TL_ERR_REPLACED);
    });
}

TEST_MAIN
