// The gradient of a divergence from both rows, once their statistics are known. Compiled once per instruction set, like simd.h.
#pragma once
#include "divergence.h"
#include "streams.h"

namespace grpo {
namespace {

// ---- both rows and their mixture m = (1 - b) p + b q

// rest_of_log1p(y) is accurate for y up to this.
constexpr float NEAR_MIXTURE = 0.41f;

// The terms of one column, from D = log p - log q. M is the larger of p and q, and M ratio the smaller. x = m / M - 1, and
// y = m / (M ratio) - 1. `far` marks lanes where y is too large for rest_of_log1p.
struct Against {
    Keep student_larger, smaller_counts, far;
    F s, ratio, less, rest_of_share, y, rest_of_y;  // s = |D|, ratio = e^-s, less = e^-s - 1
    Log1p x;

    INLINED Against(F D, F b, F rest_of_b) {
        student_larger = not_below(D, all(0.0f));
        s = magnitude(D);
        const F down = minus(s);
        smaller_counts = not_below(down, all(EXP_CUTOFF));
        ratio = exp_where(smaller_counts, down);
        less = choose(not_below(s, all(SMALL)), sub(ratio, all(1.0f)), sub(psi_near_0(down), s));
        rest_of_share = choose(student_larger, rest_of_b, b);
        const F share = choose(student_larger, b, rest_of_b);
        x = log1p_and_rest(mul(share, less), fma(share, ratio, rest_of_share));
        y = div(mul(rest_of_share, minus(less)), ratio);
        far = not_below(y, all(NEAR_MIXTURE));
        rest_of_y = rest_of_log1p(y);
    }
    // log p - log m
    INLINED F of_student() const {
        const F of_smaller = choose(far, add(x.value, s), sub(y, rest_of_y));
        return minus(choose(student_larger, x.value, of_smaller));
    }
    // The term of the smaller one's KL to the mixture m, divided by M. The larger one's term is x.rest.
    INLINED F smaller() const {
        const F beyond = sub(minus(mul(rest_of_share, less)), mul_where(smaller_counts, ratio, add(x.value, s)));
        return choose(far, beyond, mul(ratio, rest_of_y));
    }
};

// Computes the terms of both KLs to the mixture. inverse and teacher_inverse are 1 / the sums of the rows.
struct MixtureOf {
    const Shifts& shifts;
    F log_sums, b, rest_of_b, inverse, teacher_inverse;

    // The terms of a column that `KeptTerms` stores.
    struct Terms {
        F p, k;
    };

