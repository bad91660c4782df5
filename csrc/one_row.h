// A row of logits: its visits, its statistics, its gradient. Compiled once per instruction set, like simd.h.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace grpo {
namespace {

constexpr int UNROLL = 4;
constexpr int64_t STEP = int64_t(UNROLL) * W;
// Elements that are summed in fp32 before the sums are added to fp64 ones. Each accumulator adds 32 of them, so that a small term is
// rounded at most 32 times next to a large sum.
constexpr int64_t BLOCK = 32 * STEP;
// Elements of a row that are widened, or read beside those of another row, at a time.
constexpr int64_t LOGITS = 1024;
// The hardware's prefetcher stops at the end of each 4 KiB page. Prefetching one page ahead saves a tenth of the time of rows that
// come from memory.
constexpr int64_t PREFETCH_BYTES = 4096;

constexpr float SMALLEST = 1.17549435e-38f;  // the smallest normal fp32 number

template <class A, class B> constexpr bool SAME_TYPE = false;
template <class A> constexpr bool SAME_TYPE<A, A> = true;

// ---- types and transforms

// Calls body with an element of the type that `dtype` names.
template <class Body> INLINED auto with_type(int dtype, const Body& body) {
    switch (dtype) {
        case FP32: return body(float());
        case BF16: return body(bf16());
        default: return body(fp16());
    }
}

enum Mode { PLAIN, SCALED, CAPPED };

template <Mode MODE> struct OfMode { static constexpr Mode mode = MODE; };

// Calls body with an object whose type has `mode` as a constant.
template <class Body> INLINED auto with_mode(Mode mode, const Body& body) {
    switch (mode) {
        case PLAIN: return body(OfMode<PLAIN>());
        case SCALED: return body(OfMode<SCALED>());
        default: return body(OfMode<CAPPED>());
    }
}

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

// A row of logits of any dtype and transform.
struct Row {
    char* base;
    int dtype, element;
    RowTransform t;

    Row(const Stream& stream, int64_t i)
        : base(stream.rows.row(i)),
          dtype(stream.rows.dtype),
          element(size_of(dtype)),
          t(stream.transform, stream.transform.inverse(i)) {}

    template <class T> T* as() const { return reinterpret_cast<T*>(base); }

