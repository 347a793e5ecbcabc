// A FUSE file system for tests: shows the files of a folder, and is as slow, picky or broken as it is told.
//
//   mirror_fs FOLDER MOUNT_POINT [name=value]...
//
//     delay_us=N     every read takes so long at least
//     direct=WORD    yes; open: O_DIRECT is refused when a file is opened; read: it is accepted, then every read is refused;
//                    late: only reads that do not begin at the file's begin
//     block=N        direct reads that are not whole blocks of N bytes are refused
//     uncached=1     no read goes through the page cache, so that the answers below reach the reader as they are
//     short=N        a read answers N bytes at most
//     interrupt=N    one read of N is answered with EINTR
//     interrupted_from=N  all reads that begin at the byte N or behind it are answered with EINTR
//     fail_at=N      reads of the byte at N fail with EIO
//
// It speaks the kernel's protocol itself (linux/fuse.h), so that nothing has to be installed. Each line on its input is
// answered by a line of what was counted since the line before; at its end it unmounts. Exit code 77: not allowed to mount.
#include <dirent.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::uint32_t kLargestRead = 1 << 20;
constexpr std::uint32_t kLargestWrite = 4096;    // the least that the kernel takes; nothing is written
constexpr std::size_t kRequestBytes = 64 << 10;  // FUSE_MIN_READ_BUFFER and more
constexpr unsigned kThreads = 64;                // requests served at once

std::map<std::string, std::string> options;

std::uint64_t option(const char *name, std::uint64_t otherwise) {
    const auto found = options.find(name);
    return found == options.end() ? otherwise : std::strtoull(found->second.c_str(), nullptr, 10);
}

struct File {
    std::string name;
    int fd;
};
std::vector<File> files;  // number i has the inode i + 2; the folder has 1

struct Counts {
    std::uint64_t reads = 0, direct_reads = 0, bytes = 0, bytes_of_large_reads = 0;
    unsigned now = 0, most_at_once = 0;
};
std::mutex mutex;
Counts counts;

void reply(int device, const fuse_in_header &in, int error, const void *data = nullptr,
           std::size_t nbytes = 0) {
    fuse_out_header out{static_cast<std::uint32_t>(sizeof(fuse_out_header) + nbytes), -error, in.unique};
    const iovec parts[2] = {{&out, sizeof out}, {const_cast<void *>(data), nbytes}};
    // ENOENT: the one who asked is gone.
    if (writev(device, parts, nbytes > 0 ? 2 : 1) < 0 && errno != ENOENT) std::perror("reply");
}

fuse_attr attributes(std::uint64_t inode) {
    struct stat about {};
    fuse_attr attr{};
    attr.ino = inode;
    attr.uid = getuid();
    attr.gid = getgid();
    attr.blksize = 4096;
    attr.nlink = 1;
    attr.mode = S_IFDIR | 0755;
    if (inode == FUSE_ROOT_ID) return attr;
    fstat(files[inode - 2].fd, &about);
    attr.mode = about.st_mode;
    attr.size = static_cast<std::uint64_t>(about.st_size);
    attr.blocks = static_cast<std::uint64_t>(about.st_blocks);
    attr.mtime = static_cast<std::uint64_t>(about.st_mtime);
    return attr;
}

void init(int device, const fuse_in_header &in, const fuse_init_in &wanted) {
    fuse_init_out out{};
    out.major = FUSE_KERNEL_VERSION;
    out.minor = 31;  // what max_pages needs, and no younger than the kernels that tests run on
    out.max_readahead = wanted.max_readahead;
    out.flags = FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_MAX_PAGES;
    out.max_background = kThreads;
    out.congestion_threshold = kThreads;
    out.max_write = kLargestWrite;
    out.time_gran = 1;
    out.max_pages = kLargestRead / 4096;
    reply(device, in, 0, &out, sizeof out);
}

void look_up(int device, const fuse_in_header &in, const char *name) {
    for (std::size_t i = 0; i < files.size(); i++) {
        if (files[i].name != name) continue;
        fuse_entry_out out{};
        out.nodeid = i + 2;
        out.attr_valid = out.entry_valid = 3600;
        out.attr = attributes(out.nodeid);
        return reply(device, in, 0, &out, sizeof out);
    }
    reply(device, in, ENOENT);
}

void open_file(int device, const fuse_in_header &in, const fuse_open_in &how) {
    if ((how.flags & O_DIRECT) && options["direct"] == "open") return reply(device, in, EINVAL);
    fuse_open_out out{};
    out.open_flags = option("uncached", 0) ? FOPEN_DIRECT_IO : FOPEN_KEEP_CACHE;
    reply(device, in, 0, &out, sizeof out);
}

