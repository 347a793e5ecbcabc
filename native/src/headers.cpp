// The headers of files, opened, read and scanned by a few threads: nothing of it wants the GIL, which each step of it
// would otherwise give away. What cannot be read is left to Python's reader, which says why.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "descriptor.hpp"
#include "header.hpp"
#include "starting.hpp"

namespace tl {
namespace {

// Bytes of the first read: the whole header of a usual shard (a few hundred tensors take 30 to 60 kB).
constexpr size_t kFirstRead = 64 << 10;
constexpr uint64_t kLongestHeader = 100'000'000;

bool read_whole(int fd, char *to, size_t nbytes) {
    while (nbytes > 0) {
        const ssize_t got = read(fd, to, nbytes);
        if (got <= 0) return false;
        to += got;
        nbytes -= static_cast<size_t>(got);
    }
    return true;
}

// False where anything is not as it has to be.
bool read_text(const char *path, tl_header *header) {
    // O_NONBLOCK: opening a named pipe that took the file's place must not wait for a writer.
    const Descriptor file(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat about;
    if (file.get() < 0 || fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode)) return false;
    header->file_bytes = static_cast<uint64_t>(about.st_size);
    header->device = about.st_dev;
    header->inode = about.st_ino;
    // No readahead: what it brings of a cold file the engine would read again, directly.
    posix_fadvise(file.get(), 0, 0, POSIX_FADV_RANDOM);
    // Plain read() on purpose: it works where a sandbox forbids the calls that take an offset.
    header->memory.reset(new char[kFirstRead]);
    const ssize_t got = read(file.get(), header->memory.get(), kFirstRead);
    if (got <= static_cast<ssize_t>(kHeaderLength) || header->memory[kHeaderLength] != '{') return false;
    uint64_t length = 0;  // little endian
    for (size_t i = kHeaderLength; i-- > 0;) {
        length = length << 8 | static_cast<unsigned char>(header->memory[i]);
    }
    if (length < 2 || length > kLongestHeader || length > header->file_bytes - kHeaderLength) return false;
    char *text = header->memory.get() + kHeaderLength;
    if (length > static_cast<uint64_t>(got) - kHeaderLength) {
        std::unique_ptr<char[]> larger(new char[length]);
        if (lseek(file.get(), kHeaderLength, SEEK_SET) < 0 || !read_whole(file.get(), larger.get(), length))
            return false;
        header->memory = std::move(larger);
        text = header->memory.get();
    }
    header->text = {text, length};
    return true;
}

std::unique_ptr<tl_header> read_header(const char *path, const Dtypes &dtypes) try {
    auto header = std::make_unique<tl_header>();
    if (!read_text(path, header.get())) return nullptr;
    scan(dtypes, header.get());
    return header;
} catch (const std::exception &) {
    return nullptr;  // no memory
}

}  // namespace
}  // namespace tl

struct tl_headers {
    tl_headers(const char *paths, uint64_t count, const char *codes, const uint8_t *bits)
        : codes_(codes), bits_(bits, bits + std::count(codes_.begin(), codes_.end(), ' ')), files_(count) {
        for (File &file : files_) {
            file.path = paths;
            paths += file.path.size() + 1;
        }
    }

    ~tl_headers() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        room_.notify_all();
        for (std::thread &thread : threads_) thread.join();
    }

    // Fewer where no more can be had; without any, wait() reads.
    void start(size_t threads, size_t ahead) {
        ahead_ = std::max<size_t>(ahead, 1);
        const auto start = [this] { threads_.emplace_back([this] { work(); }); };
        while (threads_.size() < std::min(threads, files_.size()) && tl::start_thread(start) == 0) continue;
    }

    bool wait(size_t at, uint32_t milliseconds) {
        if (gone()) return true;
        std::unique_lock<std::mutex> lock(mutex_);
        if (threads_.empty() && !files_[at].done) {
            files_[at].header = read(files_[at]);
            files_[at].done = true;
        }
        return arrived_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                 [&] { return files_[at].done; });
    }

    // Reads nothing itself: without threads there is nothing to wait for.
    bool ready(size_t at, uint32_t milliseconds) {
        if (gone()) return true;
        std::unique_lock<std::mutex> lock(mutex_);
        if (threads_.empty()) return files_[at].done;
        return arrived_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                 [&] { return files_[at].done; });
    }

    std::unique_ptr<tl_header> take(size_t at) {
        if (gone()) return nullptr;
        std::unique_ptr<tl_header> header;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            header = std::move(files_[at].header);
            taken_ = std::max(taken_, at + 1);
        }
        room_.notify_all();
        return header;
    }

    // Whether this is a child of fork(), which has none of the threads; the mutex may be held for ever.
    bool gone() const {
        return getpid() != process_;
    }

private:
    struct File {
        std::string path;
        std::unique_ptr<tl_header> header;
        bool done = false;
    };

    std::unique_ptr<tl_header> read(const File &file) const {
        return tl::read_header(file.path.c_str(), {codes_, bits_.data()});
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            room_.wait(lock, [this] { return ending_ || next_ == files_.size() || next_ < taken_ + ahead_; });
            if (ending_ || next_ == files_.size()) return;
            File &file = files_[next_++];
            lock.unlock();
            std::unique_ptr<tl_header> header = read(file);
            lock.lock();
            file.header = std::move(header);
            file.done = true;
            arrived_.notify_all();
        }
    }

    const pid_t process_ = getpid();
    const std::string codes_;
    const std::vector<uint8_t> bits_;
    size_t ahead_ = 1;
    std::mutex mutex_;  // of all below
    std::condition_variable arrived_, room_;
    std::vector<File> files_;
    size_t next_ = 0, taken_ = 0;
    bool ending_ = false;
    std::vector<std::thread> threads_;
};

void tl_headers_begin(const char *paths, uint64_t count, const char *codes, const uint8_t *bits,
                      uint32_t threads, uint32_t ahead, tl_headers **headers) try {
    auto made = std::make_unique<tl_headers>(paths, count, codes, bits);
    made->start(threads, ahead);
    *headers = made.release();
} catch (const std::exception &) {
    *headers = nullptr;  // no memory
}

int32_t tl_headers_ready(tl_headers *headers, uint64_t file, uint32_t milliseconds) {
    return headers->ready(file, milliseconds);
}

int32_t tl_headers_wait(tl_headers *headers, uint64_t file, uint32_t milliseconds) {
    return headers->wait(file, milliseconds);
}

void tl_headers_take(tl_headers *headers, uint64_t file, uint64_t *facts) {
    tl::tell(headers->take(file).release(), facts);
}

void tl_headers_end(tl_headers **headers) {
    tl_headers *ended = *headers;
    *headers = nullptr;
    if (ended && !ended->gone()) delete ended;
}
