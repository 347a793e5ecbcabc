// How the bytes of a chunk come: by the route of its file, what is cached on this thread, the rest by a deep reader.
#include <sys/mman.h>

#include <algorithm>
#include <tuple>

#include "engine.hpp"
#include "rows.hpp"
#include "straight.hpp"

namespace tl {
namespace {

// Of one read that goes through a buffer: every read in flight may have such a buffer.
constexpr uint64_t kMostBounced = 1u << 20;

// Has the pages of fresh memory made on this thread, one of several: io_uring and AIO would make them where the read is
// submitted, all on one thread. Costs little where they are there; where the kernel is older than 5.14 or the memory
// cannot be written, the read decides.
void populate(char *begin, uint64_t nbytes) {
    const auto first = reinterpret_cast<uintptr_t>(begin) / kPage * kPage;
    madvise(reinterpret_cast<void *>(first), reinterpret_cast<uintptr_t>(begin) + nbytes - first,
            kPopulateWrite);
}

}  // namespace

char *Engine::slot_base(const Slot &slot) const {
    if (!device_) return nullptr;
    std::string note;
    return ring_->prepare(slot.place, &note) + slot.shift;
}

// Opens the file if need be and decides its route; a copy of the route comes back. Where descriptors are short, files
// that others are reading are waited for.
Failure Engine::ready_file(File *file, Route *route) {
    for (;;) {
        const uint64_t closes = closes_.load();
        Failure f = open_and_route(file, route);
        if (!no_descriptors(f.os_errno) || !wait_for_a_close(closes)) return f;
    }
}

Failure Engine::open_and_route(File *file, Route *route) {
    std::lock_guard<std::mutex> lock(file->mutex);
    if (Failure f = file->open_plain()) return f;
    if (!file->routed) {
        if (Failure f = choose_route(file, options_)) {
            file->close();  // nobody reads it yet
            return f;
        }
    } else if (file->route.deep_path == TL_PATH_CUFILE && !file->cufile) {
        const std::string why = file->open_cufile();
        if (file->shortage) return file->open_failed(file->shortage);
        if (!why.empty()) {
            if (Failure f = drop_path(file, TL_PATH_CUFILE, why, options_)) return f;
        }
    } else if (is_direct(file->route.deep_path)) {
        const int refusal = file->open_direct();
        if (refusal != 0) return file->open_failed(refusal);
    }
    *route = file->route;
    return {};
}

DeepReader *Engine::deep_reader(int path, Failure *why) {
    std::lock_guard<std::mutex> lock(deep_mutex_);
    auto &reader = deep_[path];
    if (reader) return reader.get();
    if (stopping()) deep_why_[path] = failure(TL_ERR_CANCELLED, "the load has ended");
    if (!deep_why_[path]) {
        auto fresh = make_deep_reader(this, path, {options_.io_depth, options_.threads});
        deep_why_[path] = fresh->start();
        if (!deep_why_[path]) reader = std::move(fresh);
    }
    *why = deep_why_[path];
    return reader.get();
}

// False after a failure.
bool Engine::make_slot(uint64_t k) {
    std::string note;
    if (!ring_->prepare(k, &note)) {
        failed(failure(TL_ERR_MEMORY, "no host memory for the pinned ring"));
        return false;
    }
    if (!note.empty()) add_note(note);
    return true;
}

void Engine::fetch(Chunk *chunk) {
    File *file;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        file = files_[static_cast<size_t>(chunk->file)].get();
    }
    Route route;
    if (Failure f = ready_file(file, &route)) {
        f.file = file->index;
        return failed(f);
    }
    if (!route.by_residency) {
        if (!fetch_range(chunk, file, route, chunk->begin, chunk->end)) return;
    } else {
        const uint64_t begin = trace_.begin();
        const auto segments = segments_of(*chunk, *file);
        trace_.end(begin, TL_STAGE_ASK_CACHE, file->index, chunk->begin, chunk->end - chunk->begin);
        for (const Segment &s : segments) {
            Route part = route;
            (s.resident ? part.deep_path : part.cached_path) = -1;
            if (!fetch_range(chunk, file, part, s.begin, s.end)) return;
        }
    }
    part_done(chunk, false);
}

