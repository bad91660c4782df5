// Selects the columns of a row that form the sparse gradient, see rows/selection.py. select.cpp is compiled once per
// instruction set, like kernels.cpp.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace grpo {

// A grid step is 2^STEP_BITS units of mass.
constexpr int STEP_BITS = 31;

struct SelectJob {
    Rows logits;
    int64_t vocab;
    Transform transform;
    const int64_t* targets;   // columns; a target outside the vocabulary is ignored
    const float *max, *sum;   // of whole rows
    float per_unit;           // the units of a probability of 1
    const int64_t* starts;    // the start of each row's running sum; may be null if `ids` is null
    int64_t capacity;         // the most columns taken of a row
    int32_t* ids;             // [n, capacity], -1 in unused places; null: only masses are computed
    float* taken;             // [n, capacity]: their logits, before the transform
    int64_t* masses;          // [n]: the total units of the columns that are sampled; may be null
};

struct SelectKernels {
    const char* name;
    void (*select)(const SelectJob&, int64_t i);
};

}  // namespace grpo
