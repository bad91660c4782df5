// The visits of a row of logits from which the kernels are built. Compiled once per instruction set, like simd.h.
#pragma once
#include "functions.h"
#include "kernels.h"

namespace grpo {
namespace {

constexpr int UNROLL = 4;
constexpr int64_t STEP = int64_t(UNROLL) * W;
// Elements that are summed in fp32 before the sums are added to fp64 ones. Each accumulator adds 32 of them, so that a small term is
// rounded at most 32 times next to a large sum.
constexpr int64_t BLOCK = 32 * STEP;
// The hardware's prefetcher stops at the end of each 4 KiB page. Prefetching one page ahead saves a tenth of the time of rows that
// come from memory.
constexpr int64_t PREFETCH_BYTES = 4096;

enum Mode { PLAIN, SCALED, CAPPED };

struct RowTransform {
    Mode mode;
    F in, out;  // PLAIN: z = x. SCALED: z = x * in. CAPPED: z = out * tanh(x * in)
    float slope;  // dz/dx; for CAPPED it has to be multiplied by 1 - tanh^2

    RowTransform(const Transform& t, float inverse)
        : mode(t.softcap > 0 ? CAPPED : t.scale * inverse != 1 ? SCALED : PLAIN),
          in(all(t.softcap > 0 ? t.scale / t.softcap : t.scale * inverse)),
          out(all(t.softcap * inverse)),
          slope(t.scale * inverse) {}
};

// z, and for CAPPED the factor of dz/dx that depends on x.
struct Logit {
    F z, slope;
};

template <Mode MODE> INLINED Logit transformed(const RowTransform& t, F x) {
    if (MODE == PLAIN) return {x, x};
    const F u = mul(x, t.in);
    if (MODE == SCALED) return {u, u};
    const Tanh h = tanh_and_slope(u);
    return {mul(h.value, t.out), h.slope};
}

// The sums that a visit computes; each kind includes those before it.
enum Kind { SUM, WEIGHTED, SQUARES };

struct Sums {  // of exp(d), exp(d) d and exp(d)^2, d = z - shift
    double sum, weighted, squares;

