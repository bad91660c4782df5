// Arithmetic of sizes. Each file has its own copy: of one that files compiled for different processors shared, the linker would
// keep any, and a processor could meet instructions that it lacks.
#pragma once
#include <stdint.h>

namespace grpo {
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace grpo
