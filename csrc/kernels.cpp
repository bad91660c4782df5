// The two vocabulary stages for one row, and scaling. Compiled once per instruction set, with GRPO_ISA naming the copy.
// No C++ library headers: their inline functions, compiled here for AVX-512, could replace the baseline ones at link time.
#include "kernels.h"
#include "simd.h"

namespace grpo {
namespace {

constexpr int UNROLL = 4;
constexpr int64_t STEP = int64_t(UNROLL) * W;
// Elements that are summed in fp32 before the sums go to fp64. Each accumulator takes 32 of them, so that small terms
// added to a large one lose at most 32 roundings.
constexpr int64_t BLOCK = 32 * STEP;
// The hardware's prefetcher stops at each 4 KiB page: one page ahead is worth a tenth of the time from memory.
constexpr int64_t PREFETCH_BYTES = 4096;

enum Mode { PLAIN, SCALED, CAPPED };

struct RowTransform {
    Mode mode;
    F in, out;  // PLAIN: z = x. SCALED: z = x * in. CAPPED: z = out * tanh(x * in)
    float slope;  // dz/dx, times 1 - tanh^2 where CAPPED

    RowTransform(const Transform& t, float inverse)
        : mode(t.softcap > 0 ? CAPPED : t.scale * inverse != 1 ? SCALED : PLAIN),
          in(all(t.softcap > 0 ? t.scale / t.softcap : t.scale * inverse)),
          out(all(t.softcap * inverse)),
          slope(t.scale * inverse) {}
};

template <Mode MODE> inline F transformed(const RowTransform& t, F x) {
    if (MODE == PLAIN) return x;
    const F u = mul(x, t.in);
    return MODE == CAPPED ? mul(tanh_and_slope(u).value, t.out) : u;
}

// Which sums a visit makes, each kind those before it too.
enum Kind { SUM, WEIGHTED, SQUARES };

struct Sums {  // of exp(d), exp(d) d and exp(d)^2, d = z - shift
    double sum, weighted, squares;

