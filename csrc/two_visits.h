// The first visit of two rows, which computes all sums over both, and the last visit if terms were kept. Compiled once per instruction
// set, like simd.h.
#pragma once
#include "two_gradients.h"

namespace grpo {
namespace {

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

// Where a visit stores the two terms of the gradient of each column, times the slope of the softcap if there is one, and the maxima
// that they are relative to. With p = e^(z - max) and q = e^(w - teacher max) the terms are:
//   reverse   p and p d
//   forward   p and p - q where p and q are near each other; elsewhere -p and -q, where the sign marks this case
//   jsd       p and p (log p - log m), both divided by the sum of the row
struct KeptTerms {
    float *p, *k;
    KeptMaxima* maxima;  // of each block

    INLINED void put(int64_t j, F of_p, F of_k, const float* slopes, int count) const {
        if (slopes) of_p = mul(of_p, load(slopes)), of_k = mul(of_k, load(slopes));
        if (count >= W) {
            store(p + j, of_p), store(k + j, of_k);
        } else {
            store_some(p + j, of_p, count), store_some(k + j, of_k, count);
        }
    }
};

// The running sums over both rows, relative to the maxima so far.
template <bool FORWARD, Kind KIND, bool KEEPS> struct RunningPair {
    float max = -INFINITY, teacher_max = -INFINITY;
    int64_t top_block = -1;
    TwoSums total = {};
    const KeptTerms* kept = nullptr;

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
        if (KIND >= WEIGHTED) total.weighted = f > 0 ? f * (total.weighted + (double(max) - to) * total.sum) : 0.0;
        total.sum *= f, total.squares *= f * f, total.teacher_sum *= g;
        max = to, teacher_max = teacher_to;
    }

    // Adds n elements from j on.
    void take(const Logits& of_student, const Logits& of_teacher, int64_t j, int64_t n, const Stream& student, const Stream& teacher,
              const float* slopes) {
        if (of_student.max > max) top_block = j;
        if (of_student.max > max || of_teacher.max > teacher_max) {
            raise(of_student.max > max ? of_student.max : max, of_teacher.max > teacher_max ? of_teacher.max : teacher_max);
        }
        if (KEEPS) kept->maxima[j / LOGITS] = {max, teacher_max};
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
    void add_up(const float* z, const float* w, int64_t j, int64_t n, const Stream& student, const Stream& teacher, const Shifts& shifts,
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
        if (KIND >= WEIGHTED) total.weighted += sum_lanes(sums[4]);
        if (KIND >= SQUARES) total.squares += sum_lanes(sums[5]);
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
        if (KIND >= WEIGHTED) {
            F weighted = mul_where(keep[0], p[0], x[0]);
            for (int k = 1; k < N; k++) weighted = fma_where(keep[k], p[k], x[k], weighted);
            sums[4] = add(sums[4], weighted);
        }
        if (KIND >= SQUARES) {
            F squares = mul(p[0], p[0]);
            for (int k = 1; k < N; k++) squares = fma(p[k], p[k], squares);
            sums[5] = add(sums[5], squares);
        }
        if (KEEPS) {
            for (int k = 0; k < N; k++) {
                const F of_p = FORWARD ? choose(apart[k], minus(p[k]), p[k]) : p[k];
                const F of_k = FORWARD ? choose(apart[k], minus(q[k]), sub(excess[k], first[k])) : first[k];
                kept->put(j + k * W, of_p, of_k, slopes ? slopes + k * W : nullptr, count);
            }
        }
        sums[2] = add(sums[2], sum_of(first)), sums[3] = add(sums[3], sum_of(excess));
    }
    static INLINED F sum_of(const F (&of)[1]) { return of[0]; }
    static INLINED F sum_of(const F (&of)[2]) { return add(of[0], of[1]); }

    void visit(const Stream& student, const Stream& teacher, int64_t vocab) {
        Block block;
        float* slopes = KEEPS && student.t.mode == CAPPED ? block.slopes : nullptr;
        for (int64_t j = 0; j < vocab; j += LOGITS) {
            const int64_t n = min(LOGITS, vocab - j);
            const Logits of_student = student.logits(j, n, block.z, slopes);
            take(of_student, teacher.logits(j, n, block.w), j, n, student, teacher, slopes);
        }
        if (max > -INFINITY && total.sum < 1) total.sum = 1;  // as in visits.h
        if (teacher_max > -INFINITY && total.teacher_sum < 1) total.teacher_sum = 1;
    }
    Known known() const {
        return {max, float(total.sum), teacher_max, float(total.teacher_sum), float(total.cross), float(total.excess)};
    }
};

// ---- the last visit, if terms were kept

// The factors of the terms of one block in the gradient. Subnormal factors would be slow, and are set to 0.
struct OfBlock {
    F of_p, of_minus_p, of_k;
    bool none;

