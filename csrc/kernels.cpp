// The operations on one row: statistics, gradient, both in one call, and scaling. Compiled once per instruction set; GRPO_ISA names
// the copy. C++ library headers are not included: their inline functions, compiled here for AVX-512, could replace those of other
// files at link time and crash on processors without AVX-512.
#include "row_gradient.h"

namespace grpo {
namespace {

template <class T, Mode MODE> float max_block(const T* x, int64_t n, const RowTransform& t) {
    F best = all(-INFINITY);
    int64_t j = 0;
    for (; j + W <= n; j += W) best = max_ignoring_nan(transformed<MODE>(t, load(x + j)).z, best);
    if (j < n) {
        const int rest = int(n - j);
        best = max_ignoring_nan(choose(first_lanes(rest), transformed<MODE>(t, load_some(x + j, rest)).z, all(-INFINITY)), best);
    }
    return max_lanes(best);
}

// The index of the first element whose z is max, or -1.
template <class T, Mode MODE> int32_t first_at(const T* x, int64_t vocab, const RowTransform& t, float max) {
    for (int64_t j = 0; j < vocab; j += STEP) {
        const int64_t n = vocab - j < STEP ? vocab - j : STEP;
        if (max_block<T, MODE>(x + j, n, t) != max) continue;
        for (int64_t k = j; k < j + n; k++) {
            if (logit_at<T, MODE>(x, k, t) == max) return int32_t(k);
        }
    }
    return -1;
}

template <class T, Mode MODE, Kind KIND> void stats_of_row(const StatsJob& job, int64_t i, const RowTransform& t) {
    const int64_t vocab = job.vocab, target = job.targets[i];
    const T* x = reinterpret_cast<const T*>(job.logits.row(job.first + i));
    const Visit found = visit<T, MODE, KIND, NOTHING>(x, vocab, t, nullptr);
    job.max[i] = found.max;
    job.sum[i] = float(found.sums.sum);
    if (KIND >= WEIGHTED) job.weighted[i] = float(found.sums.weighted);
    if (KIND >= SQUARES) job.squares[i] = float(found.sums.squares);
    if (job.top) job.top[i] = first_at<T, MODE>(x, vocab, t, found.max);
    job.target[i] = target >= 0 && target < vocab ? logit_at<T, MODE>(x, target, t) : NAN;
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

// The highest term of the polynomial; lower terms are always present.
enum Terms { CONSTANT, LINEAR, QUADRATIC };

template <class T, class O, Mode MODE, Terms TERMS>
void gradients(const T* x, O* out, int64_t vocab, const RowTransform& t, float max, const Polynomial& of) {
    const F m = all(max), c0 = all(of.k0), c1 = all(of.k1), c2 = all(of.k2);
    auto to_gradients = [&](auto& v) INLINED_LAMBDA {  // of a few vectors of logits
        constexpr int N = sizeof(v) / sizeof(F);
        F d[N], e[N], slope[N];
        Keep keep[N];
        for (int k = 0; k < N; k++) {
            const Logit of_v = transformed<MODE>(t, v[k]);
            d[k] = sub(of_v.z, m), slope[k] = of_v.slope, keep[k] = not_below(d[k], all(EXP_CUTOFF));
        }
        exp_where(keep, d, e);
        for (int k = 0; k < N; k++) {
            F factor = TERMS >= LINEAR ? fma_where(keep[k], c1, d[k], c0) : c0;
            if (TERMS >= QUADRATIC) factor = fma_where(keep[k], c2, e[k], factor);
            if (MODE == CAPPED) factor = mul(factor, slope[k]);
            v[k] = mul_where(keep[k], e[k], factor);
        }
    };
    int64_t j = 0;
    for (; j + STEP <= vocab; j += STEP) {
        F v[UNROLL];
        for (int k = 0; k < UNROLL; k += 2) {
            const T* from = x + j + k * W;
            if constexpr (SAME_TYPE<T, O>) {
                load_pair(from, v[k], v[k + 1]);
            } else {  // load_pair orders elements differently for each type
                v[k] = load(from), v[k + 1] = load(from + W);
            }
        }
        to_gradients(v);
        for (int k = 0; k < UNROLL; k += 2) {
            O* to = out + j + k * W;
            if constexpr (SAME_TYPE<T, O>) {
                store_pair(to, v[k], v[k + 1]);
            } else {
                store(to, v[k]), store(to + W, v[k + 1]);
            }
        }
    }
    for (; j < vocab; j += W) {
        const int rest = vocab - j < W ? int(vocab - j) : W;
        F v[1] = {load_some(x + j, rest)};
        to_gradients(v);
        store_some(out + j, v[0], rest);
    }
}

template <class T, class O, Mode MODE>
void gradients(const T* x, O* out, int64_t vocab, const RowTransform& t, float max, const Polynomial& of) {
    if (of.k2 != 0) return gradients<T, O, MODE, QUADRATIC>(x, out, vocab, t, max, of);
    if (of.k1 != 0) return gradients<T, O, MODE, LINEAR>(x, out, vocab, t, max, of);
    gradients<T, O, MODE, CONSTANT>(x, out, vocab, t, max, of);
}

template <class T, class O>
void gradients(const T* x, O* out, int64_t vocab, const RowTransform& t, float max, const Polynomial& of) {
    switch (t.mode) {
        case PLAIN: return gradients<T, O, PLAIN>(x, out, vocab, t, max, of);
        case SCALED: return gradients<T, O, SCALED>(x, out, vocab, t, max, of);
        case CAPPED: return gradients<T, O, CAPPED>(x, out, vocab, t, max, of);
    }
}

template <class T, class O> void pull_row(const PullJob& job, int64_t i) {
    const int64_t row = job.first + i, vocab = job.vocab, target = job.targets[i];
    const T* x = reinterpret_cast<const T*>(job.logits.row(row));
    O* out = reinterpret_cast<O*>(job.out.row(row));
    const Slopes slopes = {job.slope[i], job.constant ? job.constant[i] : 0.0, job.log ? job.log[i] : 0.0,
                           job.prob ? job.prob[i] : 0.0};
    if (slopes.none()) {
        memset(out, 0, size_t(vocab) * sizeof(O));
        return;
    }
    const RowTransform t(job.transform, job.transform.inverse(i));
    const double log_sum = log(double(job.sum[i]));
    const RowGradient gradient(slopes, t, job.max[i], job.sum[i], log_sum);
    if (!gradient.finite()) return fill_nan(out, vocab);
    const bool has_target = target >= 0 && target < vocab;
    const double dz_dx = has_target ? slope_at(x, target, t) : 0.0;  // read now: its logit may be overwritten below
    gradients(x, out, vocab, t, gradient.max, gradient.polynomial());
    if (has_target) {
        const double logp = (double(job.target[i]) - gradient.max) - log_sum;
        store_some(out + target, all(gradient_of_target(slopes, logp, dz_dx)), 1);
    }
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

// Where the first visit of a row keeps its exponentials: in the memory of the gradient if that is fp32; else in that of the logits, if
// they are fp32 and the gradient overwrites them; else in `scratch`, which may be null.
template <class T, class O> float* kept_in(T* x, O* out, float* scratch) {
    if constexpr (SAME_TYPE<O, float>) return out;
    if constexpr (SAME_TYPE<T, float>) {
        if (static_cast<void*>(x) == static_cast<void*>(out)) return x;
    }
    return scratch;
}

template <class T, class O, Mode MODE>
void fused_row(const FusedJob& job, int64_t i, const Scratch& scratch, const RowTransform& t) {
    constexpr Keeping KEEPING = SAME_TYPE<T, O> && sizeof(T) == 2 ? IN_PAIRS : IN_ORDER;
    const int64_t vocab = job.vocab, target = job.targets[i];
    T* x = reinterpret_cast<T*>(job.logits.row(i));
    O* out = job.out.base ? reinterpret_cast<O*>(job.out.row(i)) : nullptr;
    // The logit of the target is read now: it may be overwritten below.
    const bool has_target = target >= 0 && target < vocab;
    const double z = has_target ? logit_at<T, MODE>(x, target, t) : NAN, dz_dx = has_target ? slope_at(x, target, t) : 0.0;

    // The gradient of the entropy needs the logits, so their exponentials alone are of no use for it.
    const bool keeps = out && !job.with_entropy && scratch.segments;
    Kept kept = {keeps ? kept_in(x, out, scratch.row) : nullptr, scratch.segments, 0};
    const Visit found = kept.exponentials ? visit<T, MODE, WEIGHTED, KEEPING>(x, vocab, t, &kept)
                                          : visit<T, MODE, WEIGHTED, NOTHING>(x, vocab, t, nullptr);
    const double sum = float(found.sums.sum);  // rounded to fp32 as in `stats`, so that results are the same
    const Softmax softmax(found.max, sum, z, float(found.sums.weighted));
    const Slopes slopes = token_of(job, i, float(softmax.logp), softmax.entropy);
    if (!out) return;
    if (slopes.none()) {
        memset(out, 0, size_t(vocab) * sizeof(O));
        return;
    }
    const RowGradient gradient(slopes, t, found.max, sum, softmax.log_sum);
    if (!gradient.finite()) return fill_nan(out, vocab);
    if (kept.exponentials) {
        scaled<O, KEEPING>(kept, out, vocab, gradient.max, gradient.k0);
    } else {
        gradients<T, O, MODE>(x, out, vocab, t, gradient.max, gradient.polynomial());
    }
    if (has_target) store_some(out + target, all(gradient_of_target(slopes, softmax.logp, dz_dx)), 1);
}

template <class T, class O> void fused_row(const FusedJob& job, int64_t i, const Scratch& scratch) {
    const RowTransform t(job.transform, job.transform.inverse(i));
    switch (t.mode) {
        case PLAIN: return fused_row<T, O, PLAIN>(job, i, scratch, t);
        case SCALED: return fused_row<T, O, SCALED>(job, i, scratch, t);
        case CAPPED: return fused_row<T, O, CAPPED>(job, i, scratch, t);
    }
}

template <class T> void fused_row(const FusedJob& job, int64_t i, const Scratch& scratch) {
    switch (job.out.dtype) {
        case FP32: return fused_row<T, float>(job, i, scratch);
        case BF16: return fused_row<T, bf16>(job, i, scratch);
        default: return fused_row<T, fp16>(job, i, scratch);
    }
}

void fused(const FusedJob& job, int64_t i, const Scratch& scratch) {
    if (job.read && !job.read[i]) {
        token_of(job, i, 0, 0);
        if (job.out.base) memset(job.out.row(i), 0, size_t(job.vocab) * (job.out.dtype == FP32 ? 4 : 2));
        return;
    }
    switch (job.logits.dtype) {
        case FP32: return fused_row<float>(job, i, scratch);
        case BF16: return fused_row<bf16>(job, i, scratch);
        default: return fused_row<fp16>(job, i, scratch);
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
const Kernels TABLE(GRPO_ISA) = {QUOTED(GRPO_ISA), stats, pull, fused, scale};

}  // namespace grpo
