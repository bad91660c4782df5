// The kernels of divergence.h. Compiled once per instruction set, and without C++ library headers: see kernels.cpp.
//
// Both rows go block by block through the L1 cache, as transformed fp32 logits: so dtypes and transforms, which may differ, meet only
// in `Stream`, and what follows is written once.
#include "divergence.h"

#include "row_gradient.h"

namespace grpo {
namespace {

constexpr int LANE_SETS = 2;
constexpr int64_t PIECE = int64_t(LANE_SETS) * W;
// Elements of a block. Each accumulator takes 32 of them, as in visits.h; with few lanes more, which are summed apart.
constexpr int64_t SUMMED = 32 * PIECE;
constexpr int64_t LOGITS = SUMMED < 1024 ? 1024 : SUMMED;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline F minus(F a) { return sub(all(0.0f), a); }

// ---- blocks of a row

template <class T, Mode MODE> void fetch(const T* x, int64_t n, const RowTransform& t, float* z, float* slopes) {
    for (int64_t j = 0; j < n; j += W) {
        const int rest = int(min(W, n - j));
        const Logit of = transformed<MODE>(t, rest == W ? load(x + j) : load_some(x + j, rest));
        store(z + j, rest == W ? of.z : choose(first_lanes(rest), of.z, all(-INFINITY)));
        if (MODE == CAPPED && slopes) store(slopes + j, of.slope);
    }
}

template <class T> void fetch(const T* x, int64_t n, const RowTransform& t, float* z, float* slopes) {
    switch (t.mode) {
        case PLAIN: return fetch<T, PLAIN>(x, n, t, z, slopes);
        case SCALED: return fetch<T, SCALED>(x, n, t, z, slopes);
        case CAPPED: return fetch<T, CAPPED>(x, n, t, z, slopes);
    }
}

// A row of logits of any dtype and transform.
struct Stream {
    const char* base;
    int dtype, element;
    RowTransform t;

    Stream(const Rows& rows, int64_t row, const Transform& transform, int64_t i)
        : base(rows.row(row)), dtype(rows.dtype), element(dtype == FP32 ? 4 : 2), t(transform, transform.inverse(i)) {}

    // The transformed logits from j on: in their own place if that is what they are, else in `buffer`, and -inf up to a whole vector.
    const float* logits(int64_t j, int64_t n, float* buffer, float* slopes = nullptr) const {
        const char* x = base + j * element;
        if (dtype == FP32) {
            const float* plain = reinterpret_cast<const float*>(x);
            if (t.mode == PLAIN && n % W == 0) return plain;
            fetch(plain, n, t, buffer, slopes);
        } else if (dtype == BF16) {
            fetch(reinterpret_cast<const bf16*>(x), n, t, buffer, slopes);
        } else {
            fetch(reinterpret_cast<const fp16*>(x), n, t, buffer, slopes);
        }
        return buffer;
    }
    // One of them, and dz/dx.
    float logit(int64_t j, double* slope = nullptr) const {
        float z[W], factor[W] = {1};
        z[0] = logits(j, 1, z, factor)[0];
        if (slope) *slope = double(t.slope) * (t.mode == CAPPED ? factor[0] : 1.0f);
        return z[0];
    }
    // The block after this one is on its way while this one is computed with.
    void prefetch(int64_t j) const {
        const char* next = base + (j + LOGITS) * element;
        for (int64_t byte = 0; byte < PIECE * element; byte += 64) __builtin_prefetch(next + byte);
    }
};

struct Block {
    alignas(64) float z[LOGITS], w[LOGITS], slopes[LOGITS], gradient[LOGITS];
};

inline float max_of(const float* z, int64_t n) {
    F best[2] = {all(-INFINITY), all(-INFINITY)};
    int64_t j = 0;
    for (; j + 2 * W <= n; j += 2 * W) {
        best[0] = max_ignoring_nan(load(z + j), best[0]);
        best[1] = max_ignoring_nan(load(z + j + W), best[1]);
    }
    for (; j < n; j += W) best[0] = max_ignoring_nan(load(z + j), best[0]);
    return max_lanes(max_ignoring_nan(best[0], best[1]));
}

// What the exponents of both rows are relative to; 0 in place of -inf, which makes all of them 0.
struct Shifts {
    F student, teacher, apart;
    Keep close;  // all or none

