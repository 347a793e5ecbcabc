// Headers that somebody has damaged: read, or left to others, without a byte outside the text.
#include <tensorlift.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "check.hpp"

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

}  // namespace

TEST_MAIN
