// The row kernels as plain functions over pointers. kernels.cpp is compiled once per instruction set; each copy exports
// one table of these functions, and module.cpp picks a table at run time.
#pragma once
#include <stdint.h>

#include "program.h"

namespace grpo {

enum DType : int { FP32 = 0, BF16 = 1, FP16 = 2 };

// Rows of [A, T, V], counted in row-major order over A and T; unit stride in V.
struct Rows {
    char* base;
    int dtype;
    int64_t inner_count, outer_stride, inner_stride;  // T; strides of A and of T, in elements

    [[gnu::always_inline]] char* row(int64_t i) const {
        const int64_t element = (i / inner_count) * outer_stride + (i % inner_count) * inner_stride;
        return base + element * (dtype == FP32 ? 4 : 2);
    }
};

// z = softcap * tanh(x * scale / softcap) * inv_temperature; softcap 0 means none.
struct Transform {
    float scale, softcap, inv_temperature;
    const float* inv_temperatures;  // per row, or null

    [[gnu::always_inline]] float inverse(int64_t i) const { return inv_temperatures ? inv_temperatures[i] : inv_temperature; }
};

// Per-row vectors are indexed from 0: entry i belongs to row first + i of the logits.
struct StatsJob {
    Rows logits;
    int64_t vocab, first;
    Transform transform;
    const int64_t* targets;
    const uint8_t* read;  // rows whose entry is 0 are not read; null: all are read
    float *max, *sum, *target;
    float *weighted, *squares;  // may be null; if squares is given, so is weighted
    int32_t* top;               // may be null
};

// d loss / d z_j = slope (1[j = target] - p_j) + p_j (constant + log log p_j + prob p_j)
struct PullJob {
    Rows logits, out;
    int64_t vocab, first;
    Transform transform;
    const int64_t* targets;
    const float *max, *sum, *target;
    const float *slope, *constant, *log, *prob;  // all but slope may be null
};

// The loss and its gradient in one call. The program computes the loss and its slopes. Its first two inputs are the row's log-prob
// and entropy; of the other inputs it gets entry i.
constexpr int TOKEN_OUTPUTS = 3;  // loss, d loss / d log-prob, d loss / d entropy

struct FusedJob {
    Rows logits, out;  // out.base null: no gradient
    int64_t vocab;
    Transform transform;
    const int64_t* targets;
    const uint8_t* read;  // a row whose entry is 0 has gradient 0, and log-prob and entropy 0; null: all are read
    const Program* program;
    const float* numbers;
    const float* const* inputs;
    bool with_entropy;  // the loss depends on the entropy
    float *logps, *entropy, *losses;
};

// The exponentials of a row from element `begin` on are relative to `shift`.
struct Segment {
    int64_t begin;
    float shift;
};

constexpr int64_t SHORTEST_SEGMENT = 16;  // except for the last ones

static inline int64_t most_segments(int64_t vocab) { return vocab / SHORTEST_SEGMENT + 8; }

// Memory of a thread: a row of fp32, if exponentials are not kept elsewhere, and segments. Null if none is available; the gradient is
// then computed from the logits again, which takes longer.
struct Scratch {
    float* row;
    Segment* segments;
};

struct ScaleJob {
    char* data;
    int dtype;
    int64_t count;
    float factor;
};

struct Kernels {
    const char* name;
    void (*stats)(const StatsJob&, int64_t i);
    void (*pull)(const PullJob&, int64_t i);
    void (*fused)(const FusedJob&, int64_t i, const Scratch&);
    void (*scale)(const ScaleJob&, int64_t begin, int64_t end);
};

}  // namespace grpo