    Shifts(float max, float teacher_max) {
        const float m = max > -INFINITY ? max : 0.0f, n = teacher_max > -INFINITY ? teacher_max : 0.0f;
        student = all(m), teacher = all(n), apart = all(m - n);
        close = not_below(all(4.0f), all(fabsf(m - n)));
    }
    // (z - m) - (w - n). Of rows that are close z - w is exact where the two logits are: small differences keep their digits. Of
    // rows that are far apart z - w would round at the distance.
    F between(F z, F w) const {
        return choose(close, sub(sub(z, w), apart), sub(sub(z, student), sub(w, teacher)));
    }
};

// ---- statistics

struct TwoSums {
    double sum, weighted, squares, teacher_sum, cross, excess;
};

// g - f and g - f + f a with g = f e^-a, of one stream's sums relative to other maxima: see merged_sums in vocabulary/divergence.py.
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

// The sums over both rows, relative to the maxima so far.
template <bool FORWARD, Kind KIND> struct RunningPair {
    float max = -INFINITY, teacher_max = -INFINITY;
    int64_t top_block = -1;
    TwoSums total = {};

    // Both maxima move at once, so that nearly equal rows stay so.
    void raise(float to, float teacher_to) {
        const double f = max > -INFINITY ? exp(double(max) - to) : 0.0;
        const double g = teacher_max > -INFINITY ? exp(double(teacher_max) - teacher_to) : 0.0;
        const bool empty = max == -INFINITY || teacher_max == -INFINITY;
        const double a = empty ? 0.0 : (double(max) - teacher_max) - (double(to) - teacher_to);
        if (FORWARD) {
            rescale(g, f, -a, total.teacher_sum, total.sum, total.cross, total.excess);
        } else {
            rescale(f, g, a, total.sum, total.teacher_sum, total.cross, total.excess);
        }
        if (KIND >= WEIGHTED) total.weighted = f > 0 ? f * (total.weighted + (double(max) - to) * total.sum) : 0.0;
        total.sum *= f, total.squares *= f * f, total.teacher_sum *= g;
        max = to, teacher_max = teacher_to;
    }

    void take(const float* z, const float* w, int64_t j, int64_t n, const Stream& student, const Stream& teacher) {
        const int64_t padded = (n + W - 1) / W * W;
        const float top = max_of(z, padded), teacher_top = max_of(w, padded);
        if (top > max) top_block = j;
        if (top > max || teacher_top > teacher_max) {
            raise(top > max ? top : max, teacher_top > teacher_max ? teacher_top : teacher_max);
        }
        const Shifts shifts(max, teacher_max);
        for (int64_t k = 0; k < padded; k += SUMMED) {
            add_up(z + k, w + k, min(SUMMED, padded - k), j + k, shifts, student, teacher);
        }
    }

    void add_up(const float* z, const float* w, int64_t n, int64_t j, const Shifts& shifts, const Stream& student,
                const Stream& teacher) {
        F sum[LANE_SETS], weighted[LANE_SETS], squares[LANE_SETS], teacher_sum[LANE_SETS], cross[LANE_SETS], excess[LANE_SETS];
        for (int k = 0; k < LANE_SETS; k++) {
            sum[k] = weighted[k] = squares[k] = teacher_sum[k] = cross[k] = excess[k] = all(0.0f);
        }
        auto one = [&](int k, F of_z, F of_w) {
            const F cutoff = all(EXP_CUTOFF), x = sub(of_z, shifts.student), y = sub(of_w, shifts.teacher);
            const Keep keep = not_below(x, cutoff), teacher_keep = not_below(y, cutoff);
            const F p = exp_where(keep, x), q = exp_where(teacher_keep, y), between = shifts.between(of_z, of_w);
            sum[k] = add(sum[k], p), teacher_sum[k] = add(teacher_sum[k], q);
            if (KIND >= WEIGHTED) weighted[k] = fma_where(keep, p, x, weighted[k]);
            if (KIND >= SQUARES) squares[k] = fma(p, p, squares[k]);
            // The stream whose probabilities weigh the terms, and the other one.
            const F lead = FORWARD ? q : p, other = FORWARD ? p : q, d = FORWARD ? minus(between) : between;
            const F first = mul_where(FORWARD ? teacher_keep : keep, lead, d);
            const F near = mul(lead, psi_near_0(minus(d))), far = add(sub(other, lead), first);
            cross[k] = add(cross[k], first);
            excess[k] = add(excess[k], choose(not_below(magnitude(d), all(SMALL)), far, near));
        };
        int64_t at = 0;
        for (; at + PIECE <= n; at += PIECE) {
            student.prefetch(j + at), teacher.prefetch(j + at);
            for (int k = 0; k < LANE_SETS; k++) one(k, load(z + at + k * W), load(w + at + k * W));
        }
        for (; at < n; at += W) one(0, load(z + at), load(w + at));
        auto lanes = [](const F* x) { return sum_lanes(add(x[0], x[1])); };
        total.sum += lanes(sum), total.teacher_sum += lanes(teacher_sum);
        total.cross += lanes(cross), total.excess += lanes(excess);
        if (KIND >= WEIGHTED) total.weighted += lanes(weighted);
        if (KIND >= SQUARES) total.squares += lanes(squares);
    }
};

template <bool FORWARD_KL, Kind KIND> void stats_of_rows(const TwoStats& job, int64_t i) {
    const StatsJob& of = job.student;
    const int64_t row = of.first + i, target = of.targets[i];
    const Stream student(of.logits, row, of.transform, i), teacher(job.teacher.logits, row, job.teacher.transform, i);
    Block block;
    RunningPair<FORWARD_KL, KIND> sums;
    for (int64_t j = 0; j < of.vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, of.vocab - j);
        sums.take(student.logits(j, n, block.z), teacher.logits(j, n, block.w), j, n, student, teacher);
    }
    TwoSums& total = sums.total;
    if (sums.max > -INFINITY && total.sum < 1) total.sum = 1;  // as in visits.h
    if (sums.teacher_max > -INFINITY && total.teacher_sum < 1) total.teacher_sum = 1;
    of.max[i] = sums.max, of.sum[i] = float(total.sum);
    if (KIND >= WEIGHTED) of.weighted[i] = float(total.weighted);
    if (KIND >= SQUARES) of.squares[i] = float(total.squares);
    of.target[i] = target >= 0 && target < of.vocab ? student.logit(target) : NAN;
    if (of.top) {
        of.top[i] = -1;
        for (int64_t j = sums.top_block; j >= 0 && j < of.vocab; j++) {
            if (student.logit(j) != sums.max) continue;
            of.top[i] = int32_t(j);
            break;
        }
    }
    job.max[i] = sums.teacher_max, job.sum[i] = float(total.teacher_sum);
    job.cross[i] = float(total.cross), job.excess[i] = float(total.excess);
}

template <bool FORWARD_KL> void stats_of_rows(const TwoStats& job, int64_t i) {
    if (job.student.squares) return stats_of_rows<FORWARD_KL, SQUARES>(job, i);
    job.student.weighted ? stats_of_rows<FORWARD_KL, WEIGHTED>(job, i) : stats_of_rows<FORWARD_KL, SUM>(job, i);
}

void stats(const TwoStats& job, int64_t i) {
    const StatsJob& of = job.student;
    if (!of.read || of.read[i]) {
        return job.teacher.direction == FORWARD ? stats_of_rows<true>(job, i) : stats_of_rows<false>(job, i);
    }
    of.max[i] = 0, of.sum[i] = 1, of.target[i] = 0;
    if (of.weighted) of.weighted[i] = 0;
    if (of.squares) of.squares[i] = 0;
    if (of.top) of.top[i] = -1;
    job.max[i] = 0, job.sum[i] = 1, job.cross[i] = 0, job.excess[i] = 0;
}

// ---- both rows and their mixture m = (1 - b) p + b q

// Up to here y is near 0 for rest_of_log1p.
constexpr float NEAR_MIXTURE = 0.41f;

// Of one column, from D = log p - log q: the larger of p and q is M, the smaller M ratio. x = m/M - 1, and y the same of the smaller
// one; far where y is not near 0.
struct Against {
    Keep student_larger, smaller_counts, far;
    F s, ratio, less, rest_of_share, y, rest_of_y;  // s = |D|, ratio = e^-s, less = e^-s - 1
    Log1p x;

