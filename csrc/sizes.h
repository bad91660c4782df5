// Arithmetic of sizes. The unnamed namespace gives each file its own copy: of a shared function the linker would keep one copy, which
// may use instructions that the processor lacks.
#pragma once
#include <stdint.h>

namespace grpo {
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace grpo
