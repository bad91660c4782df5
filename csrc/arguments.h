// Checks of a call's arguments by their values alone. Arguments that cannot be right raise ValueError in Python instead of crashing
// the process. The caller is responsible for the memory being as large as the arguments say.
#pragma once
#include <stdint.h>

#include <stdexcept>
#include <string>

namespace grpo {

// More elements than an address space holds. Sizes up to it, and the offsets computed from them, fit easily into 64 bits.
constexpr int64_t LARGEST = int64_t(1) << 47;

template <class T> T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

inline void require(bool ok, const char* name, int64_t value, const char* remedy) {
    if (!ok) throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + ": " + remedy);
}

inline void check_size(const char* name, int64_t value, int64_t least) {
    require(value >= least && value <= LARGEST, name, value, least ? "a size of at least 1 is needed." : "a size is 0 or more.");
}

inline void check_threads(int threads) { require(threads >= 1, "threads", threads, "at least one has to do the work."); }

inline int element_size(const char* name, int dtype) {
    require(dtype >= 0 && dtype <= 2, name, dtype, "it is 0 for fp32, 1 for bf16, 2 for fp16.");
    return dtype == 0 ? 4 : 2;
}

inline void check_address(const char* name, uintptr_t address, int element, bool may_be_null = false) {
    require(address || may_be_null, name, int64_t(address), "an address is needed.");
    require(address % uintptr_t(element) == 0, name, int64_t(address), "the address must be a multiple of the element size.");
}

// Checks that the offset from the first of `count` rows to the last fits into the address space.
inline void check_stride(const char* name, int64_t stride, int64_t count) {
    const bool fits = count < 2 || (stride <= LARGEST / (count - 1) && stride >= -LARGEST / (count - 1));
    require(fits, name, stride, "the last row would lie outside any address space.");
}

}  // namespace grpo