    Against(F D, F b, F rest_of_b) {
        student_larger = not_below(D, all(0.0f));
        s = magnitude(D);
        const F down = minus(s);
        smaller_counts = not_below(down, all(EXP_CUTOFF));
        ratio = exp_where(smaller_counts, down);
        less = choose(not_below(s, all(SMALL)), sub(ratio, all(1.0f)), sub(psi_near_0(down), s));
        rest_of_share = choose(student_larger, rest_of_b, b);
        x = log1p_and_rest(mul(choose(student_larger, b, rest_of_b), less));
        y = div(mul(rest_of_share, minus(less)), ratio);
        far = not_below(y, all(NEAR_MIXTURE));
        rest_of_y = rest_of_log1p(y);
    }
    // log p - log m
    F of_student() const {
        const F of_smaller = choose(far, add(x.value, s), sub(y, rest_of_y));
        return minus(choose(student_larger, x.value, of_smaller));
    }
    // The term of the smaller one in its KL to m, over M. Of M itself it is x.rest.
    F smaller() const {
        const F beyond = sub(minus(mul(rest_of_share, less)), mul_where(smaller_counts, ratio, add(x.value, s)));
        return choose(far, beyond, mul(ratio, rest_of_y));
    }
};

void mixed(const MixedJob& job, int64_t i) {
    if (job.read && !job.read[i]) {
        job.student_kl[i] = job.teacher_kl[i] = 0;
        return;
    }
    const int64_t row = job.first + i;
    const Stream student(job.logits, row, job.transform, i), teacher(job.teacher.logits, row, job.teacher.transform, i);
    const Shifts shifts(job.of.max[i], job.of.teacher_max[i]);
    if (!(fabsf(job.of.log_sums[i]) < INFINITY)) {  // NaN in either row, or nothing but -inf
        job.student_kl[i] = job.teacher_kl[i] = NAN;
        return;
    }
    const F log_sums = all(job.of.log_sums[i]), b = all(job.teacher.mixture), rest_of_b = all(1.0f - job.teacher.mixture);
    const F inverse = all(float(1.0 / double(job.of.sum[i]))), teacher_inverse = all(float(1.0 / double(job.of.teacher_sum[i])));
    double student_kl = 0, teacher_kl = 0;
    Block block;
    for (int64_t j = 0; j < job.vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, job.vocab - j), padded = (n + W - 1) / W * W;
        const float *z = student.logits(j, n, block.z), *w = teacher.logits(j, n, block.w);
        for (int64_t k = 0; k < padded; k += SUMMED) {
            F of_student = all(0.0f), of_teacher = all(0.0f);
            for (int64_t at = k; at < min(k + SUMMED, padded); at += W) {
                if (at % PIECE == 0) student.prefetch(j + at), teacher.prefetch(j + at);
                const F of_z = load(z + at), of_w = load(w + at);
                const Against column(add(shifts.between(of_z, of_w), log_sums), b, rest_of_b);
                const Keep larger = column.student_larger;
                const F exponent = choose(larger, sub(of_z, shifts.student), sub(of_w, shifts.teacher));
                const Keep keep = not_below(exponent, all(EXP_CUTOFF));
                const F most = mul(exp_where(keep, exponent), choose(larger, inverse, teacher_inverse));
                const F of_larger = mul_where(keep, most, column.x.rest), of_smaller = mul_where(keep, most, column.smaller());
                of_student = add(of_student, choose(larger, of_larger, of_smaller));
                of_teacher = add(of_teacher, choose(larger, of_smaller, of_larger));
            }
            student_kl += sum_lanes(of_student), teacher_kl += sum_lanes(of_teacher);
        }
    }
    job.student_kl[i] = float(student_kl), job.teacher_kl[i] = float(teacher_kl);
}