// The errno that a read is answered with, 0 where it may go on.
int refusal(const fuse_read_in &read, std::uint64_t number) {
    const std::uint64_t block = option("block", 1);
    if ((read.flags & O_DIRECT) &&
        (options["direct"] == "read" || (options["direct"] == "late" && read.offset > 0) ||
         read.offset % block != 0 || read.size % block != 0))
        return EINVAL;
    if (option("interrupt", 0) && number % option("interrupt", 0) == 0) return EINTR;
    if (read.offset >= option("interrupted_from", UINT64_MAX)) return EINTR;
    const std::uint64_t bad = option("fail_at", UINT64_MAX);
    return read.offset <= bad && bad < read.offset + read.size ? EIO : 0;
}

void read_file(int device, const fuse_in_header &in, const fuse_read_in &read, std::vector<char> *buffer) {
    std::uint64_t number;
    {
        std::lock_guard<std::mutex> lock(mutex);
        number = counts.reads++;
        counts.direct_reads += (read.flags & O_DIRECT) != 0;
        counts.bytes += read.size;
        if (read.size >= 128 << 10) counts.bytes_of_large_reads += read.size;
        counts.most_at_once = std::max(counts.most_at_once, ++counts.now);
    }
    // Slow storage itself, not a test that waits for something.
    std::this_thread::sleep_for(std::chrono::microseconds(option("delay_us", 0)));
    buffer->resize(std::min<std::uint64_t>(read.size, option("short", UINT64_MAX)));
    int error = refusal(read, number);
    ssize_t got = 0;
    if (error == 0) {
        got = pread(files[in.nodeid - 2].fd, buffer->data(), buffer->size(), static_cast<off_t>(read.offset));
        if (got < 0) error = errno;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        counts.now--;
    }
    reply(device, in, error, buffer->data(), error == 0 ? static_cast<std::size_t>(got) : 0);
}

void answer(int device, const char *request, std::vector<char> *buffer) {
    const auto &in = *reinterpret_cast<const fuse_in_header *>(request);
    const char *body = request + sizeof in;
    switch (in.opcode) {
        case FUSE_INIT:
            return init(device, in, *reinterpret_cast<const fuse_init_in *>(body));
        case FUSE_LOOKUP:
            return look_up(device, in, body);
        case FUSE_GETATTR: {
            fuse_attr_out out{};
            out.attr_valid = 3600;
            out.attr = attributes(in.nodeid);
            return reply(device, in, 0, &out, sizeof out);
        }
        case FUSE_OPEN:
            return open_file(device, in, *reinterpret_cast<const fuse_open_in *>(body));
        case FUSE_READ:
            return read_file(device, in, *reinterpret_cast<const fuse_read_in *>(body), buffer);
        case FUSE_STATFS: {
            const fuse_statfs_out out{};
            return reply(device, in, 0, &out, sizeof out);
        }
        case FUSE_FLUSH:
        case FUSE_RELEASE:
        case FUSE_DESTROY:
            return reply(device, in, 0);
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
        case FUSE_INTERRUPT:  // no answer; a read that is under way goes on
            return;
        default:
            return reply(device, in, ENOSYS);
    }
}

void serve(int device) {
    std::vector<char> request(kRequestBytes), buffer;
    for (;;) {
        const ssize_t got = read(device, request.data(), request.size());
        // ENOENT: a request was taken back. ENODEV: unmounted.
        if (got < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT) return;
        if (got > 0) answer(device, request.data(), &buffer);
    }
}

void tell() {
    std::lock_guard<std::mutex> lock(mutex);
    std::cout << "{\"reads\": " << counts.reads << ", \"direct_reads\": " << counts.direct_reads
              << ", \"bytes\": " << counts.bytes
              << ", \"bytes_of_large_reads\": " << counts.bytes_of_large_reads
              << ", \"most_at_once\": " << counts.most_at_once << "}" << std::endl;
    const unsigned now = counts.now;
    counts = {};
    counts.now = now;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    for (int i = 3; i < argc; i++) {
        const std::string text = argv[i];
        options[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    }
    options.try_emplace("direct", "yes");
    DIR *folder = opendir(argv[1]);
    if (!folder) return 2;
    while (const dirent *entry = readdir(folder)) {
        const int fd = openat(dirfd(folder), entry->d_name, O_RDONLY | O_CLOEXEC);
        if (entry->d_type == DT_REG && fd >= 0) files.push_back({entry->d_name, fd});
    }
    const int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    const std::string how =
        "fd=" + std::to_string(device) + ",rootmode=40755,user_id=" + std::to_string(getuid()) +
        ",group_id=" + std::to_string(getgid()) + ",max_read=" + std::to_string(kLargestRead);
    if (device < 0 || mount("mirror_fs", argv[2], "fuse", MS_NOSUID | MS_NODEV, how.c_str()) != 0) {
        std::perror("cannot mount a FUSE file system");
        return 77;
    }
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; i++) threads.emplace_back(serve, device);
    std::cout << "ready" << std::endl;
    for (std::string line; std::getline(std::cin, line);) tell();
    // Forced: whoever still waits for a read gets an error, and the threads above end.
    umount2(argv[2], MNT_FORCE | MNT_DETACH);
    for (std::thread &thread : threads) thread.join();
    return 0;
}
