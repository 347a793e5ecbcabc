// The JSON of a file's header, read without the GIL: headers of 120,000 tensors took Python 0.3 s, as long as half of
// their bytes take. Only the plain form that writers produce is read here. Whatever is not (an escape in a name, another
// key, a number that is no plain integer, a size that is not the shape's) makes the whole header doubtful: then Python's
// reader decides, with reasons.
#include "header.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <unordered_set>

#include "python.hpp"

namespace tl {
namespace {

// More than torch can have; Python's reader takes any number.
constexpr uint32_t kMostDimensions = 64;
// More than any memory has, and few enough for their bits to be counted.
constexpr int64_t kMostElements = INT64_MAX / 64;
// Farther than any file reaches, and near enough for the header's bytes to be added.
constexpr int64_t kFarthest = INT64_MAX / 2;

class Scanner {
public:
    Scanner(std::string_view text, const Dtypes &dtypes, tl_header *header)
        : text_(text), codes_(dtypes.codes), bits_(dtypes.bits), header_(*header) {}

    bool scan() {
        skip();
        if (!take('{')) return false;
        if (!ends('}')) {
            do {
                if (!pair()) return false;
            } while (take(','));
            if (!take('}')) return false;
        }
        return at_ == text_.size() && all_different();
    }

private:
    // Each of these leaves the white space behind what it took.
    void skip() {
        while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) && text_[at_]) at_++;
    }
    bool take(char wanted) {
        if (at_ == text_.size() || text_[at_] != wanted) return false;
        at_++;
        skip();
        return true;
    }
    bool ends(char wanted) const {
        return at_ < text_.size() && text_[at_] == wanted;
    }

    // A string without escapes. That it is UTF-8 is the caller's to know.
    bool string(std::string_view *found) {
        if (!ends('"')) return false;
        const size_t begin = ++at_;
        while (at_ < text_.size() && text_[at_] != '"') {
            if (text_[at_] == '\\' || static_cast<unsigned char>(text_[at_]) < 0x20) return false;
            at_++;
        }
        *found = text_.substr(begin, at_ - begin);
        return take('"');
    }

    bool integer(int64_t *found) {
        const size_t begin = at_;
        int64_t value = 0;
        while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
            if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
                __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value)) {
                return false;
            }
            at_++;
        }
        *found = value;
        const bool plain = at_ > begin && (text_[begin] != '0' || at_ == begin + 1);
        skip();
        return plain;
    }

    bool pair() {
        std::string_view key;
        if (!string(&key) || !take(':')) return false;
        if (key == "__metadata__") return metadata();
        tl_header::Entry entry{};
        entry.name = key;
        if (!tensor(&entry) || !fits(entry)) return false;
        header_.tiled &= entry.begin == covered_;
        covered_ = entry.end;
        header_.entries.push_back(entry);
        return true;
    }

    bool tensor(tl_header::Entry *entry) {
        unsigned seen = 0;
        if (!take('{')) return false;
        do {
            std::string_view key;
            if (!string(&key) || !take(':')) return false;
            const unsigned kind = key == "dtype" ? 1 : key == "shape" ? 2 : key == "data_offsets" ? 4 : 0;
            if (kind == 0 || (seen & kind)) return false;
            seen |= kind;
            if (kind == 1 ? !dtype(entry) : kind == 2 ? !shape(entry) : !offsets(entry)) return false;
        } while (take(','));
        return seen == 7 && take('}');
    }

    // Whether the range is as long as shape and dtype say.
    bool fits(const tl_header::Entry &entry) const {
        if (elements_ > kMostElements) return false;
        const int64_t bits = elements_ * bits_[entry.dtype];
        return bits % 8 == 0 && bits / 8 == entry.end - entry.begin;
    }

    bool dtype(tl_header::Entry *entry) {
        std::string_view code;
        if (!string(&code) || code.empty()) return false;
        if (code != last_code_) {
            uint8_t id = 0;
            size_t begin = 0;
            for (;; id++) {
                const size_t end = codes_.find(' ', begin);
                if (end == std::string_view::npos) return false;
                if (codes_.substr(begin, end - begin) == code) break;
                begin = end + 1;
            }
            last_code_ = code;
            last_id_ = id;
        }
        entry->dtype = last_id_;
        return true;
    }

    bool shape(tl_header::Entry *entry) {
        int64_t strides = 1;  // what they need: extents of 0 count as 1
        bool empty = false;
        if (!take('[')) return false;
        if (!ends(']')) {
            do {
                int64_t extent;
                if (!integer(&extent) || ++entry->ndim > kMostDimensions) return false;
                header_.extents.push_back(extent);
                empty |= extent == 0;
                if (extent != 0 && __builtin_mul_overflow(strides, extent, &strides)) return false;
            } while (take(','));
        }
        elements_ = empty ? 0 : strides;
        return take(']');
    }

    bool offsets(tl_header::Entry *entry) {
        return take('[') && integer(&entry->begin) && take(',') && integer(&entry->end) && take(']') &&
               entry->begin <= entry->end && entry->end <= kFarthest;
    }

    // Only where it begins and ends: what is in it is for Python.
    bool metadata() {
        if (header_.metadata_end != 0 || !ends('{')) return false;
        header_.metadata_begin = at_;
        uint64_t depth = 0;
        bool quoted = false;
        for (; at_ < text_.size(); at_++) {
            const char c = text_[at_];
            if (quoted) {
                if (c == '\\') {
                    at_++;
                } else if (c == '"') {
                    quoted = false;
                }
            } else if (c == '"') {
                quoted = true;
            } else if (c == '{') {
                depth++;
            } else if (c == '}' && --depth == 0) {
                header_.metadata_end = at_ + 1;
                return take('}');
            }
        }
        return false;
    }

    bool all_different() const {
        std::unordered_set<std::string_view> names;
        names.reserve(header_.entries.size());
        for (const tl_header::Entry &entry : header_.entries) {
            if (!names.insert(entry.name).second) return false;
        }
        return true;
    }

    const std::string_view text_, codes_;
    const uint8_t *const bits_;
    tl_header &header_;
    size_t at_ = 0;
    int64_t elements_ = 0;  // of the entry that is read
    int64_t covered_ = 0;   // where the ranges so far end, if they follow each other
    std::string_view last_code_;
    uint8_t last_id_ = 0;
};