// What of a chunk is cached. Of what lies between rows that are read one by one nothing is asked, unless all is alike.
std::vector<Segment> Engine::segments_of(const Chunk &chunk, const File &file) const {
    const auto ask = [&](uint64_t begin, uint64_t end) {
        return Residency::segments(file.residency, file.plain_fd, begin, end);
    };
    if (!is_sparse(chunk, kPage)) return ask(chunk.begin, chunk.end);
    const auto alike = Residency::alike(file.residency, file.plain_fd, chunk.begin, chunk.end);
    if (alike) return {{chunk.begin, chunk.end, *alike}};
    std::vector<Segment> all;
    each_part(chunk, chunk.begin, chunk.end, [&](uint64_t, uint64_t from, uint64_t to) {
        for (const Segment &s : ask(from, to)) {
            if (!all.empty() && all.back().resident == s.resident) {
                all.back().end = s.end;
            } else {
                all.push_back(s);
            }
        }
    });
    return all;
}

// One path is set in the route: the one to take. False if the range will not come: then the chunk never counts as done.
bool Engine::fetch_range(Chunk *chunk, File *file, const Route &route, uint64_t begin, uint64_t end) {
    const bool cufile = route.deep_path == TL_PATH_CUFILE;
    const bool packed = chunk->fill().strided();
    if (cufile && chunk->slot->digests.empty() && !packed) return fetch_straight(chunk, file, begin, end);
    if (device_ && !make_slot(chunk->slot->place)) return false;
    if (cufile) {
        std::lock_guard<std::mutex> lock(file->mutex);
        file->note(
            packed ? "CUFILE: columns are packed in host memory: slices of them are read by buffered pread"
                   : "CUFILE: digests are made in host memory: what has one is read by buffered pread");
    }
    if (cufile) return fetch_cached(chunk, file, TL_PATH_PREAD_BUFFERED, begin, end);
    if (route.deep_path >= 0) return fetch_deep(chunk, file, route.deep_path, begin, end);
    if (chunk->digest_count > 0 && begin == chunk->begin && end == chunk->end) {
        return fetch_and_digest(chunk, file, route.cached_path);
    }
    return fetch_cached(chunk, file, route.cached_path, begin, end);
}

// Whole blocks that fit their place are read in place; what is left at the ends, and what does not fit, goes through a
// buffer of the reader. For a buffered path every byte is a block.
bool Engine::fetch_deep(Chunk *chunk, File *file, int path, uint64_t begin, uint64_t end) {
    Failure why;
    DeepReader *reader = deep_reader(path, &why);
    if (!reader) return path_refused(chunk, file, path, why.message, begin, end);
    const uint64_t block = is_direct(path) ? file->block : 1;
    // Rows whose blocks may be the same are read together.
    each_stretch(*chunk, begin, end, std::max(kPage, block), [&](uint64_t from, uint64_t to) {
        push_blocks(reader, {chunk, file, from, to, nullptr}, block);
    });
    return true;
}

void Engine::push_blocks(DeepReader *reader, const Request &all, uint64_t block) {
    const auto [chunk, file, begin, end] = std::tie(all.chunk, all.file, all.begin, all.end);
    const uint64_t head = round_up(begin, block);
    const uint64_t tail = round_down(end, block);
    uint64_t where = 0;
    const bool one = is_one_part(*chunk, head, tail, &where);
    char *place = one ? address(slot_base(*chunk->slot), where) : nullptr;
    if (!one || reinterpret_cast<uintptr_t>(place) % block != 0) {
        for (uint64_t at = begin; at < end;) {
            const uint64_t next = std::min(end, round_down(at + kMostBounced, block));
            push(reader, {chunk, file, at, next, nullptr});
            at = next;
        }
        return;
    }
    if (!device_) populate(place, tail - head);
    push(reader, {chunk, file, head, tail, place});
    if (begin < head) push(reader, {chunk, file, begin, head, nullptr});
    if (tail < end) push(reader, {chunk, file, tail, end, nullptr});
}

// To where the slot's copies would have gone, and when they would: a read that the stream does not order comes after what
// the consumer's stream held at the submission.
bool Engine::fetch_straight(Chunk *chunk, File *file, uint64_t begin, uint64_t end) {
    Failure why;
    DeepReader *reader = deep_reader(TL_PATH_CUFILE, &why);
    if (!reader) return path_refused(chunk, file, TL_PATH_CUFILE, why.message, begin, end);
    if (Failure f = copier_->pass_fence(chunk->slot->fence)) {
        failed(f);
        return false;
    }
    for (const Part &part : device_parts(*chunk, begin, end)) {
        push(reader, {chunk, file, part.begin, part.end, reinterpret_cast<char *>(part.copy.destination)});
    }
    return true;
}

