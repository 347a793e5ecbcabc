// Work whose calls fail: once each, at each of its turns, then at random.
#pragma once

#include "calls.h"
#include "support.hpp"

#include <functional>

// Work that succeeds (an empty text) or ends with an ordinary error (its message), and throws check::Failure for all else.
// Nothing may be left when it returns.
using Work = std::function<std::string()>;

// Runs the work again and again, with one call failing each time; of the codes of a call one after another, or all of them
// at each turn where TENSORLIFT_TEST_FAULTS is set, to the number of random plans to run. How many runs there were is said
// on stdout.
void fail_each_turn(const char *what, const Work &work);
// also: what else is to fail under a seed, so many times in a million.
using Also = std::function<void(std::uint64_t seed, std::uint32_t in_a_million)>;
void fail_at_random(const char *what, const Work &work, std::uint64_t plans, const Also &also = {});
