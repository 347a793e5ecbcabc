#include "readers/deep.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>

namespace tl {
namespace {

// A kernel that is short of something answers EAGAIN for a while; one that goes on doing so does not want this way.
constexpr int kRetries = 100;

}  // namespace

bool means_refused(int os_errno) {
    switch (os_errno) {
        case EINVAL:      // direct I/O not supported, or another alignment
        case EOPNOTSUPP:  // by this file system
        case EPERM:       // seccomp, Yama
        case EACCES:
        case ENOSYS:  // an older kernel
        case ENOMEM:  // memlock
        case ENODEV:  // a file system that cannot be mapped
        case EFAULT:  // memory that cannot be pinned for direct I/O
        case EAGAIN:  // without end: kernels that are short of something say it for a while only
        case EBUSY:
            return true;
        default:
            return false;
    }
}

Bounce::~Bounce() {
    std::free(memory_);
}

char *Bounce::reserve(uint64_t nbytes) {
    if (nbytes <= nbytes_) return memory_;
    std::free(memory_);
    nbytes_ = 0;
    // 64 KiB: the largest block that File accepts.
    memory_ = static_cast<char *>(std::aligned_alloc(64 << 10, round_up(nbytes, 64 << 10)));
    if (memory_) nbytes_ = nbytes;
    return memory_;
}

bool DeepRead::begin(const Request &request, bool direct, Bounce *bounce) {
    request_ = request;
    request_.begin_ns = now_ns();
    direct_ = direct;
    block_ = direct ? request.file->block : 1;
    got_ = 0;
    retries_ = 0;
    begin_ = round_down(request.begin, block_);
    end_ = round_up(request.end, block_);
    buffer_ = request.in_place ? request.in_place : bounce->reserve(end_ - begin_);
    return buffer_ != nullptr;
}

DeepRead::Outcome DeepRead::on_result(int64_t result, Failure *why) {
    const File &file = *request_.file;
    const uint64_t wanted = request_.end - request_.begin;
    const uint64_t before = begin_ + got_ > request_.begin ? begin_ + got_ - request_.begin : 0;
    if ((result == -EINTR || result == -EAGAIN) && retries_++ < kRetries) return Outcome::kMore;
    if (result < 0) {
        *why = file.read_failed(static_cast<int>(-result), request_.begin, wanted, before);
        return means_refused(static_cast<int>(-result)) ? Outcome::kRefused : Outcome::kFailed;
    }
    const uint64_t there = begin_ + got_ + static_cast<uint64_t>(result);
    if (there >= request_.end) return Outcome::kDone;
    // Short. Go on at a whole block; without progress by a block the file has ended.
    const uint64_t whole = round_down(static_cast<uint64_t>(result), block_);
    if (whole == 0) {
        *why = file.truncated(request_.begin, wanted, there > request_.begin ? there - request_.begin : 0);
        return Outcome::kFailed;
    }
    got_ += whole;
    return Outcome::kMore;
}

void RequestQueue::push(const Request &request) {
    std::unique_lock<std::mutex> lock(mutex_);
    not_full_.wait(lock, [&] { return queue_.size() < limit_ || sink_->stopping(); });
    if (sink_->stopping()) return;
    queue_.push_back(request);
    lock.unlock();
    not_empty_.notify_one();
}

bool RequestQueue::pop(Request *request, bool wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) not_empty_.wait(lock, [&] { return !queue_.empty() || sink_->stopping(); });
    if (queue_.empty() || sink_->stopping()) return false;
    *request = queue_.front();
    queue_.pop_front();
    lock.unlock();
    not_full_.notify_one();
    return true;
}

void RequestQueue::wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    not_empty_.notify_all();
    not_full_.notify_all();
}

size_t RequestQueue::size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.size();
}

}  // namespace tl
