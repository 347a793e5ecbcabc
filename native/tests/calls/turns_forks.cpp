// Chunks that pass from a sender to a fork while calls of both ends fail: an ordinary error, or the right bytes.
#include "failing.hpp"
#include "tensorlift_fork.h"

#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>

namespace {

constexpr int kInjected = 999;
constexpr std::uint64_t kBytes = 700001;  // blocks, and a part of one

// One seed, one connection, two chunks of it.
class Fork {
public:
    // origin: a kind, or -1 for the socket alone; in_a_file: the seed's memory is in one that is passed.
    Fork(int origin, bool in_a_file, int kind) : origin_(origin), in_a_file_(in_a_file), kind_(kind) {}

    // See Work.
    std::string run() {
        error_ = no_error();
        said_.clear();
        Shared shared;
        const std::uint8_t *bytes = content_.data();
        std::uint64_t mapped_at = 0;
        if (in_a_file_) {
            if (!note(shared.make(content_, &error_))) return said_;
            bytes = reinterpret_cast<const std::uint8_t *>(shared.address);
            mapped_at = shared.mapped;
        }
        const tl_region region{reinterpret_cast<std::uintptr_t>(bytes), kBytes, kind_, 0};
        tl_sender *sender = nullptr;
        if (!note(tl_sender_create(&region, 1, 0, 0, 60000, &sender, &error_))) return said_;
        int pair[2];
        REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        note(tl_sender_serve(sender, pair[1], &error_));
        tl_origin origin{origin_, 0, mapped_at ? mapped_at : region.address, kBytes};
        if (origin_ == TL_ORIGIN_PROCESS) origin.handle = getpid();
        if (said_.empty()) fetch_all(pair[0], origin_ < 0 ? nullptr : &origin);
        close(pair[0]);
        note(tl_sender_destroy(sender, &error_));
        return said_;
    }

private:
    struct Shared {
        std::int32_t fd = -1;
        std::uint64_t address = 0, mapped = 0, nbytes = 0;

        tl_status make(const Bytes &content, tl_error *error) {
            if (const tl_status status = tl_shared_create(content.size(), &fd, &address, error))
                return status;
            std::copy(content.begin(), content.end(), reinterpret_cast<std::uint8_t *>(address));
            return tl_shared_map(fd, &mapped, &nbytes, error);
        }
        ~Shared() {
            if (mapped) tl_shared_release(-1, mapped, nbytes);
            if (address) tl_shared_release(fd, address, kBytes);
        }
    };

    bool note(tl_status status) {
        if (status == TL_OK) return true;
        const bool ordinary = status == TL_ERR_READ || status == TL_ERR_MEMORY || status == TL_ERR_DRIVER;
        // A file that did not come in a state to be mapped is the caller's to refuse.
        REQUIRE_SAYING(ordinary || (in_a_file_ && status == TL_ERR_ARGUMENT),
                       std::to_string(status) + error_.message);
        REQUIRE(error_.message[0] != 0);
        if (said_.empty()) said_ = error_.message;
        return false;
    }

    void fetch_all(int fd, const tl_origin *origin) {
        tl_staging *staging = nullptr;
        if (kind_ != TL_DEVICE_CPU && !note(tl_staging_create(kind_, 0, &staging, &error_))) return;
        Bytes to(kBytes, kCanary);
        const std::uint64_t half = kBytes / 2;
        for (const std::uint64_t at : {std::uint64_t{0}, half}) {
            tl_chunk chunk{};
            chunk.struct_size = sizeof chunk;
            chunk.offset = at;
            chunk.nbytes = at ? kBytes - half : half;
            chunk.digest = 1;
            chunk.milliseconds = 50000;
            // In two places, with a byte between them that is for nobody.
            const std::uint64_t first = chunk.nbytes / 3;
            const auto address = reinterpret_cast<std::uintptr_t>(to.data()) + at;
            const tl_place places[] = {{0, first, address},
                                       {first + 1, chunk.nbytes - first - 1, address + first + 1}};
            if (!note(tl_chunk_fetch(fd, &chunk, places, 2, staging, origin, &error_))) break;
            REQUIRE_EQ(chunk.outcome, TL_CHUNK_OK);
            REQUIRE(chunk.verified);
            for (const tl_place &place : places) {
                const auto *came = reinterpret_cast<const std::uint8_t *>(place.address);
                REQUIRE(std::equal(came, came + place.nbytes,
                                   content_.begin() + static_cast<long>(at + place.offset)));
            }
            REQUIRE_EQ(to[at + first], kCanary);
        }
        note(tl_staging_destroy(staging, &error_));
    }

    const int origin_;
    const bool in_a_file_;
    const int kind_;
    const Bytes content_ = random_bytes(kBytes, 3);
    tl_error error_{};
    std::string said_;
};

void disturb(const char *what, int origin, bool in_a_file, int kind = TL_DEVICE_CPU) {
    const StandIn *driver = kind == TL_DEVICE_CPU ? nullptr : &standin(kind);
    Fork fork(origin, in_a_file, kind);
    const auto work = [&] {
        std::string said = fork.run();
        if (driver) {
            driver->fail_at_random(0, 0, 0);
            driver->require_clean(true);
        }
        return said;
    };
    fail_each_turn(what, work);
    fail_at_random(what, work, 60, [&](std::uint64_t seed, std::uint32_t in_a_million) {
        if (driver) driver->fail_at_random(seed, in_a_million, kInjected);
    });
}

}  // namespace

TEST(over_a_socket) {
    disturb("a socket", -1, false);
}
TEST(out_of_the_process) {
    disturb("the process", TL_ORIGIN_PROCESS, false);
}
TEST(out_of_a_file_of_memory) {
    disturb("a file of memory", TL_ORIGIN_HERE, true);
}
// It has no way to say that there is none.
TEST(a_digest_takes_no_memory) {
    std::uint32_t index = 0;
    while (calls_name(index) && std::strcmp(calls_name(index), "operator new") != 0) ++index;
    const Bytes content = random_bytes(5 << 20, 9);
    std::uint8_t digest[16];
    calls_reset();
    tl_tensor_digest(content.data(), content.size(), digest);
    REQUIRE(calls_name(index));
    REQUIRE_EQ(calls_count(index), 0u);
}
TEST(between_devices) {
    disturb("devices, over a socket", -1, false, TL_DEVICE_CUDA);
}

TEST_MAIN