// Shapes repeat: neighbours that are equal are one tuple.
void *shapes_of(const tl_header &header) {
    const Python &py = python();
    void *list = py.list_new(static_cast<intptr_t>(header.entries.size()));
    const int64_t *extents = header.extents.data(), *before = nullptr;
    void *tuple = nullptr;
    uint32_t ndim_before = 0;
    for (size_t i = 0; list && i < header.entries.size(); i++) {
        const uint32_t ndim = header.entries[i].ndim;
        if (tuple && ndim == ndim_before && std::equal(extents, extents + ndim, before)) {
            py.incref(tuple);
        } else {
            tuple = py.tuple_new(ndim);
            for (uint32_t k = 0; tuple && k < ndim; k++) {
                void *extent = py.integer(extents[k]);
                if (extent) {
                    py.tuple_set(tuple, k, extent);
                } else {
                    py.decref(tuple);
                    tuple = nullptr;
                }
            }
        }
        if (!tuple) {
            py.decref(list);
            return nullptr;
        }
        py.list_set(list, static_cast<intptr_t>(i), tuple);
        before = extents;
        ndim_before = ndim;
        extents += ndim;
    }
    return list;
}

void *names_of(const tl_header &header) {
    const Python &py = python();
    void *list = py.list_new(static_cast<intptr_t>(header.entries.size()));
    for (size_t i = 0; list && i < header.entries.size(); i++) {
        const std::string_view name = header.entries[i].name;
        void *text = py.text(name.data(), static_cast<intptr_t>(name.size()), nullptr);
        if (!text) {
            py.decref(list);
            return nullptr;
        }
        py.list_set(list, static_cast<intptr_t>(i), text);
    }
    return list;
}

}  // namespace

void scan(const Dtypes &dtypes, tl_header *header) {
    header->plain = Scanner(header->text, dtypes, header).scan();
}

void tell(tl_header *header, uint64_t *facts) {
    facts[TL_HEADER_HANDLE] = reinterpret_cast<uint64_t>(header);
    if (!header) return;
    facts[TL_HEADER_PLAIN] = header->plain;
    facts[TL_HEADER_NBYTES] = header->text.size();
    facts[TL_HEADER_COUNT] = header->entries.size();
    facts[TL_HEADER_TILED] = header->tiled;
    facts[TL_HEADER_METADATA_BEGIN] = header->metadata_begin;
    facts[TL_HEADER_METADATA_END] = header->metadata_end;
    facts[TL_HEADER_FILE_BYTES] = header->file_bytes;
    facts[TL_HEADER_DEVICE] = header->device;
    facts[TL_HEADER_INODE] = header->inode;
}

}  // namespace tl

void tl_header_scan(const char *text, uint64_t nbytes, const char *codes, const uint8_t *bits,
                    uint64_t *facts) try {
    auto header = std::make_unique<tl_header>();
    header->text = {text, nbytes};
    tl::scan({codes, bits}, header.get());
    tl::tell(header.release(), facts);
} catch (const std::exception &) {
    // No memory: Python's reader will say so, or have more luck.
    tl::tell(nullptr, facts);
}

void *tl_header_lists(const tl_header *header, uint8_t *dtypes, int64_t *starts, int64_t *sizes) {
    const tl::Python &py = tl::python();
    const auto first = static_cast<int64_t>(tl::kHeaderLength + header->text.size());
    for (size_t i = 0; i < header->entries.size(); i++) {
        const tl_header::Entry &entry = header->entries[i];
        dtypes[i] = entry.dtype;
        starts[i] = first + entry.begin;
        sizes[i] = entry.end - entry.begin;
    }
    if (!py.there) return nullptr;
    void *names = tl::names_of(*header);
    void *shapes = names ? tl::shapes_of(*header) : nullptr;
    void *both = shapes ? py.list_new(2) : nullptr;
    if (!both) {
        if (names) py.decref(names);
        if (shapes) py.decref(shapes);
        return nullptr;
    }
    py.list_set(both, 0, names);
    py.list_set(both, 1, shapes);
    return both;
}

void *tl_header_text(const tl_header *header) {
    const tl::Python &py = tl::python();
    return py.there ? py.bytes(header->text.data(), static_cast<intptr_t>(header->text.size())) : nullptr;
}

void tl_header_free(tl_header *header) {
    delete header;
}