    // One transformed logit, and dz/dx.
    float logit(int64_t j, double* slope = nullptr) const {
        const Logit of = with_type(dtype, [&](auto e) INLINED_LAMBDA {
            const F x = load_one(as<decltype(e)>() + j);
            return with_mode(t.mode, [&](auto m) INLINED_LAMBDA { return transformed<decltype(m)::mode>(t, x); });
        });
        if (slope) *slope = double(t.slope) * (t.mode == CAPPED ? lane0(of.slope) : 1.0f);
        return lane0(of.z);
    }
};

// ---- a row read block by block, as transformed fp32 logits in the L1 cache

// The transformed logits of a block, padded with -inf to whole vectors, and the largest of them.
struct Logits {
    const float* z;
    float max;
};

inline float max_of(const float* z, int64_t n) {
    F best[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
    int64_t j = 0;
    for (; j + 4 * W <= n; j += 4 * W) {
        for (int k = 0; k < 4; k++) best[k] = max_ignoring_nan(load(z + j + k * W), best[k]);
    }
    for (; j < n; j += W) best[0] = max_ignoring_nan(load(z + j), best[0]);
    return max_lanes(max_ignoring_nan(max_ignoring_nan(best[0], best[1]), max_ignoring_nan(best[2], best[3])));
}

template <class T, Mode MODE> float fetch(const T* x, int64_t n, const RowTransform& t, float* z, float* slopes) {
    F best[2] = {all(-INFINITY), all(-INFINITY)};
    int64_t j = 0;
    for (; j + 2 * W <= n; j += 2 * W) {
        for (int k = 0; k < 2; k++) {
            const Logit of = transformed<MODE>(t, load(x + j + k * W));
            best[k] = max_ignoring_nan(of.z, best[k]);
            store(z + j + k * W, of.z);
            if (MODE == CAPPED && slopes) store(slopes + j + k * W, of.slope);
        }
    }
    for (; j < n; j += W) {
        const int rest = int(min(W, n - j));
        Logit of = transformed<MODE>(t, load_some(x + j, rest));
        of.z = choose(first_lanes(rest), of.z, all(-INFINITY));
        best[0] = max_ignoring_nan(of.z, best[0]);
        store(z + j, of.z);
        if (MODE == CAPPED && slopes) store(slopes + j, of.slope);
    }
    return max_lanes(max_ignoring_nan(best[0], best[1]));
}

// Vectors of two rows that are processed at the same time; four would need more registers than there are.
constexpr int SIDE = 2;
constexpr int64_t GROUP = int64_t(SIDE) * W;

// A row that is read block by block.
struct Fetched : Row {
    using Row::Row;

    // The transformed logits of n elements from j on. They are written to `buffer`, unless the row in memory already is what is needed.
    Logits logits(int64_t j, int64_t n, float* buffer, float* slopes = nullptr) const {
        const float* plain = as<float>() + j;
        if (dtype == FP32 && t.mode == PLAIN && n % W == 0) return {plain, max_of(plain, n)};
        return {buffer, with_type(dtype, [&](auto e) {
            const auto* x = as<decltype(e)>() + j;
            return with_mode(t.mode, [&](auto m) { return fetch<decltype(e), decltype(m)::mode>(x, n, t, buffer, slopes); });
        })};
    }
    // Prefetches the same group of the next block. For 16-bit rows each cache line is prefetched twice; avoiding that costs more.
    INLINED void prefetch(int64_t j) const {
        const char* next = base + (j + LOGITS) * element;
        for (int64_t k = 0; k < GROUP; k += 16) __builtin_prefetch(next + k * element);
    }
};

// The target's logit and its slope, read before the gradient may overwrite them.
struct AtTarget {
    int64_t j;
    bool there;
    double z = NAN, dz_dx = 0;

    AtTarget(const Row& row, int64_t target, int64_t vocab) : j(target), there(target >= 0 && target < vocab) {
        if (there) z = row.logit(target, &dz_dx);
    }
};

// ---- the visit that computes sums

// The sums that a visit computes; each kind includes those before it.
enum Kind { SUM_ALONE, WITH_WEIGHTED, WITH_SQUARES };

inline Kind kind_of(const Vectors<PARTIALS>& to) { return to[SQUARES] ? WITH_SQUARES : to[WEIGHTED] ? WITH_WEIGHTED : SUM_ALONE; }

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

// What a visit keeps, see Segment.
struct Kept {
    float* terms[2];
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
            if (KIND >= WITH_WEIGHTED) weighted[k] = fma_where(keep[k], e[k], d[k], weighted[k]);
            if (KIND >= WITH_SQUARES) squares[k] = fma(e[k], e[k], squares[k]);
        }
    }
    void to_total() {
        total.sum += sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
        if (KIND >= WITH_WEIGHTED) total.weighted += sum_lanes(add(add(weighted[0], weighted[1]), add(weighted[2], weighted[3])));
        if (KIND >= WITH_SQUARES) total.squares += sum_lanes(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
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
[[gnu::noinline]] Visit visit(const T* x, int64_t vocab, const RowTransform& t, Kept* kept) {
    RunningSums<KIND> sums;
    auto limit = [&](int64_t at, F top) INLINED_LAMBDA {
        sums.max = max_ignoring_nan(top, sums.max);
        if (!any_above(top, sums.limit)) return;
        sums.raise(top);
        if (KEEPING != NOTHING) kept->segments[kept->count++] = {at, sums.shifted_by, 0};
    };
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
                store(kept->terms[0] + j + k * W, kept_of<MODE>(e[k], of[k]));
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
        if (KEEPING != NOTHING) store_some(kept->terms[0] + j, kept_of<MODE>(e[0], of[0]), rest);
    }
    return sums.visit();
}

Visit visit(const Row& row, int64_t vocab, Kind kind) {
    return with_type(row.dtype, [&](auto e) {
        using T = decltype(e);
        return with_mode(row.t.mode, [&](auto m) {
            constexpr Mode MODE = decltype(m)::mode;
            if (kind == WITH_SQUARES) return visit<T, MODE, WITH_SQUARES, NOTHING>(row.as<T>(), vocab, row.t, nullptr);
            if (kind == WITH_WEIGHTED) return visit<T, MODE, WITH_WEIGHTED, NOTHING>(row.as<T>(), vocab, row.t, nullptr);
            return visit<T, MODE, SUM_ALONE, NOTHING>(row.as<T>(), vocab, row.t, nullptr);
        });
    });
}

// With exponentials kept. Those of bf16 rows are in pairs if their gradient is bf16.
Visit visit(const Row& row, int64_t vocab, bool in_pairs, Kept& kept) {
    return with_type(row.dtype, [&](auto e) {
        using T = decltype(e);
        return with_mode(row.t.mode, [&](auto m) {
            constexpr Mode MODE = decltype(m)::mode;
            if constexpr (SAME_TYPE<T, bf16>) {
                if (in_pairs) return visit<T, MODE, WITH_WEIGHTED, IN_PAIRS>(row.as<T>(), vocab, row.t, &kept);
            }
            return visit<T, MODE, WITH_WEIGHTED, IN_ORDER>(row.as<T>(), vocab, row.t, &kept);
        });
    });
}

// ---- statistics

// The index of the first element from j on whose z is max, or -1.
int32_t first_at(const Fetched& row, int64_t j, int64_t vocab, float max) {
    float buffer[LOGITS];
    for (; j < vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, vocab - j);
        const Logits of = row.logits(j, n, buffer);
        for (int64_t k = 0; of.max == max && k < n; k++) {
            if (of.z[k] == max) return int32_t(j + k);
        }
    }
    return -1;
}

void stats_of_row(const StatsJob& job, int64_t i) {
    const Fetched row(job.own, i);
    const int64_t vocab = job.own.rows.vocab, target = job.targets[i];
    const Visit found = visit(row, vocab, kind_of(job.to));
    job.to[MAX][i] = found.max;
    job.to[SUM][i] = float(found.sums.sum);
    job.to[TARGET][i] = target >= 0 && target < vocab ? row.logit(target) : NAN;
    if (job.to[WEIGHTED]) job.to[WEIGHTED][i] = float(found.sums.weighted);
    if (job.to[SQUARES]) job.to[SQUARES][i] = float(found.sums.squares);
    if (job.to[TOP]) reinterpret_cast<int32_t*>(job.to[TOP])[i] = first_at(row, 0, vocab, found.max);
}

// Log-prob of the target and entropy of a row, from its statistics in fp32: with the logarithm in fp64, as rows/partials.py has
// them on a CPU, so that results are the same.
struct Softmax {
    double log_sum, logp;
    float entropy;