    void raise_shift(double by) {
        const double factor = exp(-by);
        weighted = factor > 0 ? factor * (weighted - by * sum) : 0.0;  // by may be infinite
        sum *= factor;
        squares *= factor * factor;
    }
};

struct Block {
    float max;
    Sums sums;
};

template <Kind KIND> struct BlockSums {
    F shift, max[UNROLL], sum[UNROLL], weighted[UNROLL], squares[UNROLL];

    explicit BlockSums(float s) : shift(all(s)) {
        for (int k = 0; k < UNROLL; k++) max[k] = all(-INFINITY), sum[k] = weighted[k] = squares[k] = all(0.0f);
    }
    void take(int k, F z) {
        const F d = sub(z, shift);
        const Keep keep = not_below(d, all(EXP_CUTOFF));
        const F e = exp_above_cutoff(d);
        max[k] = max_ignoring_nan(z, max[k]);
        sum[k] = add_where(keep, sum[k], e);
        if (KIND >= WEIGHTED) weighted[k] = fma_where(keep, e, d, weighted[k]);
        if (KIND >= SQUARES) squares[k] = fma_where(keep, e, e, squares[k]);
    }
    Block total() const {
        const F best = max_ignoring_nan(max_ignoring_nan(max[0], max[1]), max_ignoring_nan(max[2], max[3]));
        const F s = add(add(sum[0], sum[1]), add(sum[2], sum[3]));
        const F w = add(add(weighted[0], weighted[1]), add(weighted[2], weighted[3]));
        const F q = add(add(squares[0], squares[1]), add(squares[2], squares[3]));
        return {max_lanes(best), {sum_lanes(s), KIND >= WEIGHTED ? sum_lanes(w) : 0.0, KIND >= SQUARES ? sum_lanes(q) : 0.0}};
    }
};

template <class T, Mode MODE, Kind KIND> Block sum_block(const T* x, int64_t n, const RowTransform& t, float shift) {
    BlockSums<KIND> sums(shift);
    int64_t j = 0;
    for (; j + STEP <= n; j += STEP) {
        for (size_t byte = 0; byte < STEP * sizeof(T); byte += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(x + j) + PREFETCH_BYTES + byte);
        }
        for (int k = 0; k < UNROLL; k += 2) {
            F a, b;
            load_pair(x + j + k * W, a, b);
            sums.take(k, transformed<MODE>(t, a));
            sums.take(k + 1, transformed<MODE>(t, b));
        }
    }
    for (; j + W <= n; j += W) sums.take(0, transformed<MODE>(t, load(x + j)));
    if (j < n) {
        const int rest = int(n - j);
        sums.take(0, choose(first_lanes(rest), transformed<MODE>(t, load_some(x + j, rest)), all(-INFINITY)));
    }
    return sums.total();
}

template <class T, Mode MODE> float max_block(const T* x, int64_t n, const RowTransform& t) {
    F best = all(-INFINITY);
    int64_t j = 0;
    for (; j + W <= n; j += W) best = max_ignoring_nan(transformed<MODE>(t, load(x + j)), best);
    if (j < n) {
        const int rest = int(n - j);
        best = max_ignoring_nan(choose(first_lanes(rest), transformed<MODE>(t, load_some(x + j, rest)), all(-INFINITY)), best);
    }
    return max_lanes(best);
}

// The first element whose z is max, or -1.
template <class T, Mode MODE> int32_t first_at(const T* x, int64_t vocab, const RowTransform& t, float max) {
    for (int64_t j = 0; j < vocab; j += STEP) {
        const int64_t n = vocab - j < STEP ? vocab - j : STEP;
        if (max_block<T, MODE>(x + j, n, t) != max) continue;
        for (int64_t k = j; k < j + n; k++) {
            if (lane0(transformed<MODE>(t, load_some(x + k, 1))) == max) return int32_t(k);
        }
    }
    return -1;
}

template <class T, Mode MODE, Kind KIND> void stats_of_row(const StatsJob& job, int64_t i, const RowTransform& t) {
    const int64_t row = job.first + i, vocab = job.vocab, target = job.targets[i];
    const T* x = reinterpret_cast<const T*>(job.logits.row(row));

    // Each block is summed relative to the maximum of the blocks before it, in one visit. One that brings a new maximum
    // is visited again, unless the maximum rises so little that the sums can be moved without loss. While nothing but
    // -inf was seen the shift is 0: exp stays 0, and a NaN still shows.
    float max = max_block<T, MODE>(x, vocab < BLOCK ? vocab : BLOCK, t);
    Sums total = {0, 0, 0};
    for (int64_t j = 0; j < vocab; j += BLOCK) {
        const int64_t n = vocab - j < BLOCK ? vocab - j : BLOCK;
        Block block = sum_block<T, MODE, KIND>(x + j, n, t, max == -INFINITY ? 0.0f : max);
        if (block.max > max) {
            const double rise = double(block.max) - double(max);
            if (rise < 1) {
                block.sums.raise_shift(rise);
            } else {
                block = sum_block<T, MODE, KIND>(x + j, n, t, block.max);
            }
            total.raise_shift(rise);
            max = block.max;
        }
        total.sum += block.sums.sum;
        total.weighted += block.sums.weighted;
        total.squares += block.sums.squares;
    }
    job.max[i] = max;
    job.sum[i] = float(total.sum);
    if (KIND >= WEIGHTED) job.weighted[i] = float(total.weighted);
    if (KIND >= SQUARES) job.squares[i] = float(total.squares);
    if (job.top) job.top[i] = first_at<T, MODE>(x, vocab, t, max);
    job.target[i] = target >= 0 && target < vocab ? lane0(transformed<MODE>(t, load_some(x + target, 1))) : NAN;
}

template <class T, Mode MODE> void stats_of_row(const StatsJob& job, int64_t i, const RowTransform& t) {
    if (job.squares) return stats_of_row<T, MODE, SQUARES>(job, i, t);
    job.weighted ? stats_of_row<T, MODE, WEIGHTED>(job, i, t) : stats_of_row<T, MODE, SUM>(job, i, t);
}

template <class T> void stats_of_row(const StatsJob& job, int64_t i) {
    const RowTransform t(job.transform, job.transform.inverse(i));
    switch (t.mode) {
        case PLAIN: return stats_of_row<T, PLAIN>(job, i, t);
        case SCALED: return stats_of_row<T, SCALED>(job, i, t);
        case CAPPED: return stats_of_row<T, CAPPED>(job, i, t);
    }
}

void stats(const StatsJob& job, int64_t i) {
    if (job.read && !job.read[i]) {
        job.max[i] = 0, job.sum[i] = 1, job.target[i] = 0;
        if (job.weighted) job.weighted[i] = 0;
        if (job.squares) job.squares[i] = 0;
        if (job.top) job.top[i] = -1;
        return;
    }
    switch (job.logits.dtype) {
        case FP32: return stats_of_row<float>(job, i);
        case BF16: return stats_of_row<bf16>(job, i);
        default: return stats_of_row<fp16>(job, i);
    }
}

template <class A, class B> constexpr bool SAME_TYPE = false;
template <class A> constexpr bool SAME_TYPE<A, A> = true;

// d loss / d x_j = e_j (k0 + k1 d_j + k2 e_j) dz/dx with d_j = z_j - max and e_j = exp(d_j).
struct Polynomial {
    float k0, k1, k2;
};

// Which terms it has, each kind those before it too.
enum Terms { CONSTANT, LINEAR, QUADRATIC };

template <class T, class O, Mode MODE, Terms TERMS>
void gradients(const T* x, O* out, int64_t vocab, const RowTransform& t, float max, const Polynomial& of) {
    const F m = all(max), c0 = all(of.k0), c1 = all(of.k1), c2 = all(of.k2);
    auto gradient = [&](F v) {
        const F u = MODE == PLAIN ? v : mul(v, t.in);
        Tanh h;
        if (MODE == CAPPED) h = tanh_and_slope(u);
        const F d = sub(MODE == CAPPED ? mul(h.value, t.out) : u, m);
        const Keep keep = not_below(d, all(EXP_CUTOFF));
        F k = TERMS >= LINEAR ? fma_where(keep, c1, d, c0) : c0;
        const F e = exp_above_cutoff(d);
        if (TERMS >= QUADRATIC) k = fma_where(keep, c2, e, k);
        if (MODE == CAPPED) k = mul(k, h.slope);
        return mul_where(keep, e, k);
    };
    int64_t j = 0;
    for (; j + STEP <= vocab; j += STEP) {
        for (int k = 0; k < UNROLL; k += 2) {
            const T* from = x + j + k * W;
            O* to = out + j + k * W;
            if constexpr (SAME_TYPE<T, O>) {
                F a, b;
                load_pair(from, a, b);
                store_pair(to, gradient(a), gradient(b));
            } else {  // a pair's order depends on its type
                store(to, gradient(load(from)));
                store(to + W, gradient(load(from + W)));
            }
        }
    }
    for (; j + W <= vocab; j += W) store(out + j, gradient(load(x + j)));
    if (j < vocab) store_some(out + j, gradient(load_some(x + j, int(vocab - j))), int(vocab - j));
}

template <class T, class O, Mode MODE>
void gradients(const T* x, O* out, int64_t vocab, const RowTransform& t, float max, const Polynomial& of) {
    if (of.k2 != 0) return gradients<T, O, MODE, QUADRATIC>(x, out, vocab, t, max, of);
    if (of.k1 != 0) return gradients<T, O, MODE, LINEAR>(x, out, vocab, t, max, of);
    gradients<T, O, MODE, CONSTANT>(x, out, vocab, t, max, of);
}

template <class T, class O> void pull_row(const PullJob& job, int64_t i) {
    const int64_t row = job.first + i, vocab = job.vocab, target = job.targets[i];
    const T* x = reinterpret_cast<const T*>(job.logits.row(row));
    O* out = reinterpret_cast<O*>(job.out.row(row));
    const double slope = job.slope[i], constant = job.constant ? job.constant[i] : 0.0;
    const double of_log = job.log ? job.log[i] : 0.0, of_prob = job.prob ? job.prob[i] : 0.0;
    if (slope == 0 && constant == 0 && of_log == 0 && of_prob == 0) {
        memset(out, 0, size_t(vocab) * sizeof(O));
        return;
    }
    const RowTransform t(job.transform, job.transform.inverse(i));
    const float max = job.max[i];
    const double sum = job.sum[i], log_sum = log(sum);
    const double k0 = (constant - slope - of_log * log_sum) * t.slope / sum;
    const double k1 = of_log * t.slope / sum, k2 = of_prob * t.slope / (sum * sum);
    // A NaN or infinity anywhere in the row has made its sum NaN; without one no element's gradient is NaN.
    if (!(fabs(k0) < INFINITY && fabs(k1) < INFINITY && fabs(k2) < INFINITY && fabsf(max) < INFINITY)) {
        O nan[W];
        store_any(nan, all(NAN));
        for (int64_t j = 0; j < vocab; j++) out[j] = nan[0];
        return;
    }
    const bool has_target = target >= 0 && target < vocab;
    float at_target = 0;
    if (has_target) {  // before its logit may be overwritten
        const double logp = (double(job.target[i]) - max) - log_sum;
        double dz_dx = t.slope;
        if (t.mode == CAPPED) dz_dx *= lane0(tanh_and_slope(mul(load_some(x + target, 1), t.in)).slope);
        const double p = exp(logp);
        // -expm1(logp) is 1 - p without cancellation.
        at_target = float((-slope * expm1(logp) + (p > 0 ? p * (constant + of_log * logp + of_prob * p) : 0.0)) * dz_dx);
    }
    const Polynomial of = {float(k0), float(k1), float(k2)};
    switch (t.mode) {
        case PLAIN: gradients<T, O, PLAIN>(x, out, vocab, t, max, of); break;
        case SCALED: gradients<T, O, SCALED>(x, out, vocab, t, max, of); break;
        case CAPPED: gradients<T, O, CAPPED>(x, out, vocab, t, max, of); break;
    }
    if (has_target) store_some(out + target, all(at_target), 1);
}

template <class T> void pull_row(const PullJob& job, int64_t i) {
    switch (job.out.dtype) {
        case FP32: return pull_row<T, float>(job, i);
        case BF16: return pull_row<T, bf16>(job, i);
        default: return pull_row<T, fp16>(job, i);
    }
}

void pull(const PullJob& job, int64_t i) {
    switch (job.logits.dtype) {
        case FP32: return pull_row<float>(job, i);
        case BF16: return pull_row<bf16>(job, i);
        default: return pull_row<fp16>(job, i);
    }
}

template <class T> void scale_elements(T* data, int64_t n, float factor) {
    const F f = all(factor);
    int64_t j = 0;
    for (; j + W <= n; j += W) store_any(data + j, mul(load(data + j), f));
    for (; j < n; j++) {
        T lanes[W];
        store_any(lanes, mul(load_some(data + j, 1), f));
        data[j] = lanes[0];
    }
}

void scale(const ScaleJob& job, int64_t begin, int64_t end) {
    switch (job.dtype) {
        case FP32: return scale_elements(reinterpret_cast<float*>(job.data) + begin, end - begin, job.factor);
        case BF16: return scale_elements(reinterpret_cast<bf16*>(job.data) + begin, end - begin, job.factor);
        default: return scale_elements(reinterpret_cast<fp16*>(job.data) + begin, end - begin, job.factor);
    }
}

}  // namespace

#define NAME_OF(isa) #isa
#define QUOTED(isa) NAME_OF(isa)
#define JOINED(a, b) a##b
#define TABLE(isa) JOINED(kernels_, isa)

extern const Kernels TABLE(GRPO_ISA);
const Kernels TABLE(GRPO_ISA) = {QUOTED(GRPO_ISA), stats, pull, scale};

}  // namespace grpo
