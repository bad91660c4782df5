// Helpers of the bindings of row kernels.
#pragma once
#include <stdint.h>

#include "arguments.h"
#include "kernels.h"

namespace grpo {

extern const Kernels* kernels;  // the table in use

// Rows in a range: about 64 KiB of logits, so that the cost of starting a range is shared by many short rows.
template <class Job> int64_t rows_at_once(const Job& job) {
    return 65536 / (job.vocab * (job.logits.dtype == FP32 ? 4 : 2)) + 1;
}

inline void check_rows(const char* name, const Rows& rows, int64_t vocab, int64_t first, int64_t count) {
    const int element = element_size("dtype", rows.dtype);
    check_size("vocab", vocab, 1);
    check_size("first", first, 0);
    check_size("count", count, 0);
    if (count == 0) return;
    check_size("inner_count", rows.inner_count, 1);
    check_address(name, reinterpret_cast<uintptr_t>(rows.base), element);
    const int64_t end = first + count, inner = rows.inner_count;
    check_stride("outer_stride", rows.outer_stride, (end - 1) / inner + 1);
    check_stride("inner_stride", rows.inner_stride, end < inner ? end : inner);
}

}  // namespace grpo
