// Row kernels over two streams: one's own row, which gets a gradient, and the teacher's row over the same ids. rows/partials.py defines
// the partial sums, rows/divergence.py forms the divergences from them. Compiled once per instruction set, like simd.h.
//
// Both rows are turned into transformed fp32 logits block by block, in the L1 cache. Only `Fetched` deals with dtypes and transforms,
// which may differ between the rows.
#pragma once
#include "one_row.h"

namespace grpo {
namespace {

// Elements that are summed in fp32 before the sum is added to one in fp64.
constexpr int64_t SUMMED = 32 * GROUP < LOGITS ? 32 * GROUP : LOGITS;

inline F minus(F a) { return sub(all(0.0f), a); }

// ---- both rows

struct Block {
    alignas(64) float z[LOGITS], w[LOGITS], slopes[LOGITS];
};

// The maxima that are subtracted from the logits of both rows. A maximum of -inf becomes 0, so that all exponentials are 0.
struct Shifts {
    F student, teacher, apart;
    bool close;

    Shifts(float max, float teacher_max) {
        const float m = max > -INFINITY ? max : 0.0f, n = teacher_max > -INFINITY ? teacher_max : 0.0f;
        student = all(m), teacher = all(n), apart = all(m - n), close = fabsf(m - n) <= 4.0f;
    }
    // (z - m) - (w - n), given x = z - m and y = w - n. If the maxima are close, z - w is exact for nearly equal logits, so that small
    // differences keep their digits. If the maxima are far apart, z - w would be rounded relative to their distance.
    template <bool CLOSE> INLINED F between(F z, F w, F x, F y) const { return CLOSE ? sub(sub(z, w), apart) : sub(x, y); }
};

struct Divergences {
    double log_sums, value;  // log(teacher_sum / sum), and the KL in the given direction
};

// The statistics of both rows after their first visit, and the KL from them, see Partials in rows/partials.py.
struct Known {
    float max, sum, teacher_max, teacher_sum, cross, excess;

    Divergences result(bool forward) const {
        const double own = forward ? teacher_sum : sum, other = forward ? sum : teacher_sum;
        const double c = cross / own, e = excess / own, r = e - c;
        const bool near = fabs(c) <= SMALL && e <= SMALL;  // r is NaN where both are infinite
        const double log1p_r = near ? log1p(r) : 0.0, logs = near ? log1p_r : log(other) - log(own);
        const double value = near ? e - (r - log1p_r) : c + logs;
        return {forward ? -logs : logs, value < 0 ? 0.0 : value};
    }
};

// ---- a column of both rows, when the sums of both are known

// p beside q, from D = log p - log q. M is the larger of the two, and M ratio the smaller.
struct Column {
    Keep student_larger, smaller_counts;
    F s, ratio, less;  // s = |D|, ratio = e^-s, less = e^-s - 1

    INLINED explicit Column(F D) {
        student_larger = not_below(D, all(0.0f));
        s = magnitude(D);
        const F down = minus(s);
        smaller_counts = not_below(down, all(EXP_CUTOFF));
        ratio = exp_where(smaller_counts, down);
        less = choose(not_below(s, all(SMALL)), sub(ratio, all(1.0f)), sub(psi_near_0(down), s));
    }
};

// rest_of_log1p(y) is accurate for y up to this.
constexpr float NEAR_MIXTURE = 0.41f;

// p and q beside their mixture m = (1 - b) p + b q. x = m / M - 1, and y = m / (M ratio) - 1. `far` marks lanes where y is too large
// for rest_of_log1p.
struct Mixture : Column {
    Keep far;
    F rest_of_share, y, rest_of_y;
    Log1p x;