void Engine::push(DeepReader *reader, const Request &request) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        request.chunk->pending++;
    }
    reader->push(request);
}

void Engine::complete(const Request &request, int path, const char *bounced) {
    uint64_t delivered = 0;
    if (bounced) {
        char *base = slot_base(*request.chunk->slot);
        delivered = unpack(*request.chunk, base, bounced, {request.begin, request.end});
        bounced_bytes_ += delivered;
    } else {
        delivered = request.end - request.begin;
    }
    bytes_[path] += delivered;
    guarded([&] {
        if (path == TL_PATH_CUFILE) {
            std::lock_guard<std::mutex> lock(mutex_);
            request.chunk->straight.push_back({request.begin, request.end});
        }
        trace_.end(request.begin_ns, TL_STAGE_READ, request.file->index, request.begin,
                   request.end - request.begin, path);
        part_done(request.chunk, true);
    });
}

void Engine::refused(const Request &request, int path, const std::string &why, uint64_t got) {
    guarded([&] {
        if (path_refused(request.chunk, request.file, path, why, request.begin, request.end, got)) {
            part_done(request.chunk, true);
        }
    });
}

// Reads the range again by what is left of the file's route.
bool Engine::path_refused(Chunk *chunk, File *file, int path, const std::string &why, uint64_t begin,
                          uint64_t end, std::optional<uint64_t> got) {
    if (stopping()) return false;
    Route route;
    {
        std::lock_guard<std::mutex> lock(file->mutex);
        if (Failure f = drop_path(file, path, why, options_)) {
            if (got) {
                f.offset = begin;
                f.wanted = end - begin;
                f.got = *got;
            }
            failed(f);
            return false;
        }
        route = file->route;
    }
    // Another thread was first, and found that nothing is left: it says so.
    if (route.deep_path < 0 && route.cached_path < 0) return false;
    // The deep path where there is a choice: most likely it was asked for because the range is not cached.
    if (route.deep_path >= 0) route.cached_path = -1;
    return fetch_range(chunk, file, route, begin, end);
}

void Engine::count_read(int path, uint64_t nbytes) {
    reads_[path]++;
    if (is_direct(path)) direct_bytes_ += nbytes;
}

void Engine::add_note(const std::string &note) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (notes_.find(note) != std::string::npos) return;
    if (!notes_.empty()) notes_ += '\n';
    notes_ += note;
}

void Engine::stats(tl_stats *stats) {
    for (int i = 0; i < TL_PATH_COUNT; i++) {
        stats->bytes_by_path[i] = bytes_[i];
        stats->reads_by_path[i] = reads_[i];
    }
    stats->direct_bytes_read = direct_bytes_;
    stats->bounced_bytes = bounced_bytes_;
    stats->copies = copies_;
    stats->slot_wait_ns = slot_wait_ns_;
    stats->pinned_bytes = ring_ ? ring_->pinned_bytes() : 0;
    stats->pinned_peak_bytes = ring_ ? ring_->pinned_peak_bytes() : 0;
    stats->pinned_reused_bytes = ring_ ? ring_->reused_bytes() : 0;
    uint32_t threads = copier_runs_ ? 1 : 0;
    {
        std::lock_guard<std::mutex> lock(deep_mutex_);
        for (const auto &reader : deep_) {
            if (reader) threads += reader->threads();
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    stats->threads = threads + static_cast<uint32_t>(threads_.size());
    stats->open_files = 0;
    for (const auto &file : files_) stats->open_files += file->outstanding > 0;
    copy_text(stats->notes, sizeof stats->notes, notes_);
}

Failure Engine::file_info(int32_t index, tl_file_info *info) {
    File *file;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (index < 0 || static_cast<size_t>(index) >= files_.size()) {
            return failure(TL_ERR_ARGUMENT, "no such file: " + std::to_string(index));
        }
        file = files_[static_cast<size_t>(index)].get();
    }
    std::lock_guard<std::mutex> lock(file->mutex);
    info->backend = file->routed ? file->route.backend : -1;
    info->cached_path = file->route.cached_path;
    info->waiting_path = file->route.deep_path;
    copy_text(info->residency, sizeof info->residency, file->routed ? Residency::name(file->residency) : "");
    copy_text(info->fallback, sizeof info->fallback, file->notes);
    return {};
}

}  // namespace tl