// ---- gradients

// d loss / d z_j = e_j (k0 + k1 x_j + k2 e_j + teacher ...) with x_j = z_j - max, e_j = exp(x_j):
//   reverse   ... = D_j - center
//   forward   ... = 1 - q_j / p_j
//   jsd       ... = log p_j - log m_j - center
struct Factors {
    F k0, k1, k2, teacher, of_q, log_sums, b, rest_of_b;
};

template <int DIRECTION> F gradient(F of_z, F of_w, const Shifts& shifts, const Factors& of) {
    const F x = sub(of_z, shifts.student), d = shifts.between(of_z, of_w);
    const Keep keep = not_below(x, all(EXP_CUTOFF));
    const F e = exp_where(keep, x);
    F factor = fma_where(keep, of.k1, x, fma(of.k2, e, of.k0));
    if (DIRECTION == REVERSE) return mul_where(keep, e, fma(of.teacher, d, factor));
    const F D = add(d, of.log_sums);
    if (DIRECTION == JSD) return mul_where(keep, e, fma(of.teacher, Against(D, of.b, of.rest_of_b).of_student(), factor));
    const F y = sub(of_w, shifts.teacher);
    const F q = exp_where(not_below(y, all(EXP_CUTOFF)), y);
    const F near = sub(D, psi_near_0(minus(D)));  // 1 - e^-D
    const F difference = choose(not_below(magnitude(D), all(SMALL)), fma(of.teacher, e, minus(mul(of.of_q, q))),
                                mul(mul(of.teacher, near), e));
    return add(mul_where(keep, e, factor), difference);
}