    INLINED Mixture(F D, F b, F rest_of_b) : Column(D) {
        rest_of_share = choose(student_larger, rest_of_b, b);
        const F share = choose(student_larger, b, rest_of_b);
        x = log1p_and_rest(mul(share, less), fma(share, ratio, rest_of_share));
        y = div(mul(rest_of_share, minus(less)), ratio);
        far = not_below(y, all(NEAR_MIXTURE));
        rest_of_y = rest_of_log1p(y);
    }
    // The factor of p in the gradient: log p - log m.
    INLINED F factor() const {
        const F of_smaller = choose(far, add(x.value, s), sub(y, rest_of_y));
        return minus(choose(student_larger, x.value, of_smaller));
    }
    // The terms of both KLs to the mixture, divided by M.
    INLINED void terms(F& of_student, F& of_teacher) const {
        const F beyond = sub(minus(mul(rest_of_share, less)), mul_where(smaller_counts, ratio, add(x.value, s)));
        const F smaller = choose(far, beyond, mul(ratio, rest_of_y));
        of_student = choose(student_larger, x.rest, smaller), of_teacher = choose(student_larger, smaller, x.rest);
    }
};

// Half the sign of p - q, 0 where they are equal.
INLINED F half_sign(F D) { return choose(not_below(all(0.0f), magnitude(D)), all(0.0f), with_sign_of(all(0.5f), D)); }

// p and q of the total variation.
struct Variation : Column {
    F half;

    INLINED Variation(F D, F, F) : Column(D), half(half_sign(D)) {}