    Softmax(double max, double sum, double target, double weighted) : log_sum(log(sum)), logp((target - max) - log_sum) {
        const double found = log_sum - weighted / sum;
        entropy = found < 0 ? 0.0f : float(found);  // rounding may make that of a one-hot row slightly negative; NaN stays
    }
};

// ---- the gradient: its coefficients, computed from the statistics, and the target's element

// d loss / d z_j = target (1[j is the target] - p_j) + p_j (constant + log log p_j + prob p_j)
struct Slopes {
    double target, constant, log, prob;

    Slopes(double target, double constant, double log, double prob) : target(target), constant(constant), log(log), prob(prob) {}
    Slopes(const Vectors<SLOPES>& of, int64_t i)
        : Slopes(of[OF_TARGET][i], of[CONSTANT] ? of[CONSTANT][i] : 0.0, of[LOG] ? of[LOG][i] : 0.0, of[PROB] ? of[PROB][i] : 0.0) {}

    bool none() const { return target == 0 && constant == 0 && log == 0 && prob == 0; }
};

// The coefficients of a row's gradient: d loss / d x_j = e_j (k0 + k1 d_j + k2 e_j) dz/dx with d_j = z_j - max and e_j = exp(d_j).
struct RowGradient {
    double k0, k1, k2;
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
};

// The gradient of the target's element: -expm1(logp) is 1 - p without cancellation.
inline float gradient_of_target(const Slopes& s, double logp, double dz_dx) {
    const double p = exp(logp);
    return float((-s.target * expm1(logp) + (p > 0 ? p * (s.constant + s.log * logp + s.prob * p) : 0.0)) * dz_dx);
}

// The memory of the gradient of a row.
struct Gradient {
    char* base;
    int dtype;
    int64_t vocab;

    Gradient(const Rows& out, int64_t i) : base(out.base ? out.row(i) : nullptr), dtype(out.dtype), vocab(out.vocab) {}

