// Row kernels over two streams: a student's row, which gets a gradient, and a teacher's over the same ids. vocabulary/rows.py says
// what partials are, vocabulary/divergence.py how the divergences are formed. divergence.cpp is compiled once per instruction set.
#pragma once
#include "kernels.h"

namespace grpo {

enum Direction : int { REVERSE = 0, FORWARD = 1, JSD = 2 };

struct Teacher {
    Rows logits;  // their inner_count is the student's
    Transform transform;
    int direction;
    double mixture;  // its share in the mixture of JSD. The student's is formed from it in fp64, where it keeps its digits
};

struct TwoStats {
    StatsJob student;  // its sum of squares goes with its weighted sum
    Teacher teacher;
    float *max, *sum, *cross, *excess;  // max and sum of the teacher
};

// What is known of both rows before their second visit.
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

// Plus slope G_j, G the gradient of the divergence.
struct TwoPull {
    PullJob student;
    Teacher teacher;
    TwoRows of;
    const float *slope, *center;
    void (*without)(const PullJob&, int64_t i);  // for rows whose slope is 0
};

// The loss and its gradient in one visit of each row, as FusedJob.
struct TwoFused {
    FusedJob student;
    Teacher teacher;
    const float* weight;  // of the divergence in the loss; null: 0
    float* divergence;
    void (*without)(const PullJob&, int64_t i);  // as in TwoPull
};

// What terms of one block of a row are relative to.
struct KeptMaxima {
    float student, teacher;
};

constexpr int64_t LOGITS = 1024;  // elements of a block

// Memory of a thread for the terms of one row: p where the gradient is not fp32, else null, and what goes with it, see KeptTerms. Null
// where there is none, which costs time.
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
