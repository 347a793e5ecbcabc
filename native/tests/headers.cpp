// Headers that somebody has damaged: read, or left to others, without a byte outside the text.
#include <tensorlift.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "support.hpp"

namespace {

constexpr const char *kCodes = "BOOL F4 U8 BF16 F32 ";
constexpr std::uint8_t kBits[] = {8, 4, 8, 16, 32};

const std::string kGood =
    R"({"__metadata__": {"format": "pt", "more": "{\"a\": 1}"},)"
    R"("a.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
    R"("b":{"data_offsets":[12,16], "shape":[], "dtype":"F32"}, "c" : {"dtype":"U8","shape":[0],"data_offsets":[16,16]}}  )";

struct Found {
    bool plain = false;
    std::uint64_t count = 0, begin = 0, end = 0;
};

// The text lies in memory of exactly its size, so that the address sanitizer sees a step too far.
Found scan(const std::string &text) {
    std::unique_ptr<char[]> copy(new char[text.size()]);
    std::memcpy(copy.get(), text.data(), text.size());
    Found found;
    std::uint64_t facts[TL_HEADER_FACTS] = {};
    tl_header_scan(copy.get(), text.size(), kCodes, kBits, facts);
    found.plain = facts[TL_HEADER_PLAIN] != 0;
    found.count = facts[TL_HEADER_COUNT];
    found.begin = facts[TL_HEADER_METADATA_BEGIN];
    found.end = facts[TL_HEADER_METADATA_END];
    tl_header_free(reinterpret_cast<tl_header *>(facts[TL_HEADER_HANDLE]));
    return found;
}

TEST(a_plain_header_is_read) {
    const Found found = scan(kGood);
    REQUIRE(found.plain);
    REQUIRE_EQ(found.count, 3u);
    REQUIRE_EQ(kGood.substr(found.begin, found.end - found.begin),
               std::string(R"({"format": "pt", "more": "{\"a\": 1}"})"));
}

TEST(every_beginning_is_left_to_others) {
    const std::size_t whole = kGood.find_last_of('}');
    for (std::size_t nbytes = 0; nbytes <= whole; nbytes++) REQUIRE(!scan(kGood.substr(0, nbytes)).plain);
}

TEST(no_damage_leads_outside_of_the_text) {
    std::mt19937 random(7);
    const std::string marks = "{}[]\",:\\0123456789 \n\t\xff";
    for (int round = 0; round < 20000; round++) {
        std::string text = kGood;
        for (std::size_t changes = 1 + random() % 3; changes > 0 && !text.empty(); changes--) {
            const std::size_t at = random() % text.size();
            switch (random() % 4) {
                case 0:
                    text[at] = marks[random() % marks.size()];
                    break;
                case 1:
                    text.erase(at, 1 + random() % 20);
                    break;
                case 2:
                    text.insert(at, text.substr(random() % text.size(), random() % 40));
                    break;
                default:
                    text.resize(at);
            }
        }
        scan(text);
    }
}

// Headers as files, one path after another.
struct Files {
    explicit Files(const std::vector<std::string> &texts) {
        for (const std::string &text : texts) {
            std::string length(8, '\0');
            for (std::size_t i = 0; i < 8; i++) length[i] = static_cast<char>(text.size() >> 8 * i);
            const std::string path = folder.file(std::to_string(count++));
            std::ofstream(path, std::ios::binary) << length << text << std::string(16, 'x');
            paths += path + '\0';
        }
    }
    Folder folder;
    std::string paths;
    std::uint64_t count = 0;
};

tl_headers *begin(const Files &files, std::uint32_t threads) {
    tl_headers *headers = nullptr;
    tl_headers_begin(files.paths.c_str(), files.count, kCodes, kBits, threads, 3, &headers);
    REQUIRE(headers != nullptr);
    return headers;
}

TEST(files_are_read_in_order_with_any_number_of_threads) {
    std::vector<std::string> texts;
    for (int k = 0; k < 40; k++) {
        std::string text = kGood;
        text.insert(text.size() - 2, std::string(k % 2 ? 70000 : 0, ' '));  // longer than one read takes
        texts.push_back(k % 7 ? text : "no header");
    }
    const Files files(texts);
    for (std::uint32_t threads : {0u, 1u, 4u, 64u}) {
        tl_headers *headers = begin(files, threads);
        for (std::uint64_t k = 0; k < files.count; k++) {
            while (!tl_headers_ready(headers, k, 2)) tl_headers_wait(headers, k, 100);
            std::uint64_t facts[TL_HEADER_FACTS] = {};
            tl_headers_take(headers, k, facts);
            REQUIRE_EQ(facts[TL_HEADER_HANDLE] != 0, k % 7 != 0);
            if (facts[TL_HEADER_HANDLE] == 0) continue;
            REQUIRE(facts[TL_HEADER_PLAIN] && facts[TL_HEADER_TILED]);
            REQUIRE_EQ(facts[TL_HEADER_COUNT], 3u);
            REQUIRE_EQ(facts[TL_HEADER_NBYTES], texts[k].size());
            REQUIRE_EQ(facts[TL_HEADER_FILE_BYTES], 8 + texts[k].size() + 16);
            tl_header_free(reinterpret_cast<tl_header *>(facts[TL_HEADER_HANDLE]));
        }
        tl_headers_end(&headers);
        REQUIRE(headers == nullptr);
        tl_headers_end(&headers);
    }
}

TEST(what_nobody_takes_is_freed) {
    const Files files(std::vector<std::string>(20, kGood));
    for (int round = 0; round < 20; round++) {
        tl_headers *headers = begin(files, 4);
        if (round % 2) tl_headers_wait(headers, 0, 100);
        tl_headers_end(&headers);
    }
}

}  // namespace

TEST_MAIN