    // The factor of p in the gradient.
    INLINED F factor() const { return half; }
    // p times that factor, and |p - q| / 2, divided by M.
    INLINED void terms(F& of_student, F& of_teacher) const {
        of_student = mul(half, choose(student_larger, all(1.0f), ratio)), of_teacher = mul(all(-0.5f), less);
    }
};

// The columns of a kind whose terms take the sums of both rows, of which inverse and teacher_inverse are 1 / the sum.
template <class Of> struct BothSums {
    const Shifts& shifts;
    F log_sums, b, rest_of_b, inverse, teacher_inverse;

    // The terms of a column, see `keep_terms`.
    struct Pair {
        F p, k;
    };

    INLINED Pair add_terms(F of_z, F of_w, F& of_student, F& of_teacher) const {
        const F x = sub(of_z, shifts.student), y = sub(of_w, shifts.teacher);
        const F d = shifts.close ? shifts.between<true>(of_z, of_w, x, y) : shifts.between<false>(of_z, of_w, x, y);
        const Of column(add(d, log_sums), b, rest_of_b);
        const Keep larger = column.student_larger;
        const F exponent = choose(larger, x, y);
        const Keep keep = not_below(exponent, all(EXP_CUTOFF));
        const F most = mul(exp_where(keep, exponent), choose(larger, inverse, teacher_inverse));
        F student, teacher;
        column.terms(student, teacher);
        of_student = add(of_student, mul_where(keep, most, student)), of_teacher = add(of_teacher, mul_where(keep, most, teacher));
        const F p = choose(larger, most, mul(most, column.ratio));
        const Keep counts = not_below(p, all(SMALLEST));
        return {mul_where(counts, p, all(1.0f)), mul_where(counts, p, column.factor())};
    }
};

// ---- the first visit of both rows, which computes all sums over them

struct TwoSums {
    double sum, weighted, squares, teacher_sum, cross, excess;
};

// Changes the maxima that the sums are relative to. The differences g - f and g - f + f a with g = f e^-a are formed without
// cancellation; see merged_sums in rows/divergence.py.
void rescale(double f, double g, double a, double sum, double other_sum, double& cross, double& excess) {
    if (f == 0) {
        cross = 0, excess = g * other_sum;
        return;
    }
    const bool near = fabs(a) <= SMALL;
    const double less = expm1(-a);
    const double of_cross = near ? f * less : g - f, of_sum = near ? f * (less + a) : (g - f) + f * a;
    excess = g * excess - of_cross * cross + of_sum * sum;
    cross = f * (cross + a * sum);
    if (cross == INFINITY) excess = INFINITY;
}

// Keeps the two terms of the gradient of a vector of columns, times the slope of the softcap if there is one. With p = e^(z - max) and
// q = e^(w - teacher max) the terms are:
//   reverse   p and p d
//   forward   p and p - q where p and q are near each other; elsewhere -p and -q, where the sign marks this case
//   jsd       p and p (log p - log m), both divided by the sum of the row
//   tv        p and p sign(p - q) / 2, likewise
INLINED void keep_terms(const Kept& kept, int64_t j, F of_p, F of_k, const float* slopes, int count) {
    if (slopes) of_p = mul(of_p, load(slopes)), of_k = mul(of_k, load(slopes));
    if (count >= W) {
        store(kept.terms[0] + j, of_p), store(kept.terms[1] + j, of_k);
    } else {
        store_some(kept.terms[0] + j, of_p, count), store_some(kept.terms[1] + j, of_k, count);
    }
}

// The running sums over both rows, relative to the maxima so far.
template <bool FORWARD, Kind KIND, bool KEEPS> struct RunningPair {
    float max = -INFINITY, teacher_max = -INFINITY;
    int64_t top_block = 0;  // where max is
    TwoSums total = {};
    Kept* kept = nullptr;

    // Both maxima are raised together, so that the differences of nearly equal rows stay small.
    void raise(float to, float teacher_to) {
        const double f = max > -INFINITY ? exp(double(max) - to) : 0.0;
        const double g = teacher_max > -INFINITY ? exp(double(teacher_max) - teacher_to) : 0.0;
        const bool empty = max == -INFINITY || teacher_max == -INFINITY;
        const double a = empty ? 0.0 : (double(max) - to) - (double(teacher_max) - teacher_to);
        if (FORWARD) {
            rescale(g, f, -a, total.teacher_sum, total.sum, total.cross, total.excess);
        } else {
            rescale(f, g, a, total.sum, total.teacher_sum, total.cross, total.excess);
        }
        if (KIND >= WITH_WEIGHTED) total.weighted = f > 0 ? f * (total.weighted + (double(max) - to) * total.sum) : 0.0;
        total.sum *= f, total.squares *= f * f, total.teacher_sum *= g;
        max = to, teacher_max = teacher_to;
    }

    // Adds n elements from j on.
    void take(const Logits& of_student, const Logits& of_teacher, int64_t j, int64_t n, const Fetched& student, const Fetched& teacher,
              const float* slopes) {
        if (of_student.max > max) top_block = j;
        const bool raised = of_student.max > max || of_teacher.max > teacher_max;
        if (raised) {
            raise(of_student.max > max ? of_student.max : max, of_teacher.max > teacher_max ? of_teacher.max : teacher_max);
        }
        if (KEEPS && (raised || j == 0)) kept->segments[kept->count++] = {j, max, teacher_max};
        const Shifts shifts(max, teacher_max);
        for (int64_t at = 0; at < n; at += SUMMED) {
            const float *z = of_student.z + at, *w = of_teacher.z + at, *slopes_at = slopes ? slopes + at : nullptr;
            const int64_t count = min(SUMMED, n - at);
            if (shifts.close) {
                add_up<true>(z, w, j + at, count, student, teacher, shifts, slopes_at);
            } else {
                add_up<false>(z, w, j + at, count, student, teacher, shifts, slopes_at);
            }
        }
    }

    template <bool CLOSE>
    void add_up(const float* z, const float* w, int64_t j, int64_t n, const Fetched& student, const Fetched& teacher, const Shifts& shifts,
                const float* slopes) {
        F sums[6];
        for (F& sum : sums) sum = all(0.0f);
        int64_t at = 0;
        for (; at + GROUP <= n; at += GROUP) {
            student.prefetch(j + at), teacher.prefetch(j + at);
            group<SIDE, CLOSE>(z + at, w + at, shifts, sums, slopes ? slopes + at : nullptr, j + at, GROUP);
        }
        for (; at < n; at += W) {
            group<1, CLOSE>(z + at, w + at, shifts, sums, slopes ? slopes + at : nullptr, j + at, int(min(W, n - at)));
        }
        total.sum += sum_lanes(sums[0]), total.teacher_sum += sum_lanes(sums[1]);
        total.cross += sum_lanes(sums[2]), total.excess += sum_lanes(sums[3]);
        if (KIND >= WITH_WEIGHTED) total.weighted += sum_lanes(sums[4]);
        if (KIND >= WITH_SQUARES) total.squares += sum_lanes(sums[5]);
    }

    // Adds N vectors. Each step is done for all of them before the next, because the instructions of one vector depend on each other.
    template <int N, bool CLOSE>
    INLINED void group(const float* z, const float* w, const Shifts& shifts, F (&sums)[6], const float* slopes, int64_t j, int count) const {
        F x[N], y[N], d[N], p[N], q[N], first[N], excess[N];
        Keep keep[N], teacher_keep[N], apart[N];
        for (int k = 0; k < N; k++) {
            const F of_z = load(z + k * W), of_w = load(w + k * W);
            x[k] = sub(of_z, shifts.student), y[k] = sub(of_w, shifts.teacher), d[k] = shifts.between<CLOSE>(of_z, of_w, x[k], y[k]);
            keep[k] = not_below(x[k], all(EXP_CUTOFF)), teacher_keep[k] = not_below(y[k], all(EXP_CUTOFF));
        }
        exp_where(keep, x, p);
        exp_where(teacher_keep, y, q);
        for (int k = 0; k < N; k++) {
            // The stream whose probabilities weigh the terms, and the other one.
            const F lead = FORWARD ? q[k] : p[k], other = FORWARD ? p[k] : q[k], of = FORWARD ? minus(d[k]) : d[k];
            first[k] = mul_where(FORWARD ? teacher_keep[k] : keep[k], lead, of);
            const F near = mul(lead, psi_near_0(minus(of))), far = add(sub(other, lead), first[k]);
            apart[k] = not_below(magnitude(of), all(SMALL));
            excess[k] = choose(apart[k], far, near);
        }
        sums[0] = add(sums[0], sum_of(p)), sums[1] = add(sums[1], sum_of(q));
        if (KIND >= WITH_WEIGHTED) {
            F weighted = mul_where(keep[0], p[0], x[0]);
            for (int k = 1; k < N; k++) weighted = fma_where(keep[k], p[k], x[k], weighted);
            sums[4] = add(sums[4], weighted);
        }
        if (KIND >= WITH_SQUARES) {
            F squares = mul(p[0], p[0]);
            for (int k = 1; k < N; k++) squares = fma(p[k], p[k], squares);
            sums[5] = add(sums[5], squares);
        }
        if (KEEPS) {
            for (int k = 0; k < N; k++) {
                const F of_p = FORWARD ? choose(apart[k], minus(p[k]), p[k]) : p[k];
                const F of_k = FORWARD ? choose(apart[k], minus(q[k]), sub(excess[k], first[k])) : first[k];
                keep_terms(*kept, j + k * W, of_p, of_k, slopes ? slopes + k * W : nullptr, count);
            }
        }
        sums[2] = add(sums[2], sum_of(first)), sums[3] = add(sums[3], sum_of(excess));
    }
    static INLINED F sum_of(const F (&of)[1]) { return of[0]; }
    static INLINED F sum_of(const F (&of)[2]) { return add(of[0], of[1]); }

    void visit(const Fetched& student, const Fetched& teacher, int64_t vocab) {
        Block block;
        float* slopes = KEEPS && student.t.mode == CAPPED ? block.slopes : nullptr;
        for (int64_t j = 0; j < vocab; j += LOGITS) {
            const int64_t n = min(LOGITS, vocab - j);
            const Logits of_student = student.logits(j, n, block.z, slopes);
            take(of_student, teacher.logits(j, n, block.w), j, n, student, teacher, slopes);
        }
        if (max > -INFINITY && total.sum < 1) total.sum = 1;  // as of one row
        if (teacher_max > -INFINITY && total.teacher_sum < 1) total.teacher_sum = 1;
    }
    Known known() const {
        return {max, float(total.sum), teacher_max, float(total.teacher_sum), float(total.cross), float(total.excess)};
    }
};

template <bool FORWARD_KL, Kind KIND> void stats_of_rows(const StatsJob& job, int64_t i) {
    const int64_t vocab = job.own.rows.vocab, target = job.targets[i];
    const Fetched student(job.own, i), teacher(job.second->stream, i);
    RunningPair<FORWARD_KL, KIND, false> sums;
    sums.visit(student, teacher, vocab);
    const TwoSums& total = sums.total;
    job.to[MAX][i] = sums.max, job.to[SUM][i] = float(total.sum);
    job.to[TARGET][i] = target >= 0 && target < vocab ? student.logit(target) : NAN;
    if (KIND >= WITH_WEIGHTED) job.to[WEIGHTED][i] = float(total.weighted);
    if (KIND >= WITH_SQUARES) job.to[SQUARES][i] = float(total.squares);
    if (job.to[TOP]) reinterpret_cast<int32_t*>(job.to[TOP])[i] = first_at(student, sums.top_block, vocab, sums.max);
    job.to[TEACHER_MAX][i] = sums.teacher_max, job.to[TEACHER_SUM][i] = float(total.teacher_sum);
    job.to[CROSS][i] = float(total.cross), job.to[EXCESS][i] = float(total.excess);
}

void stats_of_rows(const StatsJob& job, int64_t i) {
    const bool forward = job.second->direction == FORWARD;
    switch (kind_of(job.to)) {
        case SUM_ALONE: return forward ? stats_of_rows<true, SUM_ALONE>(job, i) : stats_of_rows<false, SUM_ALONE>(job, i);
        case WITH_WEIGHTED: return forward ? stats_of_rows<true, WITH_WEIGHTED>(job, i) : stats_of_rows<false, WITH_WEIGHTED>(job, i);
        default: return forward ? stats_of_rows<true, WITH_SQUARES>(job, i) : stats_of_rows<false, WITH_SQUARES>(job, i);
    }
}

// ---- the second visit, of the kinds from JSD on

struct MixedSums {
    float student, teacher;

