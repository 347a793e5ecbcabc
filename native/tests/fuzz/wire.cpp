// Both ends of a socket on which weights pass, against a peer that says anything: a seed to whoever fetches, a fork to
// whoever sends.
#include "fork/wire.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "input.hpp"
#include "tensorlift_fork.h"

namespace {

constexpr uint8_t kCanary = 0xA5;
constexpr uint64_t kEpoch = 7;
constexpr size_t kMostRequests = 6;
const std::vector<std::vector<uint8_t>> kRegions = {pattern(tl::kBlock + 100, 1), pattern(33, 2), {}};

struct Pair {
    Pair() {
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
        const int room = 2 << 20;
        for (int fd : fds) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    }
    ~Pair() {
        for (int fd : fds) {
            if (fd >= 0) close(fd);
        }
    }
    int fds[2];
};

// As much as there is room for: what the other side does not take it has no use for.
void say(int fd, const std::vector<uint8_t> &bytes) {
    size_t done = 0;
    while (done < bytes.size()) {
        const ssize_t sent = send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent <= 0) break;
        done += static_cast<size_t>(sent);
    }
    shutdown(fd, SHUT_WR);
}

template <class T>
void append(std::vector<uint8_t> *to, const T &part) {
    const auto *from = reinterpret_cast<const uint8_t *>(&part);
    to->insert(to->end(), from, from + sizeof part);
}

tl_error no_error() {
    tl_error error{};
    error.struct_size = sizeof error;
    return error;
}

// What a seed would say of a chunk, for the fuzzer to spoil: else it would have to find a digest.
std::vector<uint8_t> told_by_a_seed(const tl_chunk &chunk, const uint8_t *bytes, bool copies) {
    std::vector<uint8_t> said, digests;
    append(&said, tl::Answer{tl::kAnswer, TL_CHUNK_OK, kEpoch});
    for (uint64_t at = 0; at < chunk.nbytes; at += tl::kBlock) {
        const uint64_t nbytes = std::min(tl::kBlock, chunk.nbytes - at);
        uint8_t digest[16];
        tl_digest(bytes + at, nbytes, digest);
        digests.insert(digests.end(), digest, digest + sizeof digest);
        if (copies) {
            said.insert(said.end(), digest, digest + sizeof digest);
        } else {
            said.insert(said.end(), bytes + at, bytes + at + nbytes);
        }
    }
    tl::Trailer trailer{tl::kTrailer, 1, kEpoch, {}};
    tl_digest(digests.data(), digests.size(), trailer.digest);
    append(&said, trailer);
    return said;
}

// Overwrites, cuts and lengthens what is said.
void spoil(std::vector<uint8_t> *said, Input &input) {
    const auto edits = input.take<uint8_t>() % 4;
    for (int k = 0; k < edits; k++) {
        // From the begin or from the end, where the fields are.
        const auto from = input.take<int16_t>();
        const size_t at = from >= 0 ? static_cast<size_t>(from) : said->size() - static_cast<size_t>(-from);
        const auto value = input.take<uint64_t>();
        for (size_t b = 0; b < sizeof value && at + b < said->size(); b++)
            (*said)[at + b] = static_cast<uint8_t>(value >> 8 * b);
    }
    const auto cut = input.take<uint16_t>();
    if (cut & 1) said->resize(std::min<size_t>(said->size(), cut >> 1));
    const std::vector<uint8_t> more = input.rest();
    said->insert(said->end(), more.begin(), more.end());
}

void fetch_from_an_enemy(Input &input) {
    const auto kind = input.take<uint8_t>();
    const std::vector<uint8_t> &region = kRegions[kind % kRegions.size()];
    tl_chunk chunk{};
    chunk.struct_size = sizeof chunk;
    chunk.region = kind % kRegions.size();
    chunk.offset = region.empty() ? 0 : input.take<uint32_t>() % region.size();
    chunk.nbytes = input.take<uint32_t>() % (region.size() - chunk.offset + 1);
    chunk.epoch = kEpoch;
    chunk.digest = kind & 16;
    chunk.milliseconds = 60'000;
    const bool copies = kind & 32;
    std::vector<uint8_t> memory(chunk.nbytes + 2, kCanary);
    // One place, or two with a hole between them.
    const uint64_t first = kind & 64 ? chunk.nbytes / 3 : chunk.nbytes;
    const uint64_t second = std::min<uint64_t>(first + (kind & 64 ? 5 : 0), chunk.nbytes);
    uint8_t *to = memory.data() + 1;
    const tl_place places[2] = {{0, first, reinterpret_cast<uint64_t>(to)},
                                {second, chunk.nbytes - second, reinterpret_cast<uint64_t>(to + second)}};
    std::vector<uint8_t> said = told_by_a_seed(chunk, region.data() + chunk.offset, copies);
    if (kind & 128) {
        said = input.rest();
    } else {
        spoil(&said, input);
    }
    tl_origin origin{TL_ORIGIN_HERE, 0, reinterpret_cast<uint64_t>(region.data()), region.size()};
    Pair pair;
    say(pair.fds[0], said);
    tl_error error = no_error();
    const tl_status status =
        tl_chunk_fetch(pair.fds[1], &chunk, places, 2, nullptr, copies ? &origin : nullptr, &error);
    REQUIRE(status == TL_OK || status == TL_ERR_READ);
    REQUIRE(memory.front() == kCanary && memory.back() == kCanary);
    for (uint64_t at = first; at < second; at++) REQUIRE(to[at] == kCanary);
    if (status != TL_OK || chunk.outcome != TL_CHUNK_OK || !chunk.verified) return;
    // The enemy knows no other bytes with this digest than those that were made for it.
    for (uint64_t at = 0; at < chunk.nbytes; at++) {
        if (at >= first && at < second) continue;
        REQUIRE(to[at] == (copies ? region[chunk.offset + at] : said[sizeof(tl::Answer) + at]));
    }
}