    OfBlock(const PairGradient& g, const KeptMaxima& at) {
        if (g.spec.direction == JSD) {
            set(g.sum * g.k0(), 0, g.sum * g.per_p);
            return;
        }
        // As in `raise`: while one of the rows had nothing but -inf, differences of the maxima have no meaning.
        const bool empty = at.student == -INFINITY || at.teacher == -INFINITY;
        const double f = at.student > -INFINITY ? exp(double(at.student) - g.known.max) : 0.0;
        const double apart = empty ? 0.0 : (double(at.student) - g.known.max) - (double(at.teacher) - g.known.teacher_max);
        const double log_ratio = apart + g.log_sums;
        if (g.spec.direction == REVERSE) {
            set(f * (g.own.k0 + (g.c == 0 ? 0.0 : g.per_p * (log_ratio - g.center))), 0, f * g.per_p);
            none = f < SMALLEST;
        } else if (g.c == 0) {
            set(f * g.own.k0, 0, 0);
        } else {
            const double of_q = at.teacher > -INFINITY ? g.per_q * exp(double(at.teacher) - g.known.teacher_max) : 0.0;
            const bool near = !empty && fabs(log_ratio) <= SMALL;
            const double both = near ? -f * g.per_p * expm1(-log_ratio) : f * g.per_p - of_q;
            set(f * g.own.k0 + both, -f * (g.own.k0 + g.per_p), of_q);
        }
    }
    void set(double p, double minus_p, double k) {
        of_p = all(normal(p)), of_minus_p = all(normal(minus_p)), of_k = all(normal(k)), none = false;
    }
    static float normal(double x) { return fabs(x) < SMALLEST ? 0.0f : float(x); }
};

enum Terms { OF_P, OF_BOTH, OF_SIGNED, INFINITE };  // p; p and k; by the sign of p; or infinite where p is not 0

template <Terms TERMS> INLINED F scaled_sum(F p, F k, const OfBlock& of) {
    if (TERMS == OF_P) return mul(magnitude(p), of.of_p);
    if (TERMS == OF_SIGNED) return fma(of.of_k, k, mul(p, choose(not_below(p, all(0.0f)), of.of_p, of.of_minus_p)));
    const F sum = fma(of.of_k, k, mul(p, of.of_p));
    return TERMS == INFINITE ? mul_where(not_below(magnitude(p), all(SMALLEST)), all(1.0f), sum) : sum;
}

template <class O, Terms TERMS> void scaled_block(const float* p, const float* k, O* out, int64_t n, const OfBlock& of) {
    int64_t j = 0;
    for (; j + 2 * W <= n; j += 2 * W) {
        for (int v = 0; v < 2; v++) {
            const int64_t at = j + v * W;
            store(out + at, scaled_sum<TERMS>(load(p + at), load(k + at), of));
        }
    }
    for (; j < n; j += W) {
        const int rest = int(min(W, n - j));
        store_some(out + j, scaled_sum<TERMS>(load_some(p + j, rest), load_some(k + j, rest), of), rest);
    }
}

// Computes the gradient of a row from the terms that were kept.
template <class O> void from_kept(const KeptTerms& kept, O* out, int64_t vocab, const PairGradient& gradient) {
    KeptMaxima at = kept.maxima[0];
    OfBlock of(gradient, at);
    const Terms terms = gradient.c == 0 ? OF_P : gradient.infinite() ? INFINITE : gradient.spec.direction == FORWARD ? OF_SIGNED : OF_BOTH;
    for (int64_t j = 0; j < vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, vocab - j);
        const KeptMaxima now = kept.maxima[j / LOGITS];
        if (now.student != at.student || now.teacher != at.teacher) at = now, of = OfBlock(gradient, at);
        if (of.none) {
            memset(out + j, 0, size_t(n) * sizeof(O));
            continue;
        }
        switch (terms) {
            case OF_P: scaled_block<O, OF_P>(kept.p + j, kept.k + j, out + j, n, of); break;
            case OF_BOTH: scaled_block<O, OF_BOTH>(kept.p + j, kept.k + j, out + j, n, of); break;
            case OF_SIGNED: scaled_block<O, OF_SIGNED>(kept.p + j, kept.k + j, out + j, n, of); break;
            default: scaled_block<O, INFINITE>(kept.p + j, kept.k + j, out + j, n, of);
        }
    }
}

}  // namespace
}  // namespace grpo