    float divergence(const Second& second) const {
        return second.direction == TV ? teacher : float(second.mixture * teacher + (1.0 - second.mixture) * student);
    }
};

template <class Of, bool KEEPS>
MixedSums mixed_sums(const Fetched& student, const Fetched& teacher, int64_t vocab, const Known& of, float log_sums, double mixture, Kept* kept) {
    if (!(fabsf(log_sums) < INFINITY)) return {NAN, NAN};  // NaN in either row, or nothing but -inf
    const Shifts shifts(of.max, of.teacher_max);
    const BothSums<Of> both = {shifts, all(log_sums), all(float(mixture)), all(float(1.0 - mixture)), all(float(1.0 / double(of.sum))),
                               all(float(1.0 / double(of.teacher_sum)))};
    double student_sum = 0, teacher_sum = 0;
    Block block;
    float* slopes = KEEPS && student.t.mode == CAPPED ? block.slopes : nullptr;
    if (KEEPS) kept->segments[kept->count++] = {0, of.max, of.teacher_max};
    for (int64_t j = 0; j < vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, vocab - j);
        const float *z = student.logits(j, n, block.z, slopes).z, *w = teacher.logits(j, n, block.w).z;
        for (int64_t k = 0; k < n; k += SUMMED) {
            F of_student = all(0.0f), of_teacher = all(0.0f);
            for (int64_t at = k; at < min(k + SUMMED, n); at += W) {
                if (at % GROUP == 0) student.prefetch(j + at), teacher.prefetch(j + at);
                const auto [p, of_p] = both.add_terms(load(z + at), load(w + at), of_student, of_teacher);
                if (KEEPS) keep_terms(*kept, j + at, p, of_p, slopes ? slopes + at : nullptr, int(min(W, n - at)));
            }
            student_sum += sum_lanes(of_student), teacher_sum += sum_lanes(of_teacher);
        }
    }
    return {float(student_sum), float(teacher_sum)};
}

template <bool KEEPS>
MixedSums mixed_sums(const Fetched& student, const Fetched& teacher, int64_t vocab, const Known& of, float log_sums, const Second& second,
                     Kept* kept) {
    const auto sums = second.direction == TV ? mixed_sums<Variation, KEEPS> : mixed_sums<Mixture, KEEPS>;
    return sums(student, teacher, vocab, of, log_sums, second.mixture, kept);
}

Known known_of(const Vectors<PARTIALS>& of, int64_t i) {
    return {of[MAX][i], of[SUM][i], of[TEACHER_MAX][i], of[TEACHER_SUM][i], 0, 0};
}

void mixed(const MixedJob& job, int64_t i) {
    MixedSums found = {0, 0};
    if (!job.read || job.read[i]) {
        const Fetched student(job.own, i), teacher(job.second->stream, i);
        const Known of = known_of(job.of, i);
        found = mixed_sums<false>(student, teacher, job.own.rows.vocab, of, job.second->log_sums[i], *job.second, nullptr);
    }
    job.to[MIXED_STUDENT][i] = found.student, job.to[MIXED_TEACHER][i] = found.teacher;
}

// ---- gradients

// d loss / d z_j = e_j (k0 + k1 x_j + k2 e_j + teacher ...) with x_j = z_j - max, e_j = exp(x_j):
//   reverse   ... = D_j - center
//   forward   ... = 1 - q_j / p_j
//   jsd       ... = log p_j - log m_j - center
//   tv        ... = sign(p_j - q_j) / 2 - center
struct Coefficients {
    F k0, k1, k2, teacher, of_q, log_sums, b, rest_of_b;
};

template <int DIRECTION, bool CLOSE, int N> INLINED void gradients(const float* z, const float* w, const Shifts& shifts, const Coefficients& of, F (&g)[N]) {
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
        } else if (DIRECTION == TV) {
            g[k] = mul_where(keep[k], e[k], fma(of.teacher, half_sign(D), factor));
        } else if (DIRECTION == JSD) {
            g[k] = mul_where(keep[k], e[k], fma(of.teacher, Mixture(D, of.b, of.rest_of_b).factor(), factor));
        } else {
            const F near = mul(mul(of.teacher, sub(D, psi_near_0(minus(D)))), e[k]);  // 1 - e^-D
            const F far = fma(of.teacher, e[k], minus(mul(of.of_q, q[k])));
            g[k] = add(mul_where(keep[k], e[k], factor), choose(not_below(magnitude(D), all(SMALL)), far, near));
        }
    }
}

