// cuFileRead: from the file to device memory. The call waits, so there are threads up to the depth.
#include "readers/threaded.hpp"

namespace tl {
namespace {

class CufileThreads final : public ThreadedReader {
public:
    using ThreadedReader::ThreadedReader;

private:
    size_t most_threads() const override {
        return limits_.depth;
    }

    void read(const Request &given, Bounce *) override {
        Request request = given;
        request.begin_ns = now_ns();
        const File &file = *request.file;
        const uint64_t wanted = request.end - request.begin;
        for (uint64_t got = 0; got < wanted;) {
            if (sink_->stopping()) return;
            std::string why;
            const int64_t more =
                file.cufile.read(request.in_place + got, wanted - got, request.begin + got, &why);
            if (more < 0) return sink_->refused(request, path_, why, got);
            if (more == 0) return sink_->failed(file.truncated(request.begin, wanted, got));
            sink_->count_read(path_, static_cast<uint64_t>(more));
            got += static_cast<uint64_t>(more);
        }
        sink_->complete(request, path_, nullptr);
    }
};

}  // namespace

std::unique_ptr<DeepReader> make_cufile(RequestSink *sink, const DeepLimits &limits) {
    return std::make_unique<CufileThreads>(sink, TL_PATH_CUFILE, limits);
}

}  // namespace tl