// How many bytes came behind an answer that are those of the region; all that an honest answer has.
void look_at_answers(const std::vector<uint8_t> &came, const std::vector<tl::ChunkRequest> &asked) {
    size_t at = 0;
    for (const tl::ChunkRequest &request : asked) {
        tl::Answer answer{};
        if (came.size() - at < sizeof answer) return;
        std::memcpy(&answer, came.data() + at, sizeof answer);
        at += sizeof answer;
        REQUIRE(answer.magic == tl::kAnswer && answer.epoch == kEpoch);
        const bool there = request.region < kRegions.size() &&
                           request.offset <= kRegions[request.region].size() &&
                           request.nbytes <= kRegions[request.region].size() - request.offset;
        const bool is_one = request.magic == tl::kRequest;
        REQUIRE((answer.outcome == TL_CHUNK_RANGE) == !(there && is_one));
        if (answer.outcome == TL_CHUNK_RANGE) REQUIRE(came.size() == at);
        // Where none is sent, what says that it was copied is another request; else digests come.
        if (request.copies) return;
        if (answer.outcome != TL_CHUNK_OK) continue;
        REQUIRE(request.epoch == kEpoch);
        if (came.size() - at < request.nbytes) return;
        if (request.nbytes)
            REQUIRE(std::memcmp(came.data() + at, kRegions[request.region].data() + request.offset,
                                request.nbytes) == 0);
        at += request.nbytes + sizeof(tl::Trailer);
        if (at > came.size()) return;
    }
}

void send_to_an_enemy(Input &input) {
    std::vector<uint8_t> said;
    std::vector<tl::ChunkRequest> asked;
    const auto requests = input.take<uint8_t>() % kMostRequests;
    for (unsigned k = 0; k < requests; k++) {
        const auto kind = input.take<uint8_t>();
        tl::ChunkRequest request{tl::kRequest, kind % 4u, 0, 0, kEpoch, kind & 8u, kind & 16u};
        request.offset = kind & 32 ? input.take<uint64_t>() : input.take<uint16_t>();
        request.nbytes = kind & 64 ? input.take<uint64_t>() : input.take<uint16_t>();
        if (kind & 128) request.epoch = input.take<uint8_t>();
        append(&said, request);
        asked.push_back(request);
        if (request.copies) append(&said, tl::Copied{tl::kCopied});
    }
    const std::vector<uint8_t> more = input.rest();
    said.insert(said.end(), more.begin(),
                more.begin() + static_cast<long>(std::min<size_t>(more.size(), 200)));
    std::vector<tl_region> regions;
    for (const auto &bytes : kRegions)
        regions.push_back({reinterpret_cast<uint64_t>(bytes.data()), bytes.size(), TL_DEVICE_CPU, 0});
    tl_error error = no_error();
    tl_sender *sender = nullptr;
    REQUIRE(tl_sender_create(regions.data(), regions.size(), 0, 0, 60'000, &sender, &error) == TL_OK);
    REQUIRE(tl_sender_set_epoch(sender, kEpoch, 1, &error) == TL_OK);
    Pair pair;
    REQUIRE(tl_sender_serve(sender, std::exchange(pair.fds[1], -1), &error) == TL_OK);
    say(pair.fds[0], said);
    std::vector<uint8_t> came, part(1 << 16);
    for (ssize_t got; (got = recv(pair.fds[0], part.data(), part.size(), 0)) > 0;)
        came.insert(came.end(), part.begin(), part.begin() + got);
    REQUIRE(tl_sender_destroy(sender, &error) == TL_OK);
    look_at_answers(came, asked);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes) {
    Input input(bytes, nbytes);
    if (input.take<uint8_t>() & 1) {
        fetch_from_an_enemy(input);
    } else {
        send_to_an_enemy(input);
    }
    return 0;
}