// The gradient of the divergence for one column, from x = z - max. A probability that the columns' exponentials
// take for 0 is 0 here, too: log_ratio may then be anything, and below -709 its exponential is infinite.
double gradient_of_divergence(const Second& teacher, double x, double logp, double logq, double log_ratio, double center) {
    const double p = exp(logp), b = teacher.mixture;
    if (x < EXP_CUTOFF) return teacher.direction == FORWARD ? -exp(logq) : 0.0;
    if (teacher.direction == REVERSE) return p * (log_ratio - center);
    if (teacher.direction == FORWARD) return -p * expm1(-log_ratio);
    if (teacher.direction == TV) return p * (0.5 * ((log_ratio > 0) - (log_ratio < 0)) - center);
    return (1 - b) * p * (-log1p(b * expm1(-log_ratio)) - center);
}

// The logits of both rows in the target's column.
struct AtTargets : AtTarget {
    double w = NAN;

    AtTargets(const Row& student, const Row& teacher, int64_t target, int64_t vocab) : AtTarget(student, target, vocab) {
        if (there) w = teacher.logit(target);
    }
};

// The coefficients of a row's gradient, before its columns are visited. `slopes` are those of the row's own statistics, c is the slope
// of the divergence.
struct PairGradient {
    const Second& spec;
    const Slopes slopes;
    const Known& known;
    const double c, log_sums, center, sum;
    const RowGradient own;
    const double per_p, per_q;