template <class O> void narrow(const float* from, O* to, int64_t n) {
    int64_t j = 0;
    for (; j + W <= n; j += W) store(to + j, load(from + j));
    if (j < n) store_some(to + j, load(from + j), int(n - j));
}

struct PulledRow {
    const Stream &student, &teacher;
    const Shifts& shifts;
    const Factors& of;
    char* out;
    int dtype;

    template <int DIRECTION> void write(int64_t vocab) const {
        Block block;
        const bool capped = student.t.mode == CAPPED;
        for (int64_t j = 0; j < vocab; j += LOGITS) {
            const int64_t n = min(LOGITS, vocab - j);
            const float *z = student.logits(j, n, block.z, block.slopes), *w = teacher.logits(j, n, block.w);
            float* to = dtype == FP32 && n % W == 0 ? reinterpret_cast<float*>(out) + j : block.gradient;
            for (int64_t at = 0; at < n; at += W) {
                if (at % PIECE == 0) student.prefetch(j + at), teacher.prefetch(j + at);
                F g = gradient<DIRECTION>(load(z + at), load(w + at), shifts, of);
                if (capped) g = mul(g, load(block.slopes + at));
                store(to + at, g);
            }
            if (to != block.gradient) continue;
            switch (dtype) {  // the block has been read: a narrower gradient may overwrite it
                case FP32: narrow(to, reinterpret_cast<float*>(out) + j, n); break;
                case BF16: narrow(to, reinterpret_cast<bf16*>(out) + j, n); break;
                default: narrow(to, reinterpret_cast<fp16*>(out) + j, n);
            }
        }
    }
};

// G of one column, from the row's logits as fp64.
double gradient_of_divergence(const Teacher& teacher, double logp, double log_ratio, double center) {
    const double p = exp(logp), b = teacher.mixture;
    if (p == 0) return teacher.direction == FORWARD ? -exp(logp - log_ratio) : 0.0;
    if (teacher.direction == REVERSE) return p * (log_ratio - center);
    if (teacher.direction == FORWARD) return -p * expm1(-log_ratio);
    return (1 - b) * p * (-log1p(b * expm1(-log_ratio)) - center);
}