    INLINED Terms add_terms(F of_z, F of_w, F& of_student, F& of_teacher) const {
        const F x = sub(of_z, shifts.student), y = sub(of_w, shifts.teacher);
        const F d = shifts.close ? shifts.between<true>(of_z, of_w, x, y) : shifts.between<false>(of_z, of_w, x, y);
        const Against column(add(d, log_sums), b, rest_of_b);
        const Keep larger = column.student_larger;
        const F exponent = choose(larger, x, y);
        const Keep keep = not_below(exponent, all(EXP_CUTOFF));
        const F most = mul(exp_where(keep, exponent), choose(larger, inverse, teacher_inverse));
        const F of_larger = mul_where(keep, most, column.x.rest), of_smaller = mul_where(keep, most, column.smaller());
        of_student = add(of_student, choose(larger, of_larger, of_smaller));
        of_teacher = add(of_teacher, choose(larger, of_smaller, of_larger));
        const F p = choose(larger, most, mul(most, column.ratio));
        const Keep counts = not_below(p, all(SMALLEST));
        return {mul_where(counts, p, all(1.0f)), mul_where(counts, p, column.of_student())};
    }
};

// ---- gradients

// d loss / d z_j = e_j (k0 + k1 x_j + k2 e_j + teacher ...) with x_j = z_j - max, e_j = exp(x_j):
//   reverse   ... = D_j - center
//   forward   ... = 1 - q_j / p_j
//   jsd       ... = log p_j - log m_j - center
struct Factors {
    F k0, k1, k2, teacher, of_q, log_sums, b, rest_of_b;
};

template <int DIRECTION, bool CLOSE, int N> INLINED void gradients(const float* z, const float* w, const Shifts& shifts, const Factors& of, F (&g)[N]) {
    F x[N], y[N], d[N], e[N], q[N];
    Keep keep[N], teacher_keep[N];
    for (int k = 0; k < N; k++) {
        const F of_z = load(z + k * W), of_w = load(w + k * W);
        x[k] = sub(of_z, shifts.student), y[k] = sub(of_w, shifts.teacher), d[k] = shifts.between<CLOSE>(of_z, of_w, x[k], y[k]);
        keep[k] = not_below(x[k], all(EXP_CUTOFF)), teacher_keep[k] = not_below(y[k], all(EXP_CUTOFF));
    }
    exp_where(keep, x, e);
    if (DIRECTION == FORWARD) exp_where(teacher_keep, y, q);
    for (int k = 0; k < N; k++) {
        const F factor = fma_where(keep[k], of.k1, x[k], fma(of.k2, e[k], of.k0)), D = add(d[k], of.log_sums);
        if (DIRECTION == REVERSE) {
            g[k] = mul_where(keep[k], e[k], fma(of.teacher, d[k], factor));
        } else if (DIRECTION == JSD) {
            g[k] = mul_where(keep[k], e[k], fma(of.teacher, Against(D, of.b, of.rest_of_b).of_student(), factor));
        } else {
            const F near = mul(mul(of.teacher, sub(D, psi_near_0(minus(D)))), e[k]);  // 1 - e^-D
            const F far = fma(of.teacher, e[k], minus(mul(of.of_q, q[k])));
            g[k] = add(mul_where(keep[k], e[k], factor), choose(not_below(magnitude(D), all(SMALL)), far, near));
        }
    }
}

// The gradient of the divergence for one column, from x = z - max. A probability that the columns' exponentials
// take for 0 is 0 here, too: log_ratio may then be anything, and below -709 its exponential is infinite.
double gradient_of_divergence(const Teacher& teacher, double x, double logp, double logq, double log_ratio, double center) {
    const double p = exp(logp), b = teacher.mixture;
    if (x < EXP_CUTOFF) return teacher.direction == FORWARD ? -exp(logq) : 0.0;
    if (teacher.direction == REVERSE) return p * (log_ratio - center);
    if (teacher.direction == FORWARD) return -p * expm1(-log_ratio);
    return (1 - b) * p * (-log1p(b * expm1(-log_ratio)) - center);
}

// The logits of both rows in the target's column.
struct AtTarget {
    bool there;
    double z = NAN, w = NAN, dz_dx = 0;

    AtTarget(const Stream& student, const Stream& teacher, int64_t target, int64_t vocab) : there(target >= 0 && target < vocab) {
        if (there) z = student.logit(target, &dz_dx), w = teacher.logit(target);
    }
};

// The coefficients of a row's gradient, before its columns are visited. `slopes` are those of the row's own statistics, c is the slope
// of the divergence.
struct PairGradient {
    const Teacher& spec;
    const Slopes slopes;
    const Known& known;
    const double c, log_sums, center, sum;
    const RowGradient own;
    const double per_p, per_q;

    PairGradient(const Teacher& spec, const Slopes& slopes, double c, const RowTransform& t, const Known& known, double log_sums,
                 double center)
        : spec(spec),
          slopes(slopes),
          known(known),
          c(c),
          log_sums(log_sums),
          center(center),
          sum(known.sum),
          own(slopes, t, known.max, sum, log(sum)),
          per_p(c * (spec.direction == JSD ? 1.0 - spec.mixture : 1.0) * t.slope / sum),
          per_q(spec.direction == FORWARD ? c * t.slope / known.teacher_sum : 0.0) {}