    PairGradient(const Second& spec, const Slopes& slopes, double c, const RowTransform& t, const Known& known, double log_sums,
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
        const double constant = spec.direction == REVERSE ? log_sums - center : spec.direction == FORWARD ? 0.0 : -center;
        return own.k0 + per_p * constant;
    }
    // As in RowGradient: false if either row has a NaN or +inf.
    bool finite() const {
        if (c == 0) return own.finite();
        return own.finite() && (infinite() || fabs(k0()) < INFINITY) && fabs(per_p) < INFINITY && fabs(per_q) < INFINITY &&
               fabs(log_sums) < INFINITY && fabsf(known.teacher_max) < INFINITY;
    }
    Coefficients coefficients() const {
        const double b = spec.mixture;
        return {all(float(k0())),  all(float(own.k1)),   all(float(own.k2)), all(float(per_p)),
                all(float(per_q)), all(float(log_sums)), all(float(b)),      all(float(1.0 - b))};
    }
    float at(const AtTargets& target) const {
        // In fp64 the differences to the maxima are exact, whether the rows are close or not.
        const double x = target.z - known.max, y = target.w - known.teacher_max;
        const double logp = x - log(sum), logq = y - log(double(known.teacher_sum)), log_ratio = (x - y) + log_sums;
        const double of_divergence = c == 0 ? 0.0 : c * gradient_of_divergence(spec, x, logp, logq, log_ratio, center) * target.dz_dx;
        return float(gradient_of_target(slopes, logp, target.dz_dx) + of_divergence);
    }
};