    void zero() const { memset(base, 0, size_t(vocab) * size_t(size_of(dtype))); }
    void nan() const {
        with_type(dtype, [&](auto e) {
            decltype(e) nan[W], *out = reinterpret_cast<decltype(e)*>(base);
            store_any(nan, all(NAN));
            for (int64_t j = 0; j < vocab; j++) out[j] = nan[0];
        });
    }
    void put(int64_t j, float value) const {
        with_type(dtype, [&](auto e) { store_some(reinterpret_cast<decltype(e)*>(base) + j, all(value), 1); });
    }
};

// The highest term of the polynomial; lower terms are always present.
enum Degree { CONSTANT_FACTOR, LINEAR, QUADRATIC };

template <class T, class O, Mode MODE, Degree DEGREE>
[[gnu::noinline]] void gradients(const T* x, O* out, int64_t n, const RowTransform& t, const RowGradient& of) {
    const F m = all(of.max), c0 = all(float(of.k0)), c1 = all(float(of.k1)), c2 = all(float(of.k2));
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
            F factor = DEGREE >= LINEAR ? fma_where(keep[k], c1, d[k], c0) : c0;
            if (DEGREE >= QUADRATIC) factor = fma_where(keep[k], c2, e[k], factor);
            if (MODE == CAPPED) factor = mul(factor, slope[k]);
            v[k] = mul_where(keep[k], e[k], factor);
        }
    };
    int64_t j = 0;
    for (; j + STEP <= n; j += STEP) {
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
    for (; j < n; j += W) {
        const int rest = n - j < W ? int(n - j) : W;
        F v[1] = {load_some(x + j, rest)};
        to_gradients(v);
        store_some(out + j, v[0], rest);
    }
}

// Writes the gradient of n columns from their logits. Which types there are: one's own, and any from fp32.
template <class T, class O> void gradients(const T* x, O* out, int64_t n, const RowTransform& t, const RowGradient& of) {
    with_mode(t.mode, [&](auto m) {
        constexpr Mode MODE = decltype(m)::mode;
        if (float(of.k2) != 0) return gradients<T, O, MODE, QUADRATIC>(x, out, n, t, of);
        if (float(of.k1) != 0) return gradients<T, O, MODE, LINEAR>(x, out, n, t, of);
        gradients<T, O, MODE, CONSTANT_FACTOR>(x, out, n, t, of);
    });
}

// The same of a row, whose memory the gradient may overwrite. Types that nobody combines often go by way of fp32.
void gradients(const Row& row, const Gradient& out, const RowGradient& of) {
    with_type(row.dtype, [&](auto e) {
        with_type(out.dtype, [&](auto g) {
            using T = decltype(e);
            using O = decltype(g);
            const T* x = row.as<T>();
            O* to = reinterpret_cast<O*>(out.base);
            if constexpr (SAME_TYPE<T, O> || SAME_TYPE<T, float>) {
                gradients(x, to, out.vocab, row.t, of);
            } else {
                float wide[LOGITS];
                for (int64_t j = 0; j < out.vocab; j += LOGITS) {
                    const int64_t n = min(LOGITS, out.vocab - j);
                    fetch<T, PLAIN>(x + j, n, row.t, wide, nullptr);
                    gradients(static_cast<const float*>(wide), to + j, n, row.t, of);
                }
            }
        });
    });
}

// Writes the gradient of a row from its logits. `log_sum` is log(sum).
void write_gradient(const Row& row, const Gradient& out, const Slopes& slopes, const AtTarget& target, double logp, const RowGradient& of) {
    if (!of.finite()) return out.nan();
    gradients(row, out, of);
    if (target.there) out.put(target.j, gradient_of_target(slopes, logp, target.dz_dx));
}

void pull_row(const PullJob& job, int64_t i, const Slopes& slopes) {
    const Gradient out(job.out, i);
    if (slopes.none()) return out.zero();
    const Row row(job.own, i);
    const float max = job.of[MAX][i], sum = job.of[SUM][i];
    const double log_sum = log(double(sum)), logp = (double(job.of[TARGET][i]) - max) - log_sum;
    const AtTarget target(row, job.targets[i], out.vocab);
    write_gradient(row, out, slopes, target, logp, RowGradient(slopes, row.t, max, sum, log_sum));
}

