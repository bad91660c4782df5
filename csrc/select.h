// Which columns of a row the sparse gradient is made of: see vocabulary/selection.py. select.cpp is compiled once per instruction
// set, like kernels.cpp.
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
    const int64_t* targets;   // columns; one that is not among them changes nothing
    const float *max, *sum;   // of whole rows
    float per_unit;           // units of a probability of 1
    const int64_t* starts;    // where each row's running sum begins; may be null where nothing is taken
    int64_t capacity;         // columns of a row at most
    int32_t* ids;             // [n, capacity]; null: none are taken
    float* taken;             // [n, capacity]: their logits, before the transform
    int64_t* masses;          // [n]: units of all columns that are sampled; may be null
};

struct SelectKernels {
    const char* name;
    void (*select)(const SelectJob&, int64_t i);
};

}  // namespace grpo
