// The instruction sets of this processor, up to the one that GRPO_KERNELS_ISA names.
#pragma once
#include <stdlib.h>

#include <stdexcept>
#include <string>

namespace grpo {

// Each includes the ones before it.
enum Isa : int { NO_AVX2, AVX2, AVX512, AVX512_BF16 };

inline constexpr const char* ISA_NAMES[] = {"", "avx2", "avx512", "avx512bf16"};
inline constexpr const char* ISA_SETTING = "GRPO_KERNELS_ISA";

// Returns the best instruction set that this processor supports.
inline Isa processor_isa() {
    // Every processor with AVX2 also has F16C, for which some compilers have no
    // __builtin_cpu_supports.
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!has_avx2) return NO_AVX2;
    if (!has_avx512) return AVX2;
    return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
}

// Returns the best instruction set to use. Static initialisers call this, which cannot raise an
// exception: an unknown name limits nothing here, and check_isa_setting refuses it.
inline Isa best_isa() {
    const Isa best = processor_isa();
    const char* name = getenv(ISA_SETTING);
    if (!name) return best;
    for (int isa = AVX2; isa < best; isa++) {
        if (std::string(name) == ISA_NAMES[isa]) return Isa(isa);
    }
    return best;
}

// Throws if the environment variable names no instruction set.
inline void check_isa_setting() {
    const char* name = getenv(ISA_SETTING);
    if (!name || !*name) return;
    for (int isa = AVX2; isa <= AVX512_BF16; isa++) {
        if (std::string(name) == ISA_NAMES[isa]) return;
    }
    throw std::invalid_argument(
        std::string(ISA_SETTING) + "=" + name + ": choose avx2, avx512 or avx512bf16, or unset it");
}

}  // namespace grpo