// ---- the gradient from what a visit has kept

// Where the terms of a row are kept: the first in the memory of the gradient if that is fp32; else in that of the logits, if they are
// fp32 and the gradient overwrites them; else in scratch memory, which may be missing.
inline Kept kept_in(const Row& row, const Gradient& out, const TermMemory& scratch) {
    const bool in_row = row.dtype == FP32 && row.base == out.base;
    float* first = out.dtype == FP32 ? reinterpret_cast<float*>(out.base) : in_row ? row.as<float>() : scratch.terms[0];
    return {{first, scratch.terms[1]}, scratch.segments, 0};
}

// A factor of kept terms. Products with subnormal numbers are slow.
inline F factor_of(double x) { return all(fabsf(float(x)) < SMALLEST ? 0.0f : float(x)); }

// The factors of the terms of one segment in the gradient.
struct Factors {
    F first, negative, second;  // `negative`: of the first where it is below 0
    bool none = false;
};

// What the gradient is of the terms: the first; both; both by the sign of the first; infinite where the first is not 0.
enum Terms { ONE, BOTH, BY_SIGN, INFINITE };

template <Terms TERMS> INLINED F scaled(const float* p, const float* k, const Factors& of) {
    const F x = load(p);
    if (TERMS == ONE) return mul(magnitude(x), of.first);
    const F y = load(k);
    if (TERMS == BY_SIGN) return fma(of.second, y, mul(x, choose(not_below(x, all(0.0f)), of.first, of.negative)));
    const F sum = fma(of.second, y, mul(x, of.first));
    return TERMS == INFINITE ? mul_where(not_below(magnitude(x), all(SMALLEST)), all(1.0f), sum) : sum;
}

template <class O, Terms TERMS> void write_terms(const float* p, const float* k, O* out, int64_t n, bool in_pairs, const Factors& of) {
    int64_t j = 0;
    for (; j + 2 * W <= n; j += 2 * W) {
        const F a = scaled<TERMS>(p + j, k + j, of), b = scaled<TERMS>(p + j + W, k + j + W, of);
        if (in_pairs) {
            store_pair(out + j, a, b);
        } else {
            store(out + j, a), store(out + j + W, b);
        }
    }
    for (; j < n; j += W) {
        const int rest = int(min(W, n - j));
        float first[W] = {}, second[W] = {};
        for (int r = 0; r < rest; r++) first[r] = p[j + r];
        for (int r = 0; TERMS != ONE && r < rest; r++) second[r] = k[j + r];
        store_some(out + j, scaled<TERMS>(first, second, of), rest);
    }
}

// Writes the gradient of a row whose terms were kept; the steps of the row in pairs, or none.
template <class FactorsOf> void write_kept(const Kept& kept, const Gradient& out, Terms terms, bool in_pairs, const FactorsOf& factors_of) {
    const int64_t whole = in_pairs ? out.vocab / STEP * STEP : 0;
    with_type(out.dtype, [&](auto e) {
        using O = decltype(e);
        O* to = reinterpret_cast<O*>(out.base);
        for (int s = 0; s < kept.count; s++) {
            const Factors of = factors_of(kept.segments[s]);
            const int64_t end = s + 1 < kept.count ? kept.segments[s + 1].begin : out.vocab;
            const int64_t begin = s == 0 ? 0 : kept.segments[s].begin;
            if (of.none) {
                memset(to + begin, 0, size_t(end - begin) * sizeof(O));
                continue;
            }
            const int64_t middle = begin > whole ? begin : min(end, whole);
            const float *p = kept.terms[0], *k = kept.terms[1];
            switch (terms) {
                case ONE:
                    write_terms<O, ONE>(p + begin, p, to + begin, middle - begin, true, of);
                    write_terms<O, ONE>(p + middle, p, to + middle, end - middle, false, of);
                    break;
                case BOTH: write_terms<O, BOTH>(p + begin, k + begin, to + begin, end - begin, false, of); break;
                case BY_SIGN: write_terms<O, BY_SIGN>(p + begin, k + begin, to + begin, end - begin, false, of); break;
                default: write_terms<O, INFINITE>(p + begin, k + begin, to + begin, end - begin, false, of);
            }
        }
    });
}

// ---- statistics, loss and gradient in one call

