// The gradient of a row: its coefficients, computed from the statistics, and the target's element. Compiled once per instruction set,
// like simd.h.
#pragma once
#include "softmax.h"
#include "visits.h"

namespace grpo {
namespace {

template <class T, Mode MODE> float logit_at(const T* x, int64_t j, const RowTransform& t) {
    return lane0(transformed<MODE>(t, load_some(x + j, 1)).z);
}

template <class A, class B> constexpr bool SAME_TYPE = false;
template <class A> constexpr bool SAME_TYPE<A, A> = true;

// d loss / d x_j = e_j (k0 + k1 d_j + k2 e_j) dz/dx with d_j = z_j - max and e_j = exp(d_j).
struct Polynomial {
    float k0, k1, k2;
};

// d loss / d z_j = target (1[j is the target] - p_j) + p_j (constant + log log p_j + prob p_j)
struct Slopes {
    double target, constant, log, prob;

    bool none() const { return target == 0 && constant == 0 && log == 0 && prob == 0; }
};

// The coefficients of a row's gradient, from the statistics of its softmax.
struct RowGradient {
    double k0, k1, k2;  // see Polynomial
    float max;

    RowGradient(const Slopes& s, const RowTransform& t, float max, double sum, double log_sum)
        : k0((s.constant - s.target - s.log * log_sum) * t.slope / sum),
          k1(s.log * t.slope / sum),
          k2(s.prob * t.slope / (sum * sum)),
          max(max) {}

    // A NaN or +inf anywhere in the row has made its sum or its max NaN or infinite. If all of these are finite in fp32, so is the
    // gradient: an infinite coefficient times an exponential of 0 would be NaN.
    bool finite() const { return fits(k0) && fits(k1) && fits(k2) && fabsf(max) < INFINITY; }
    static bool fits(double k) { return fabs(k) <= 3.40282347e38; }
    Polynomial polynomial() const { return {float(k0), float(k1), float(k2)}; }
};

// The gradient of the target's element: -expm1(logp) is 1 - p without cancellation.
inline float gradient_of_target(const Slopes& s, double logp, double dz_dx) {
    const double p = exp(logp);
    return float((-s.target * expm1(logp) + (p > 0 ? p * (s.constant + s.log * logp + s.prob * p) : 0.0)) * dz_dx);
}

// dz/dx of one element.
template <class T> double slope_at(const T* x, int64_t j, const RowTransform& t) {
    return t.mode == CAPPED ? double(t.slope) * lane0(tanh_and_slope(mul(load_some(x + j, 1), t.in)).slope) : double(t.slope);
}

template <class O> void fill_nan(O* out, int64_t vocab) {
    O nan[W];
    store_any(nan, all(NAN));
    for (int64_t j = 0; j < vocab; j++) out[j] = nan[0];
}

// Runs the program on a row's log-prob and entropy, stores the loss and returns the slopes.
inline Slopes token_of(const FusedJob& job, int64_t i, float logp, float entropy) {
    float inputs[MOST_REGISTERS], found[TOKEN_OUTPUTS];
    inputs[0] = job.logps[i] = logp;
    inputs[1] = job.entropy[i] = entropy;
    for (int k = 2; k < job.program->inputs; k++) inputs[k] = job.inputs[k - 2][i];
    evaluate(*job.program, job.numbers, inputs, found);
    job.losses[i] = found[0];
    const double d_entropy = job.with_entropy ? found[2] : 0.0;
    const double constant = d_entropy != 0 ? -d_entropy * entropy : 0;  // dH/dz_j = -p_j (log p_j + H), and H may be NaN
    return {found[1], constant, -d_entropy, 0};
}

}  // namespace
}  // namespace grpo
