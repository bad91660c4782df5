// Row kernels over two streams: the student's row, which gets a gradient, and the teacher's row over the same ids.
// rows/partials.py defines the partial sums, rows/divergence.py forms the divergences from them. divergence.cpp is compiled
// once per instruction set.
#pragma once
#include "kernels.h"

namespace grpo {

enum Direction : int { REVERSE = 0, FORWARD = 1, JSD = 2 };

struct Teacher {
    Rows logits;  // their inner_count is the student's
    Transform transform;
    int direction;
    double mixture;  // the teacher's share in the mixture of JSD; the student's share, 1 - mixture, is computed in fp64
};

struct TwoStats {
    StatsJob student;  // if `squares` is given, so is `weighted`
    Teacher teacher;
    float *max, *sum, *cross, *excess;  // max and sum of the teacher
};

// The statistics of both rows, from their first visit.
struct TwoRows {
    const float *max, *sum, *teacher_max, *teacher_sum;
    const float* log_sums;  // log(teacher_sum / sum)
};

struct MixedJob {
    Rows logits;
    int64_t vocab, first;
    Transform transform;
    const uint8_t* read;  // as in StatsJob
    Teacher teacher;
    TwoRows of;
    float *student_kl, *teacher_kl;  // to the mixture
};

// The gradient of PullJob plus slope[i] G_j, where G is the gradient of the divergence.
struct TwoPull {
    PullJob student;
    Teacher teacher;
    TwoRows of;
    const float *slope, *center;
    void (*without)(const PullJob&, int64_t i);  // for rows whose slope is 0
};

// The loss and its gradient in one call, as in FusedJob.
struct TwoFused {
    FusedJob student;
    Teacher teacher;
    const float* weight;  // of the divergence in the loss; null: 0
    float* divergence;
    void (*without)(const PullJob&, int64_t i);  // as in TwoPull
};

// The maxima that were subtracted from the logits of one block before the exponentials were taken.
struct KeptMaxima {
    float student, teacher;
};

constexpr int64_t LOGITS = 1024;  // elements of a block

// Memory of a thread for the terms of one row, see KeptTerms. p is null if the gradient is fp32: its memory is used instead. All are
// null if nothing is kept or no memory was available; the gradient is then computed from the logits, which takes longer.
struct TwoScratch {
    float *p, *k;
    KeptMaxima* maxima;
};

struct DivergenceKernels {
    const char* name;
    void (*stats)(const TwoStats&, int64_t i);
    void (*mixed)(const MixedJob&, int64_t i);
    void (*pull)(const TwoPull&, int64_t i);
    void (*fused)(const TwoFused&, int64_t i, const TwoScratch&);
};

}  // namespace grpo