    bool infinite() const { return spec.direction == REVERSE && center == INFINITY; }  // the gradient is then infinite wherever p is not 0
    double k0() const {
        const double constant = spec.direction == REVERSE ? log_sums - center : spec.direction == JSD ? -center : 0.0;
        return own.k0 + per_p * constant;
    }
    // As in RowGradient: false if either row has a NaN or +inf.
    bool finite() const {
        if (c == 0) return own.finite();
        return own.finite() && (infinite() || fabs(k0()) < INFINITY) && fabs(per_p) < INFINITY && fabs(per_q) < INFINITY &&
               fabs(log_sums) < INFINITY && fabsf(known.teacher_max) < INFINITY;
    }
    Factors factors() const {
        const double b = spec.mixture;
        return {all(float(k0())),  all(float(own.k1)),   all(float(own.k2)), all(float(per_p)),
                all(float(per_q)), all(float(log_sums)), all(float(b)),      all(float(1.0 - b))};
    }
    float at(const AtTarget& target) const {
        // In fp64 the differences to the maxima are exact, whether the rows are close or not.
        const double x = target.z - known.max, y = target.w - known.teacher_max;
        const double logp = x - log(sum), logq = y - log(double(known.teacher_sum)), log_ratio = (x - y) + log_sums;
        const double of_divergence = c == 0 ? 0.0 : c * gradient_of_divergence(spec, x, logp, logq, log_ratio, center) * target.dz_dx;
        return float(gradient_of_target(slopes, logp, target.dz_dx) + of_divergence);
    }
};

template <int DIRECTION, bool CLOSE, class O>
void write_gradient(const Stream& student, const Stream& teacher, const PairGradient& gradient, const Shifts& shifts, O* out,
                    int64_t vocab) {
    const Factors of = gradient.factors();
    const bool capped = student.t.mode == CAPPED;
    Block block;
    for (int64_t j = 0; j < vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, vocab - j);
        // The block is read before it is written: the gradient, in the same or a narrower dtype, may overwrite the logits.
        const float *z = student.logits(j, n, block.z, block.slopes).z, *w = teacher.logits(j, n, block.w).z;
        int64_t at = 0;
        for (; at + GROUP <= n; at += GROUP) {
            student.prefetch(j + at), teacher.prefetch(j + at);
            F g[SIDE];
            gradients<DIRECTION, CLOSE, SIDE>(z + at, w + at, shifts, of, g);
            for (int k = 0; k < SIDE; k++) {
                if (capped) g[k] = mul(g[k], load(block.slopes + at + k * W));
                store(out + j + at + k * W, g[k]);
            }
        }
        for (; at < n; at += W) {
            F g[1];
            gradients<DIRECTION, CLOSE, 1>(z + at, w + at, shifts, of, g);
            if (capped) g[0] = mul(g[0], load(block.slopes + at));
            store_some(out + j + at, g[0], int(min(W, n - at)));
        }
    }
}

template <int DIRECTION, class O>
void write_gradient(const Stream& student, const Stream& teacher, const PairGradient& gradient, O* out, int64_t vocab) {
    const Shifts shifts(gradient.known.max, gradient.known.teacher_max);
    if (shifts.close) return write_gradient<DIRECTION, true>(student, teacher, gradient, shifts, out, vocab);
    write_gradient<DIRECTION, false>(student, teacher, gradient, shifts, out, vocab);
}

template <class O>
void write_gradient(const Stream& student, const Stream& teacher, const PairGradient& gradient, O* out, int64_t vocab) {
    switch (gradient.spec.direction) {
        case REVERSE: return write_gradient<REVERSE>(student, teacher, gradient, out, vocab);
        case FORWARD: return write_gradient<FORWARD>(student, teacher, gradient, out, vocab);
        default: return write_gradient<JSD>(student, teacher, gradient, out, vocab);
    }
}

}  // namespace
}  // namespace grpo