    void raise_shift(double by) {
        const double factor = exp(-by);
        weighted = factor > 0 ? factor * (weighted - by * sum) : 0.0;  // `by` may be infinite
        sum *= factor;
        squares *= factor * factor;
    }
};

// A segment begins with a step, or with one of the vectors behind the last step.
static_assert(STEP >= SHORTEST_SEGMENT && UNROLL < 8, "most_segments counts too few");

// Where a visit stores exp(z - shift) of a row, times the slope of the softcap if there is one.
struct Kept {
    float* exponentials;
    Segment* segments;
    int count;
};

enum Keeping { NOTHING, IN_ORDER, IN_PAIRS };  // in pairs: in the order of load_pair

// The sums of a row, relative to its largest logit.
struct Visit {
    float max;
    Sums sums;
};

// Sums over the elements seen so far, relative to a shift. If an element exceeds the shift by more than 1, the shift is raised to the
// maximum of its vectors. So no exponential is above e, and none has to be computed again. As long as all elements were -inf the
// shift is 0: their exponentials are 0, and a NaN still makes the sum NaN.
template <Kind KIND> struct RunningSums {
    F shift, limit, max, sum[UNROLL], weighted[UNROLL], squares[UNROLL];
    float shifted_by = -INFINITY;
    Sums total = {0, 0, 0};

    RunningSums() : shift(all(0.0f)), limit(all(-INFINITY)), max(all(-INFINITY)) { clear(); }

    void clear() {
        for (int k = 0; k < UNROLL; k++) sum[k] = weighted[k] = squares[k] = all(0.0f);
    }
    // Adds logits that are not above the limit, and returns their exponentials in e.
    template <int N> INLINED void take(const Logit (&of)[N], F (&e)[N]) {
        F d[N];
        Keep keep[N];
        for (int k = 0; k < N; k++) d[k] = sub(of[k].z, shift);
        for (int k = 0; k < N; k++) keep[k] = not_below(d[k], all(EXP_CUTOFF));
        exp_where(keep, d, e);
        for (int k = 0; k < N; k++) {
            sum[k] = add(sum[k], e[k]);
            if (KIND >= WEIGHTED) weighted[k] = fma_where(keep[k], e[k], d[k], weighted[k]);
            if (KIND >= SQUARES) squares[k] = fma(e[k], e[k], squares[k]);
        }
    }
    void to_total() {
        total.sum += sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
        if (KIND >= WEIGHTED) total.weighted += sum_lanes(add(add(weighted[0], weighted[1]), add(weighted[2], weighted[3])));
        if (KIND >= SQUARES) total.squares += sum_lanes(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
        clear();
    }
    // Raises the shift to the largest lane.
    void raise(F lanes) {
        const float to = max_lanes(max_ignoring_nan(lanes, all(-INFINITY)));
        to_total();
        if (shifted_by > -INFINITY) total.raise_shift(double(to) - double(shifted_by));
        shifted_by = to;
        shift = all(to);
        limit = all(to + 1);
    }
    Visit visit() {
        to_total();
        const float largest = max_lanes(max);
        if (largest > shifted_by) total.raise_shift(double(largest) - double(shifted_by));
        if (largest > -INFINITY && total.sum < 1) total.sum = 1;  // exp(0) is one of the terms: rounding must not make a log-prob positive
        return {largest, total};
    }
};

template <Mode MODE> INLINED F kept_of(F e, const Logit& of) { return MODE == CAPPED ? mul(e, of.slope) : e; }

// Visits a row once, and keeps its exponentials or not. They may be kept in the memory of the row itself.
template <class T, Mode MODE, Kind KIND, Keeping KEEPING>
Visit visit(const T* x, int64_t vocab, const RowTransform& t, Kept* kept) {
    RunningSums<KIND> sums;
    auto limit = [&](int64_t at, F top) INLINED_LAMBDA {
        sums.max = max_ignoring_nan(top, sums.max);
        if (!any_above(top, sums.limit)) return;
        sums.raise(top);
        if (KEEPING != NOTHING) kept->segments[kept->count++] = {at, sums.shifted_by};
    };
    if (KEEPING != NOTHING) kept->count = 0;
    const int64_t whole = vocab / STEP * STEP;
    int64_t j = 0;
    while (j < whole) {
        const int64_t end = whole - j < BLOCK ? whole : j + BLOCK;
        for (; j < end; j += STEP) {
            for (size_t byte = 0; byte < STEP * sizeof(T); byte += 64) {
                __builtin_prefetch(reinterpret_cast<const char*>(x + j) + PREFETCH_BYTES + byte);
            }
            Logit of[UNROLL];
            for (int k = 0; k < UNROLL; k += 2) {
                F a, b;
                if (KEEPING == IN_ORDER) {
                    a = load(x + j + k * W), b = load(x + j + k * W + W);
                } else {
                    load_pair(x + j + k * W, a, b);
                }
                of[k] = transformed<MODE>(t, a), of[k + 1] = transformed<MODE>(t, b);
            }
            limit(j, max_ignoring_nan(max_ignoring_nan(of[0].z, of[1].z), max_ignoring_nan(of[2].z, of[3].z)));
            F e[UNROLL];
            sums.take(of, e);
            for (int k = 0; KEEPING != NOTHING && k < UNROLL; k++) {
                store(kept->exponentials + j + k * W, kept_of<MODE>(e[k], of[k]));
            }
        }
        sums.to_total();
    }
    for (; j < vocab; j += W) {
        const int rest = vocab - j < W ? int(vocab - j) : W;
        Logit of[1] = {transformed<MODE>(t, load_some(x + j, rest))};
        of[0].z = choose(first_lanes(rest), of[0].z, all(-INFINITY));
        limit(j, of[0].z);
        F e[1];
        sums.take(of, e);
        if (KEEPING != NOTHING) store_some(kept->exponentials + j, kept_of<MODE>(e[0], of[0]), rest);
    }
    return sums.visit();
}

// The second visit, if exponentials were kept: multiplies each by `factor` and by exp(shift of its segment - max).
template <class O, Keeping KEEPING>
void scaled(const Kept& kept, O* out, int64_t vocab, float max, double factor) {
    const int64_t whole = vocab / STEP * STEP;
    const float* e = kept.exponentials;
    for (int s = 0; s < kept.count; s++) {
        const int64_t end = s + 1 < kept.count ? kept.segments[s + 1].begin : vocab;
        const float by = float(factor * exp(double(kept.segments[s].shift) - double(max)));
        const F f = all(fabsf(by) < 1.17549435e-38f ? 0.0f : by);  // products with subnormal numbers are slow
        int64_t j = s == 0 ? 0 : kept.segments[s].begin;
        for (; j < end && j < whole; j += STEP) {
            for (int k = 0; k < UNROLL; k += 2) {
                const F a = mul(load(e + j + k * W), f), b = mul(load(e + j + k * W + W), f);
                if (KEEPING == IN_PAIRS) {
                    store_pair(out + j + k * W, a, b);
                } else {
                    store(out + j + k * W, a), store(out + j + k * W + W, b);
                }
            }
        }
        for (; j < end; j += W) {
            const int rest = vocab - j < W ? int(vocab - j) : W;
            store_some(out + j, mul(load_some(e + j, rest), f), rest);
        }
    }
}

}  // namespace
}  // namespace grpo
