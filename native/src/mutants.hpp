// Fences that a test build can leave out, one at a time, to show that the tests would notice (CMake: TENSORLIFT_MUTANT).
//   NO_CONSUMER_FENCE  copies do not wait for the consumer's stream at submission
//   NO_HOST_FENCE      reads straight to the device do not wait for it either
//   NO_ARRIVAL_FENCE   the consumer's stream does not wait for the copies
//   NO_SLOT_FENCE      a slot is filled again without waiting for its copy
//   NO_DRAIN           destroying does not wait for copies under way
#pragma once

namespace tl {

#ifdef TL_MUTANT_NO_CONSUMER_FENCE
inline constexpr bool kConsumerFence = false;
#else
inline constexpr bool kConsumerFence = true;
#endif

#ifdef TL_MUTANT_NO_HOST_FENCE
inline constexpr bool kHostFence = false;
#else
inline constexpr bool kHostFence = true;
#endif

#ifdef TL_MUTANT_NO_ARRIVAL_FENCE
inline constexpr bool kArrivalFence = false;
#else
inline constexpr bool kArrivalFence = true;
#endif

#ifdef TL_MUTANT_NO_SLOT_FENCE
inline constexpr bool kSlotFence = false;
#else
inline constexpr bool kSlotFence = true;
#endif

#ifdef TL_MUTANT_NO_DRAIN
inline constexpr bool kDrain = false;
#else
inline constexpr bool kDrain = true;
#endif

}  // namespace tl