template <class O> void pull_rows(const TwoPull& job, int64_t i) {
    const PullJob& of = job.student;
    const int64_t row = of.first + i, target = of.targets[i];
    const int direction = job.teacher.direction;
    O* out = reinterpret_cast<O*>(of.out.row(row));
    const Stream student(of.logits, row, of.transform, i), teacher(job.teacher.logits, row, job.teacher.transform, i);
    const Slopes slopes = {of.slope[i], of.constant ? of.constant[i] : 0.0, of.log ? of.log[i] : 0.0, of.prob ? of.prob[i] : 0.0};
    const double sum = of.sum[i], log_sum = log(sum), c = job.slope[i], log_sums = job.of.log_sums[i], center = job.center[i];
    const RowGradient own(slopes, student.t, of.max[i], sum, log_sum);
    const double share = direction == JSD ? 1.0 - job.teacher.mixture : 1.0, per_p = c * share * student.t.slope / sum;
    const double constant = direction == REVERSE ? log_sums - center : direction == JSD ? -center : 0.0;
    const bool infinite = direction == REVERSE && center == INFINITY;  // so is each element's gradient where p is not 0
    const double per_q = direction == FORWARD ? c * student.t.slope / job.of.teacher_sum[i] : 0.0, k0 = own.k0 + per_p * constant;
    const float teacher_max = job.of.teacher_max[i];
    // As of a single stream: a NaN or an infinity in either row shows here.
    const bool finite = own.finite() && (infinite || fabs(k0) < INFINITY) && fabs(per_p) < INFINITY && fabs(per_q) < INFINITY &&
                        fabs(log_sums) < INFINITY && fabsf(teacher_max) < INFINITY;
    if (!finite) return fill_nan(out, of.vocab);
    const bool has_target = target >= 0 && target < of.vocab;
    double dz_dx = 0, at_target = 0;
    if (has_target) {  // before its logit may be overwritten
        const double z = student.logit(target, &dz_dx), w = teacher.logit(target);
        const double logp = (double(of.target[i]) - of.max[i]) - log_sum;
        const double log_ratio = ((z - w) - (double(of.max[i]) - teacher_max)) + log_sums;
        at_target = gradient_of_target(slopes, logp, dz_dx) + c * gradient_of_divergence(job.teacher, logp, log_ratio, center) * dz_dx;
    }
    const float b = job.teacher.mixture;
    const Factors factors = {all(float(k0)),    all(float(own.k1)),    all(float(own.k2)), all(float(per_p)),
                             all(float(per_q)), all(float(log_sums)), all(b),             all(1.0f - b)};
    const Shifts shifts(of.max[i], teacher_max);
    const PulledRow pulled = {student, teacher, shifts, factors, reinterpret_cast<char*>(out), of.out.dtype};
    switch (direction) {
        case REVERSE: pulled.write<REVERSE>(of.vocab); break;
        case FORWARD: pulled.write<FORWARD>(of.vocab); break;
        default: pulled.write<JSD>(of.vocab);
    }
    if (has_target) store_some(out + target, all(float(at_target)), 1);
}

void pull(const TwoPull& job, int64_t i) {
    if (job.slope[i] == 0) return job.without(job.student, i);
    switch (job.student.out.dtype) {
        case FP32: return pull_rows<float>(job, i);
        case BF16: return pull_rows<bf16>(job, i);
        default: return pull_rows<fp16>(job, i);
    }
}

}  // namespace

#define NAME_OF(isa) #isa
#define QUOTED(isa) NAME_OF(isa)
#define JOINED(a, b) a##b
#define TABLE(isa) JOINED(divergence_, isa)

extern const DivergenceKernels TABLE(GRPO_ISA);
const DivergenceKernels TABLE(GRPO_ISA) = {QUOTED(GRPO_ISA), stats, mixed, pull};

}  // namespace grpo