template <int DIRECTION, bool CLOSE, class O>
void write_gradient(const Fetched& student, const Fetched& teacher, const PairGradient& gradient, const Shifts& shifts, O* out,
                    int64_t vocab) {
    const Coefficients of = gradient.coefficients();
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

template <int DIRECTION>
void write_gradient(const Fetched& student, const Fetched& teacher, const PairGradient& gradient, const Gradient& out) {
    const Shifts shifts(gradient.known.max, gradient.known.teacher_max);
    with_type(out.dtype, [&](auto e) {
        auto* to = reinterpret_cast<decltype(e)*>(out.base);
        if (shifts.close) return write_gradient<DIRECTION, true>(student, teacher, gradient, shifts, to, out.vocab);
        write_gradient<DIRECTION, false>(student, teacher, gradient, shifts, to, out.vocab);
    });
}

void write_gradient(const Fetched& student, const Fetched& teacher, const PairGradient& gradient, const Gradient& out) {
    switch (gradient.spec.direction) {
        case REVERSE: return write_gradient<REVERSE>(student, teacher, gradient, out);
        case FORWARD: return write_gradient<FORWARD>(student, teacher, gradient, out);
        case JSD: return write_gradient<JSD>(student, teacher, gradient, out);
        default: return write_gradient<TV>(student, teacher, gradient, out);
    }
}

void pull_rows(const PullJob& job, int64_t i, const Slopes& slopes) {
    const Fetched student(job.own, i), teacher(job.second->stream, i);
    const Gradient out(job.out, i);
    const Known known = known_of(job.of, i);
    const PairGradient gradient(*job.second, slopes, job.slopes[DIVERGENCE][i], student.t, known, job.second->log_sums[i],
                                job.second->center[i]);
    if (!gradient.finite()) return out.nan();
    const AtTargets target(student, teacher, job.targets[i], out.vocab);  // before its logit may be overwritten
    write_gradient(student, teacher, gradient, out);
    if (target.there) out.put(target.j, gradient.at(target));
}

// ---- the gradient from kept terms

// The factors of the terms of a segment.
Factors factors_of(const PairGradient& g, const Segment& at) {
    if (g.spec.direction >= JSD) {
        const F first = factor_of(g.sum * g.k0());
        return {first, first, factor_of(g.sum * g.per_p)};
    }
    // As in `raise`: while one of the rows had nothing but -inf, differences of the maxima have no meaning.
    const bool empty = at.shift == -INFINITY || at.teacher_shift == -INFINITY;
    const double f = at.shift > -INFINITY ? exp(double(at.shift) - g.known.max) : 0.0;
    const double apart = empty ? 0.0 : (double(at.shift) - g.known.max) - (double(at.teacher_shift) - g.known.teacher_max);
    const double log_ratio = apart + g.log_sums;
    if (g.spec.direction == REVERSE) {
        const F first = factor_of(f * (g.own.k0 + (g.c == 0 ? 0.0 : g.per_p * (log_ratio - g.center))));
        return {first, first, factor_of(f * g.per_p), f < SMALLEST};
    }
    if (g.c == 0) return {factor_of(f * g.own.k0), all(0.0f), all(0.0f)};
    const double of_q = at.teacher_shift > -INFINITY ? g.per_q * exp(double(at.teacher_shift) - g.known.teacher_max) : 0.0;
    const bool near = !empty && fabs(log_ratio) <= SMALL;
    const double both = near ? -f * g.per_p * expm1(-log_ratio) : f * g.per_p - of_q;
    return {factor_of(f * g.own.k0 + both), factor_of(-f * (g.own.k0 + g.per_p)), factor_of(of_q)};
}

// ---- statistics, loss and gradient in one call

struct FirstVisit {
    Known known;
    double weighted;
};

template <bool FORWARD_KL, bool KEEPS>
FirstVisit first_visit(const Fetched& student, const Fetched& teacher, int64_t vocab, Kept* kept) {
    RunningPair<FORWARD_KL, WITH_WEIGHTED, KEEPS> sums;
    sums.kept = kept;
    sums.visit(student, teacher, vocab);
    return {sums.known(), float(sums.total.weighted)};
}

void fused_rows(const FusedJob& job, int64_t i, const TermMemory& scratch) {
    const Second& second = *job.second;
    const int direction = second.direction;
    const Fetched student(job.own, i), teacher(second.stream, i);
    const Gradient out(job.out, i);
    const int64_t vocab = job.own.rows.vocab;
    const AtTargets target(student, teacher, job.targets[i], vocab);  // before its logit may be overwritten

    const float c = second.weight ? second.weight[i] : 0.0f;
    // Terms are not kept if the entropy has a slope, because its gradient needs the logits. Terms that need the sums of both rows are
    // kept in the second visit, and only if the divergence has a weight: else that visit may keep nothing.
    Kept kept = kept_in(student, out, scratch);
    const bool once = direction < JSD, keeps = out.base && !job.with_entropy && scratch.segments && (once || c != 0);
    const bool at_once = keeps && once;
    const auto visit = direction == FORWARD ? (at_once ? first_visit<true, true> : first_visit<true, false>)
                                            : (at_once ? first_visit<false, true> : first_visit<false, false>);
    const FirstVisit found = visit(student, teacher, vocab, &kept);
    const Known& known = found.known;
    const Divergences result = known.result(direction == FORWARD);
    const float log_sums = float(result.log_sums);
    float divergence = float(result.value), center = direction == REVERSE ? divergence : 0.0f;
    if (!once) {
        const MixedSums sums = (keeps ? mixed_sums<true> : mixed_sums<false>)(student, teacher, vocab, known, log_sums, second, &kept);
        divergence = sums.divergence(second), center = sums.student;
    }
    const Softmax softmax(known.max, known.sum, target.z, found.weighted);
    const Slopes slopes = slopes_of_token(job, i, softmax);
    job.to[OF_DIVERGENCE][i] = divergence;
    if (c != 0) job.to[LOSSES][i] += c * divergence;
    if (!out.base) return;
    if (slopes.none() && c == 0) return out.zero();
    if (c == 0 && !keeps) {  // the teacher's row is not used: it may hold anything, NaN included
        const Slopes own(slopes.target, float(slopes.constant), slopes.log, 0);  // as `pull` gets them
        return write_gradient(student, out, own, target, softmax.logp, RowGradient(own, student.t, known.max, known.sum, softmax.log_sum));
    }
    const PairGradient gradient(second, slopes, c, student.t, known, log_sums, center);
    if (!gradient.finite()) return out.nan();
    if (keeps) {
        const Terms terms = c == 0 ? ONE : gradient.infinite() ? INFINITE : direction == FORWARD ? BY_SIGN : BOTH;
        write_kept(kept, out, terms, false, [&](const Segment& at) { return factors_of(gradient, at); });
    } else {
        write_gradient(student, teacher, gradient, out);
    }
    if (target.there) out.put(target.j, gradient.at(target));
}

}  // namespace
}  // namespace grpo