// The slopes of a token's loss.
struct TokenSlopes {
    double target, entropy;
};

// Runs the program of row i on its log-prob and entropy; stores the loss.
inline TokenSlopes token_of(const FusedJob& job, int64_t i, float logp, float entropy) {
    float inputs[MOST_REGISTERS], found[TOKEN_OUTPUTS];
    int count = 0;
    inputs[count++] = job.to[LOGPS][i] = logp;
    inputs[count++] = job.to[ENTROPY][i] = entropy;
    for (int k = 0; count < job.program->inputs; k++) inputs[count++] = job.inputs[k][i];
    evaluate(*job.program, job.numbers, inputs, found);
    job.to[LOSSES][i] = found[0];
    return {found[1], job.with_entropy ? found[2] : 0.0};
}

// Those of its row, of which a log-prob and the entropy arrive at the logits: dH/dz_j = -p_j (log p_j + H), and H may be NaN.
inline Slopes slopes_of(double target, double constant, double of_entropy, double entropy) {
    return {target, constant + (of_entropy != 0 ? -of_entropy * entropy : 0.0), -of_entropy, 0};
}

inline Slopes slopes_of_token(const FusedJob& job, int64_t i, const Softmax& softmax) {
    const TokenSlopes found = token_of(job, i, float(softmax.logp), softmax.entropy);
    return slopes_of(found.target, 0, found.entropy, softmax.entropy);
}

// A visit of a row that may overwrite it with what its gradient needs.
struct FusedVisit {
    const Row& row;
    Gradient out;
    Kept kept;
    bool keeps, in_pairs;
    Visit found;
    double sum;

    FusedVisit(const FusedJob& job, int64_t i, const Row& row, const TermMemory& scratch)
        : row(row), out(job.out, i), kept(kept_in(row, out, scratch)),
          // The gradient of the entropy needs the logits, so their exponentials alone are of no use for it.
          keeps(out.base && !job.with_entropy && scratch.segments), in_pairs(row.dtype == BF16 && out.dtype == BF16) {
        const int64_t vocab = job.own.rows.vocab;
        found = keeps ? visit(row, vocab, in_pairs, kept) : visit(row, vocab, WITH_WEIGHTED);
        sum = float(found.sums.sum);  // rounded to fp32 as in `stats`, so that results are the same
    }

    Softmax softmax(double target) const { return {found.max, sum, target, float(found.sums.weighted)}; }

    // Writes the gradient. False: it is NaN.
    bool write(const Slopes& slopes, const AtTarget& target, const Softmax& softmax) const {
        const RowGradient gradient(slopes, row.t, found.max, sum, softmax.log_sum);
        if (!keeps || !gradient.finite()) {
            write_gradient(row, out, slopes, target, softmax.logp, gradient);
            return gradient.finite();
        }
        write_kept(kept, out, ONE, in_pairs, [&](const Segment& at) {
            const F factor = factor_of(float(gradient.k0 * exp(double(at.shift) - double(gradient.max))));
            return Factors{factor, factor, factor};
        });
        if (target.there) out.put(target.j, gradient_of_target(slopes, softmax.logp, target.dz_dx));
        return true;
    }
};

void fused_row(const FusedJob& job, int64_t i, const TermMemory& scratch) {
    const Row row(job.own, i);
    const AtTarget target(row, job.targets[i], job.own.rows.vocab);  // before its logit may be overwritten
    const FusedVisit visit(job, i, row, scratch);
    const Softmax softmax = visit.softmax(target.z);
    const Slopes slopes = slopes_of_token(job, i, softmax);
    if (!visit.out.base) return;
    if (slopes.none()) return visit.out.zero();
    visit.write(slopes, target, softmax);
}

// ---- a factor

void scale(const ScaleJob& job, int64_t begin, int64_t end) {
    with_type(job.dtype, [&](auto e) {
        using T = decltype(e);
        T* data = reinterpret_cast<T*>(job.data) + begin;
        const int64_t n = end - begin;
        const F f = all(job.factor);
        int64_t j = 0;
        for (; j + W <= n; j += W) store_any(data + j, mul(load(data + j), f));
        for (; j < n; j++) {
            T lanes[W];
            store_any(lanes, mul(load_some(data + j, 1), f));
            data[j] = lanes[0];
        }
    });
}

}  // namespace
}  // namespace grpo
