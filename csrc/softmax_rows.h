// Kernels over one row of logits: the softmax sums, the gradient from them, and the fused loss,
// which does both in one call. Compiled once per instruction set, like simd.h.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace grpo {
namespace {

// Vectors of one step of a loop over a row, enough to hide the latency of the instructions.
constexpr int UNROLL = 4;
constexpr int64_t STEP_COLUMNS = int64_t(UNROLL) * LANES;
// Columns that are summed in fp32 before the sums are added to fp64 ones. Each fp32 sum adds 32
// terms, so that a small term is rounded at most 32 times next to a large sum.
constexpr int64_t FP32_SUM_COLUMNS = 32 * STEP_COLUMNS;
// Columns of a row that BlockReader transforms at a time; 3 buffers of them stay in the L1 cache.
constexpr int64_t BLOCK_COLUMNS = 1024;
// The hardware's prefetcher stops at the end of each 4 KiB page. Prefetching one page ahead saves a
// tenth of the time of rows that come from memory.
constexpr int64_t PREFETCH_BYTES = 4096;

constexpr float MIN_NORMAL = 1.17549435e-38f;
constexpr float MAX_FLOAT = 3.40282347e38f;

template <class A, class B> constexpr bool SAME_TYPE = false;
template <class A> constexpr bool SAME_TYPE<A, A> = true;

// ---- dtypes and transforms

// Calls body with a value of the C++ type of `dtype`.
template <class Body> INLINED auto with_dtype(int dtype, const Body& body) {
    switch (dtype) {
        case FP32: return body(float());
        case BF16: return body(bf16());
        default: return body(fp16());
    }
}

enum TransformMode { IDENTITY, SCALE, SOFTCAP };

template <TransformMode MODE> struct ConstantMode {
    static constexpr TransformMode mode = MODE;
};

// Calls body with an object whose type has `mode` as a compile-time constant.
template <class Body> INLINED auto with_mode(TransformMode mode, const Body& body) {
    switch (mode) {
        case IDENTITY: return body(ConstantMode<IDENTITY>());
        case SCALE: return body(ConstantMode<SCALE>());
        default: return body(ConstantMode<SOFTCAP>());
    }
}

// The `Transform` from logits x to z for one row, as the loops use it. Factors that follow each
// other are multiplied into one.
//   IDENTITY  z = x
//   SCALE     z = x * input_scale
//   SOFTCAP   z = tanh(x * input_scale) * output_scale
struct FusedTransform {
    TransformMode mode;
    Vec input_scale, output_scale;
    float dz_dx;  // dz / dx, for SOFTCAP without its factor 1 - tanh^2

    FusedTransform(const Transform& t, float inverse_temperature)
        : mode(t.scale * inverse_temperature != 1 ? SCALE : IDENTITY),
          input_scale(broadcast(t.scale * inverse_temperature)),
          output_scale(broadcast(t.softcap * inverse_temperature)),
          dz_dx(t.scale * inverse_temperature) {
        if (!(t.softcap > 0)) return;
        mode = SOFTCAP;
        input_scale = broadcast(t.scale / t.softcap);
    }
};

// Transformed logits z, and the factor 1 - tanh^2 of dz/dx, which only SOFTCAP uses.
struct Logits {
    Vec z, dtanh;
};

template <TransformMode MODE> INLINED Logits transform_logits(const FusedTransform& t, Vec x) {
    if (MODE == IDENTITY) return {x, x};
    const Vec scaled = mul(x, t.input_scale);
    if (MODE == SCALE) return {scaled, scaled};
    const Tanh tanh = tanh_and_derivative(scaled);
    return {mul(tanh.value, t.output_scale), tanh.derivative};
}

// A single transformed logit z of x, and dz / dx.
struct LogitAndDerivative {
    float z;
    double dz_dx;
};

// One row of LogitRows.
struct LogitRow {
    char* base;
    int dtype, element_size;
    FusedTransform transform;

    LogitRow(const LogitRows& logits, int64_t i)
        : base(logits.rows.row(i)),
          dtype(logits.rows.dtype),
          element_size(size_of(dtype)),
          transform(logits.transform, logits.transform.inverse_temperature_of_row(i)) {}

    template <class T> T* as() const { return reinterpret_cast<T*>(base); }

    LogitAndDerivative logit_at(int64_t column) const {
        const Logits logit = with_dtype(dtype, [&](auto element) INLINED_LAMBDA {
            const Vec x = load_broadcast(as<decltype(element)>() + column);
            return with_mode(transform.mode, [&](auto constant) INLINED_LAMBDA {
                return transform_logits<decltype(constant)::mode>(transform, x);
            });
        });
        const float dtanh = transform.mode == SOFTCAP ? first_lane(logit.dtanh) : 1.0f;
        return {first_lane(logit.z), double(transform.dz_dx) * dtanh};
    }
};

// The logit of the target id. Construct it before the gradient may overwrite the row.
struct TargetLogit {
    int64_t column;
    bool in_vocab;
    double z = NAN, dz_dx = 0;

    TargetLogit(const LogitRow& row, int64_t target, int64_t vocab)
        : column(target), in_vocab(target >= 0 && target < vocab) {
        if (!in_vocab) return;
        const LogitAndDerivative logit = row.logit_at(column);
        z = logit.z;
        dz_dx = logit.dz_dx;
    }
};

// ---- a row read block by block, as transformed fp32 logits in the L1 cache

// Transformed logits of a block, padded with -inf to whole vectors, and the largest of them.
struct LogitBlock {
    const float* z;
    float max;
};

// Returns the largest of n logits, ignoring NaN; -inf if there is none. n is a multiple of LANES.
inline float max_of(const float* z, int64_t n) {
    Vec max[UNROLL];
    for (Vec& lanes : max) lanes = broadcast(-INFINITY);
    int64_t j = 0;
    for (; j + STEP_COLUMNS <= n; j += STEP_COLUMNS) {
        for (int k = 0; k < UNROLL; k++) {
            max[k] = max_ignoring_nan(load(z + j + k * LANES), max[k]);
        }
    }
    for (; j < n; j += LANES) max[0] = max_ignoring_nan(load(z + j), max[0]);
    return max_lanes(
        max_ignoring_nan(max_ignoring_nan(max[0], max[1]), max_ignoring_nan(max[2], max[3])));
}

// Writes the transformed logits of n columns to `z`, and for SOFTCAP 1 - tanh^2 to `dtanh` unless
// that is null. Returns the largest logit.
template <class T, TransformMode MODE>
float load_block(const T* x, int64_t n, const FusedTransform& t, float* z, float* dtanh) {
    Vec max[2] = {broadcast(-INFINITY), broadcast(-INFINITY)};
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        for (int k = 0; k < 2; k++) {
            const Logits logits = transform_logits<MODE>(t, load(x + j + k * LANES));
            max[k] = max_ignoring_nan(logits.z, max[k]);
            store(z + j + k * LANES, logits.z);
            if (MODE == SOFTCAP && dtanh) store(dtanh + j + k * LANES, logits.dtanh);
        }
    }
    for (; j < n; j += LANES) {
        const int count = int(min(LANES, n - j));
        Logits logits = transform_logits<MODE>(t, load_first(x + j, count));
        logits.z = select(first_lanes(count), logits.z, broadcast(-INFINITY));
        max[0] = max_ignoring_nan(logits.z, max[0]);
        store(z + j, logits.z);
        if (MODE == SOFTCAP && dtanh) store(dtanh + j, logits.dtanh);
    }
    return max_lanes(max_ignoring_nan(max[0], max[1]));
}

// Kernels over two rows compute this many vectors of both at the same time; four would need more
// registers than there are.
constexpr int VECTORS_PER_GROUP = 2;
constexpr int64_t GROUP_COLUMNS = int64_t(VECTORS_PER_GROUP) * LANES;

// Reads a row in blocks of up to BLOCK_COLUMNS columns, as transformed fp32 logits.
struct BlockReader : LogitRow {
    using LogitRow::LogitRow;

    // Returns the transformed logits of columns j .. j + n - 1. They are written to `buffer`
    // [BLOCK_COLUMNS], unless the row in memory already holds them as fp32. See load_block for
    // `dtanh`.
    LogitBlock read(int64_t j, int64_t n, float* buffer, float* dtanh = nullptr) const {
        const float* in_memory = as<float>() + j;
        if (dtype == FP32 && transform.mode == IDENTITY && n % LANES == 0) {
            return {in_memory, max_of(in_memory, n)};
        }
        const float max = with_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            return with_mode(transform.mode, [&](auto constant) {
                constexpr TransformMode MODE = decltype(constant)::mode;
                return load_block<T, MODE>(as<T>() + j, n, transform, buffer, dtanh);
            });
        });
        return {buffer, max};
    }
    // Prefetches the same group of the next block. For 16-bit rows each cache line is prefetched
    // twice; avoiding that costs more.
    INLINED void prefetch_next_block(int64_t j) const {
        constexpr int64_t FLOATS_PER_LINE = CACHE_LINE / sizeof(float);
        const char* next = base + (j + BLOCK_COLUMNS) * element_size;
        for (int64_t k = 0; k < GROUP_COLUMNS; k += FLOATS_PER_LINE) {
            __builtin_prefetch(next + k * element_size);
        }
    }
};

// ---- the pass over a row that computes its sums

// The sums that a pass computes; each kind includes those before it.
enum SumKind { SUM_EXP_ONLY, WITH_SHIFTED, WITH_SQUARED };

// Returns which sums a call needs, from the names that it has memory for.
inline SumKind requested_sums(const NamedRows<NUM_SUMS>& sums) {
    if (sums[SUM_EXP_SQUARED]) return WITH_SQUARED;
    return sums[SUM_EXP_SHIFTED] ? WITH_SHIFTED : SUM_EXP_ONLY;
}

// Sums of e, e * d and e * e over the columns of a row, with d = z - shift and e = exp(d).
struct ExpSums {
    double sum_exp, sum_exp_shifted, sum_exp_squared;

    // Makes the sums relative to shift + by.
    void raise_shift(double by) {
        const double factor = exp(-by);
        // `by` may be infinite.
        sum_exp_shifted = factor > 0 ? factor * (sum_exp_shifted - by * sum_exp) : 0.0;
        sum_exp *= factor;
        sum_exp_squared *= factor * factor;
    }
};

// A segment begins with a step, or with one of the vectors behind the last whole step.
static_assert(
    STEP_COLUMNS >= MIN_SEGMENT_COLUMNS && UNROLL < MAX_SHORT_SEGMENTS,
    "max_segments counts too few");

// The saved terms of a row, see SavedTermsBuffer.
struct SavedTerms {
    float* terms[2];
    Segment* segments;
    int num_segments;

    void begin_segment(int64_t column, float shift, float reference_shift) {
        segments[num_segments++] = {column, shift, reference_shift};
    }
};

// How a pass saves exponentials: not at all, by column, or in the order of load_two.
enum class SaveMode { NONE, IN_ORDER, INTERLEAVED };

// The sums of a row, relative to its largest logit.
struct RowSums {
    float max_logit;
    ExpSums sums;
};

// Sums of exp(z - shift) over the columns so far. If a logit exceeds the shift by more than 1, the
// shift is raised to the maximum of the vectors that are being added. So no exponential is above e,
// and no exponential has to be computed again. While all logits were -inf, the shift is 0: their
// exponentials are 0, and a NaN still makes the sum NaN.
template <SumKind KIND> struct RunningSums {
    Vec shift, shift_limit, max;
    // In fp32, over the columns since the last flush_to_fp64.
    Vec sum_exp[UNROLL], sum_exp_shifted[UNROLL], sum_exp_squared[UNROLL];
    float shift_value = -INFINITY;
    ExpSums total = {0, 0, 0};

    RunningSums()
        : shift(broadcast(0.0f)), shift_limit(broadcast(-INFINITY)), max(broadcast(-INFINITY)) {
        clear();
    }

    void clear() {
        for (int k = 0; k < UNROLL; k++) {
            sum_exp[k] = broadcast(0.0f);
            sum_exp_shifted[k] = broadcast(0.0f);
            sum_exp_squared[k] = broadcast(0.0f);
        }
    }
    // Adds logits that are not above the limit, and returns their exponentials in e.
    template <int N> INLINED void accumulate(const Logits (&logits)[N], Vec (&e)[N]) {
        Vec d[N];
        Mask above_cutoff[N];
        for (int k = 0; k < N; k++) d[k] = sub(logits[k].z, shift);
        for (int k = 0; k < N; k++) above_cutoff[k] = not_less(d[k], broadcast(EXP_CUTOFF));
        exp_where(above_cutoff, d, e);
        for (int k = 0; k < N; k++) {
            sum_exp[k] = add(sum_exp[k], e[k]);
            if (KIND >= WITH_SHIFTED) {
                sum_exp_shifted[k] = fma_where(above_cutoff[k], e[k], d[k], sum_exp_shifted[k]);
            }
            if (KIND >= WITH_SQUARED) sum_exp_squared[k] = fma(e[k], e[k], sum_exp_squared[k]);
        }
    }
    static INLINED double sum_of(const Vec (&sums)[UNROLL]) {
        return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    }
    void flush_to_fp64() {
        total.sum_exp += sum_of(sum_exp);
        if (KIND >= WITH_SHIFTED) total.sum_exp_shifted += sum_of(sum_exp_shifted);
        if (KIND >= WITH_SQUARED) total.sum_exp_squared += sum_of(sum_exp_squared);
        clear();
    }
    // Raises the shift to the largest lane of `logits`.
    void raise_shift(Vec logits) {
        const float new_shift = max_lanes(max_ignoring_nan(logits, broadcast(-INFINITY)));
        flush_to_fp64();
        if (shift_value > -INFINITY) total.raise_shift(double(new_shift) - double(shift_value));
        shift_value = new_shift;
        shift = broadcast(new_shift);
        shift_limit = broadcast(new_shift + 1);
    }
    // Returns the sums of the row, relative to its largest logit.
    RowSums finish() {
        flush_to_fp64();
        const float largest = max_lanes(max);
        if (largest > shift_value) total.raise_shift(double(largest) - double(shift_value));
        // exp(0) is one of the terms: rounding must not make a log-prob positive.
        if (largest > -INFINITY && total.sum_exp < 1) total.sum_exp = 1;
        return {largest, total};
    }
};

// The term that is saved for the gradient: the exponential times the varying part of dz/dx.
template <TransformMode MODE> INLINED Vec saved_term(Vec e, const Logits& logits) {
    return MODE == SOFTCAP ? mul(e, logits.dtanh) : e;
}

// Computes the sums of the row x [vocab] in one pass, and saves its exponentials or not. They may
// be saved in the memory of the row itself.
template <class T, TransformMode MODE, SumKind KIND, SaveMode SAVE>
[[gnu::noinline]] RowSums softmax_sums(
    const T* x, int64_t vocab, const FusedTransform& t, SavedTerms* saved) {
    RunningSums<KIND> sums;
    const auto update_shift = [&](int64_t column, Vec largest) INLINED_LAMBDA {
        sums.max = max_ignoring_nan(largest, sums.max);
        if (LIKELY(!any_above(largest, sums.shift_limit))) return;
        sums.raise_shift(largest);
        if (SAVE != SaveMode::NONE) saved->begin_segment(column, sums.shift_value, 0);
    };
    const int64_t whole_steps = vocab / STEP_COLUMNS * STEP_COLUMNS;
    int64_t j = 0;
    while (j < whole_steps) {
        const int64_t end = min(whole_steps, j + FP32_SUM_COLUMNS);
        for (; j < end; j += STEP_COLUMNS) {
            for (size_t byte = 0; byte < STEP_COLUMNS * sizeof(T); byte += CACHE_LINE) {
                __builtin_prefetch(reinterpret_cast<const char*>(x + j) + PREFETCH_BYTES + byte);
            }
            Logits logits[UNROLL];
            for (int k = 0; k < UNROLL; k += 2) {
                const T* from = x + j + k * LANES;
                Vec a, b;
                if (SAVE == SaveMode::IN_ORDER) {
                    a = load(from);
                    b = load(from + LANES);
                } else {
                    load_two(from, a, b);
                }
                logits[k] = transform_logits<MODE>(t, a);
                logits[k + 1] = transform_logits<MODE>(t, b);
            }
            const Vec largest_01 = max_ignoring_nan(logits[0].z, logits[1].z);
            const Vec largest_23 = max_ignoring_nan(logits[2].z, logits[3].z);
            update_shift(j, max_ignoring_nan(largest_01, largest_23));
            Vec e[UNROLL];
            sums.accumulate(logits, e);
            if (SAVE == SaveMode::NONE) continue;
            for (int k = 0; k < UNROLL; k++) {
                store(saved->terms[0] + j + k * LANES, saved_term<MODE>(e[k], logits[k]));
            }
        }
        sums.flush_to_fp64();
    }
    for (; j < vocab; j += LANES) {
        const int count = vocab - j < LANES ? int(vocab - j) : LANES;
        Logits logits[1] = {transform_logits<MODE>(t, load_first(x + j, count))};
        logits[0].z = select(first_lanes(count), logits[0].z, broadcast(-INFINITY));
        update_shift(j, logits[0].z);
        Vec e[1];
        sums.accumulate(logits, e);
        if (SAVE == SaveMode::NONE) continue;
        store_first(saved->terms[0] + j, saved_term<MODE>(e[0], logits[0]), count);
    }
    return sums.finish();
}

// Computes the sums of a row, without saving its exponentials.
RowSums softmax_sums(const LogitRow& row, int64_t vocab, SumKind kind) {
    return with_dtype(row.dtype, [&](auto element) {
        using T = decltype(element);
        return with_mode(row.transform.mode, [&](auto constant) {
            constexpr TransformMode MODE = decltype(constant)::mode;
            constexpr SaveMode NONE = SaveMode::NONE;
            const T* x = row.as<T>();
            const FusedTransform& t = row.transform;
            switch (kind) {
                case WITH_SQUARED:
                    return softmax_sums<T, MODE, WITH_SQUARED, NONE>(x, vocab, t, nullptr);
                case WITH_SHIFTED:
                    return softmax_sums<T, MODE, WITH_SHIFTED, NONE>(x, vocab, t, nullptr);
                default: return softmax_sums<T, MODE, SUM_EXP_ONLY, NONE>(x, vocab, t, nullptr);
            }
        });
    });
}

// Computes the sums of a row up to WITH_SHIFTED, and saves its exponentials for the gradient.
// `interleaved`: the exponentials of a bf16 row are saved in the order of load_two.
RowSums softmax_sums_saving_exp(
    const LogitRow& row, int64_t vocab, bool interleaved, SavedTerms& saved) {
    return with_dtype(row.dtype, [&](auto element) {
        using T = decltype(element);
        return with_mode(row.transform.mode, [&](auto constant) {
            constexpr TransformMode MODE = decltype(constant)::mode;
            const T* x = row.as<T>();
            const FusedTransform& t = row.transform;
            if constexpr (SAME_TYPE<T, bf16>) {
                constexpr SaveMode INTERLEAVED = SaveMode::INTERLEAVED;
                if (interleaved) {
                    return softmax_sums<T, MODE, WITH_SHIFTED, INTERLEAVED>(x, vocab, t, &saved);
                }
            }
            return softmax_sums<T, MODE, WITH_SHIFTED, SaveMode::IN_ORDER>(x, vocab, t, &saved);
        });
    });
}

// ---- the kernel that returns the sums

// Returns the first column from `begin` on whose logit is `max`, or -1.
int32_t find_logit(const BlockReader& row, int64_t begin, int64_t vocab, float max) {
    float buffer[BLOCK_COLUMNS];
    for (int64_t j = begin; j < vocab; j += BLOCK_COLUMNS) {
        const int64_t n = min(BLOCK_COLUMNS, vocab - j);
        const LogitBlock block = row.read(j, n, buffer);
        if (block.max != max) continue;
        for (int64_t k = 0; k < n; k++) {
            if (block.z[k] == max) return int32_t(j + k);
        }
    }
    return -1;
}

// Stores the argmax of row i: the vector holds the bits of int32 numbers.
inline void set_argmax(const NamedRows<NUM_SUMS>& sums, int64_t i, int32_t column) {
    reinterpret_cast<int32_t*>(sums[ARGMAX])[i] = column;
}

// Computes the softmax sums of row i, without a reference.
void softmax_sums_of_row(const SoftmaxSumsJob& job, int64_t i) {
    const NamedRows<NUM_SUMS>& results = job.sums;
    const int64_t vocab = job.policy.rows.vocab;
    const BlockReader row(job.policy, i);
    const RowSums row_sums = softmax_sums(row, vocab, requested_sums(results));
    const ExpSums& sums = row_sums.sums;
    const TargetLogit target(row, job.targets[i], vocab);  // after the pass: it is in a cache now
    results[MAX_LOGIT][i] = row_sums.max_logit;
    results[SUM_EXP][i] = float(sums.sum_exp);
    results[TARGET_LOGIT][i] = float(target.z);
    if (results[SUM_EXP_SHIFTED]) results[SUM_EXP_SHIFTED][i] = float(sums.sum_exp_shifted);
    if (results[SUM_EXP_SQUARED]) results[SUM_EXP_SQUARED][i] = float(sums.sum_exp_squared);
    if (results[ARGMAX]) set_argmax(results, i, find_logit(row, 0, vocab, row_sums.max_logit));
}

// The log-prob of the target and the entropy, from fp32 sums. The logarithm is fp64, as in
// core/softmax.py on a CPU, so that both give the same results.
struct Softmax {
    double log_sum_exp;  // of z - max_logit
    double logp;
    float entropy;

    Softmax(double max_logit, double sum_exp, double target_logit, double sum_exp_shifted)
        : log_sum_exp(log(sum_exp)), logp((target_logit - max_logit) - log_sum_exp) {
        // Rounding may make the entropy of a one-hot row slightly negative. A NaN stays.
        const double unclamped = log_sum_exp - sum_exp_shifted / sum_exp;
        entropy = unclamped < 0 ? 0.0f : float(unclamped);
    }
};

// ---- the gradient: its coefficients, and the element of the target

// The coefficients of one row, see enum Coefficient.
struct RowCoefficients {
    double target, constant, logp, prob;

    RowCoefficients(double target, double constant, double logp, double prob)
        : target(target), constant(constant), logp(logp), prob(prob) {}
    RowCoefficients(const NamedRows<NUM_COEFFICIENTS>& coefficients, int64_t i)
        : target(coefficients[TARGET][i]),
          constant(coefficients[CONSTANT] ? coefficients[CONSTANT][i] : 0.0),
          logp(coefficients[LOGP] ? coefficients[LOGP][i] : 0.0),
          prob(coefficients[PROB] ? coefficients[PROB][i] : 0.0) {}

    bool all_zero() const { return target == 0 && constant == 0 && logp == 0 && prob == 0; }
};

// The gradient of a row as a function of d_j = z_j - max_logit and e_j = exp(d_j), without the
// term 1[j is the target]:
//   d loss / d x_j = e_j (per_exp + per_exp_shifted d_j + per_exp_squared e_j)
// for SOFTCAP times 1 - tanh^2. The factors multiply e_j, e_j d_j and e_j^2, and have the names of
// the sums of these terms over a row: sum_exp, sum_exp_shifted and sum_exp_squared.
struct GradientPolynomial {
    double per_exp, per_exp_shifted, per_exp_squared;
    float max_logit;

    GradientPolynomial(
        const RowCoefficients& c, const FusedTransform& t, float max_logit, double sum_exp,
        double log_sum_exp)
        : per_exp((c.constant - c.target - c.logp * log_sum_exp) * t.dz_dx / sum_exp),
          per_exp_shifted(c.logp * t.dz_dx / sum_exp),
          per_exp_squared(c.prob * t.dz_dx / (sum_exp * sum_exp)),
          max_logit(max_logit) {}

    // Returns whether the gradient is finite. A NaN or +inf in the row has made its sums or its
    // maximum NaN or infinite, and so the factors. They are also checked to be finite in fp32,
    // because an infinite factor times an exponential of 0 would be NaN.
    bool is_finite() const {
        return fits_fp32(per_exp) && fits_fp32(per_exp_shifted) && fits_fp32(per_exp_squared) &&
               fabsf(max_logit) < INFINITY;
    }
    static bool fits_fp32(double factor) { return fabs(factor) <= MAX_FLOAT; }
};

// Returns d loss / d x of the target's column,
//   dz/dx * (target * (1 - p) + p * (constant + logp * log p + prob * p))
// with p the target's probability. -expm1(log p) is 1 - p without cancellation.
inline float target_gradient(const RowCoefficients& c, double logp, double dz_dx) {
    const double p = exp(logp);
    const double softmax_term = p > 0 ? p * (c.constant + c.logp * logp + c.prob * p) : 0.0;
    return float((-c.target * expm1(logp) + softmax_term) * dz_dx);
}

// The memory of the gradient of one row; base null: no gradient.
struct GradientRow {
    char* base;
    int dtype;
    int64_t vocab;

    GradientRow(const Rows& rows, int64_t i)
        : base(rows.base ? rows.row(i) : nullptr), dtype(rows.dtype), vocab(rows.vocab) {}

    void fill_zero() const { memset(base, 0, size_t(vocab) * size_t(size_of(dtype))); }
    void fill_nan() const {
        with_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            T nan[LANES];
            store_keeping_nan(nan, broadcast(NAN));
            T* gradient = reinterpret_cast<T*>(base);
            for (int64_t j = 0; j < vocab; j++) gradient[j] = nan[0];
        });
    }
    void set(int64_t column, float value) const {
        with_dtype(dtype, [&](auto element) {
            auto* gradient = reinterpret_cast<decltype(element)*>(base);
            store_first(gradient + column, broadcast(value), 1);
        });
    }
};

// ---- the gradient from the logits

// The last nonzero factor of a GradientPolynomial: per_exp, per_exp_shifted or per_exp_squared. The
// factors before it are always computed.
enum Degree { CONSTANT_FACTOR, LINEAR, QUADRATIC };

// A function object that replaces N vectors of logits x by d loss / d x, see GradientPolynomial.
template <TransformMode MODE, Degree DEGREE> struct GradientOfLogits {
    const FusedTransform& t;
    const Vec max_logit, per_exp, per_exp_shifted, per_exp_squared;

    GradientOfLogits(const FusedTransform& t, const GradientPolynomial& polynomial)
        : t(t),
          max_logit(broadcast(polynomial.max_logit)),
          per_exp(broadcast(float(polynomial.per_exp))),
          per_exp_shifted(broadcast(float(polynomial.per_exp_shifted))),
          per_exp_squared(broadcast(float(polynomial.per_exp_squared))) {}

    template <int N> INLINED void operator()(Vec (&x)[N]) const {
        Vec d[N], e[N], dtanh[N];
        Mask above_cutoff[N];
        for (int k = 0; k < N; k++) {
            const Logits logits = transform_logits<MODE>(t, x[k]);
            d[k] = sub(logits.z, max_logit);
            dtanh[k] = logits.dtanh;
            above_cutoff[k] = not_less(d[k], broadcast(EXP_CUTOFF));
        }
        exp_where(above_cutoff, d, e);
        for (int k = 0; k < N; k++) {
            Vec factor = per_exp;
            if (DEGREE >= LINEAR) {
                factor = fma_where(above_cutoff[k], per_exp_shifted, d[k], per_exp);
            }
            if (DEGREE >= QUADRATIC) {
                factor = fma_where(above_cutoff[k], per_exp_squared, e[k], factor);
            }
            if (MODE == SOFTCAP) factor = mul(factor, dtanh[k]);
            x[k] = mul_where(above_cutoff[k], e[k], factor);
        }
    }
};

// Writes the gradient of n columns x to `gradient`, which may be the same memory.
template <class T, class Out, TransformMode MODE, Degree DEGREE>
[[gnu::noinline]] void write_gradient_of_columns(
    const T* x, Out* gradient, int64_t n, const FusedTransform& t,
    const GradientPolynomial& polynomial) {
    const GradientOfLogits<MODE, DEGREE> to_gradient(t, polynomial);
    int64_t j = 0;
    for (; j + STEP_COLUMNS <= n; j += STEP_COLUMNS) {
        // load_two orders the elements of each type differently, so it needs equal types.
        Vec v[UNROLL];
        for (int k = 0; k < UNROLL; k += 2) {
            const T* from = x + j + k * LANES;
            if constexpr (SAME_TYPE<T, Out>) {
                load_two(from, v[k], v[k + 1]);
            } else {
                v[k] = load(from);
                v[k + 1] = load(from + LANES);
            }
        }
        to_gradient(v);
        for (int k = 0; k < UNROLL; k += 2) {
            Out* to = gradient + j + k * LANES;
            if constexpr (SAME_TYPE<T, Out>) {
                store_two(to, v[k], v[k + 1]);
            } else {
                store(to, v[k]);
                store(to + LANES, v[k + 1]);
            }
        }
    }
    for (; j < n; j += LANES) {
        const int count = n - j < LANES ? int(n - j) : LANES;
        Vec v[1] = {load_first(x + j, count)};
        to_gradient(v);
        store_first(gradient + j, v[0], count);
    }
}

// The same, with MODE and DEGREE chosen at run time.
template <class T, class Out>
void write_gradient_of_columns(
    const T* x, Out* gradient, int64_t n, const FusedTransform& t,
    const GradientPolynomial& polynomial) {
    with_mode(t.mode, [&](auto constant) {
        constexpr TransformMode MODE = decltype(constant)::mode;
        if (float(polynomial.per_exp_squared) != 0) {
            write_gradient_of_columns<T, Out, MODE, QUADRATIC>(x, gradient, n, t, polynomial);
        } else if (float(polynomial.per_exp_shifted) != 0) {
            write_gradient_of_columns<T, Out, MODE, LINEAR>(x, gradient, n, t, polynomial);
        } else {
            write_gradient_of_columns<T, Out, MODE, CONSTANT_FACTOR>(x, gradient, n, t, polynomial);
        }
    });
}

// Writes the gradient of a row from its logits, whose memory it may overwrite. Loops are compiled
// for a gradient of the type of the logits, and for fp32 logits. For other pairs of types, which
// are rare, blocks of logits are converted to fp32 first.
void gradient_from_logits(
    const LogitRow& row, const GradientRow& gradient, const GradientPolynomial& polynomial) {
    const FusedTransform& t = row.transform;
    const int64_t vocab = gradient.vocab;
    with_dtype(row.dtype, [&](auto element) {
        with_dtype(gradient.dtype, [&](auto out_element) {
            using T = decltype(element);
            using Out = decltype(out_element);
            const T* x = row.as<T>();
            Out* out = reinterpret_cast<Out*>(gradient.base);
            if constexpr (SAME_TYPE<T, Out> || SAME_TYPE<T, float>) {
                write_gradient_of_columns(x, out, vocab, t, polynomial);
            } else {
                float widened[BLOCK_COLUMNS];
                for (int64_t j = 0; j < vocab; j += BLOCK_COLUMNS) {
                    const int64_t n = min(BLOCK_COLUMNS, vocab - j);
                    load_block<T, IDENTITY>(x + j, n, t, widened, nullptr);
                    const float* columns = widened;
                    write_gradient_of_columns(columns, out + j, n, t, polynomial);
                }
            }
        });
    });
}

// Writes the gradient of row i, without a divergence. It is NaN if a logit is NaN or +inf.
void softmax_gradient_row(
    const SoftmaxGradientJob& job, int64_t i, const RowCoefficients& coefficients) {
    const GradientRow gradient(job.grad_logits, i);
    if (coefficients.all_zero()) return gradient.fill_zero();
    const LogitRow row(job.policy, i);
    const float max_logit = job.sums[MAX_LOGIT][i];
    const float sum_exp = job.sums[SUM_EXP][i];
    const double log_sum_exp = log(double(sum_exp));
    const double logp = (double(job.sums[TARGET_LOGIT][i]) - max_logit) - log_sum_exp;
    const GradientPolynomial polynomial(
        coefficients, row.transform, max_logit, sum_exp, log_sum_exp);
    if (!polynomial.is_finite()) return gradient.fill_nan();
    const TargetLogit target(row, job.targets[i], gradient.vocab);
    gradient_from_logits(row, gradient, polynomial);
    if (!target.in_vocab) return;
    gradient.set(target.column, target_gradient(coefficients, logp, target.dz_dx));
}

// ---- the gradient from saved terms

// Returns where the terms of a row are saved: the first in the memory of the gradient if that is
// fp32; else in the memory of the logits, if they are fp32 and the gradient overwrites them; else
// in scratch memory, which may be missing.
inline SavedTerms saved_terms_for(
    const LogitRow& row, const GradientRow& gradient, const SavedTermsBuffer& buffer) {
    const bool in_logits = row.dtype == FP32 && row.base == gradient.base;
    float* first = buffer.terms[0];
    if (in_logits) first = row.as<float>();
    if (gradient.dtype == FP32) first = reinterpret_cast<float*>(gradient.base);
    return {{first, buffer.terms[1]}, buffer.segments, 0};
}

// A factor of saved terms. Products with subnormal numbers are slow, so they become 0.
inline Vec term_factor(double factor) {
    const bool is_subnormal = fabsf(float(factor)) < MIN_NORMAL;
    return broadcast(is_subnormal ? 0.0f : float(factor));
}

// The factors of the saved terms of one segment.
struct SegmentFactors {
    Vec first;
    Vec first_if_negative;  // of the first terms that are negative, for BY_SIGN
    Vec second;
    bool is_zero = false;  // the gradient of the whole segment is 0
};

// How the gradient of a column follows from its saved terms a and b:
//   FIRST     |a| first, since FORWARD saves negative a
//   BOTH      a first + b second
//   BY_SIGN   a first + b second, where a < 0: a first_if_negative + b second
//   INFINITE  as BOTH, which is infinite wherever the probability is not 0, and 0 elsewhere
enum TermFormula { FIRST, BOTH, BY_SIGN, INFINITE };

template <TermFormula FORMULA>
INLINED Vec gradient_of_terms(
    const float* first_terms, const float* second_terms, const SegmentFactors& factors) {
    const Vec a = load(first_terms);
    if (FORMULA == FIRST) return mul(absolute(a), factors.first);
    const Vec b = load(second_terms);
    if (FORMULA == BY_SIGN) {
        const Mask is_positive = not_less(a, broadcast(0.0f));
        const Vec factor = select(is_positive, factors.first, factors.first_if_negative);
        return fma(factors.second, b, mul(a, factor));
    }
    const Vec sum = fma(factors.second, b, mul(a, factors.first));
    if (FORMULA == BOTH) return sum;
    return mul_where(not_less(absolute(a), broadcast(MIN_NORMAL)), broadcast(1.0f), sum);
}

// Writes the gradient of n columns from their saved terms. `interleaved`: the first terms are in
// the order of load_two.
template <class Out, TermFormula FORMULA>
void write_gradient_of_terms(
    const float* first_terms, const float* second_terms, Out* gradient, int64_t n, bool interleaved,
    const SegmentFactors& factors) {
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        const float* first = first_terms + j;
        const float* second = second_terms + j;
        const Vec a = gradient_of_terms<FORMULA>(first, second, factors);
        const Vec b = gradient_of_terms<FORMULA>(first + LANES, second + LANES, factors);
        if (interleaved) {
            store_two(gradient + j, a, b);
        } else {
            store(gradient + j, a);
            store(gradient + j + LANES, b);
        }
    }
    for (; j < n; j += LANES) {
        const int count = int(min(LANES, n - j));
        float first[LANES] = {}, second[LANES] = {};
        for (int k = 0; k < count; k++) first[k] = first_terms[j + k];
        if (FORMULA != FIRST) {
            for (int k = 0; k < count; k++) second[k] = second_terms[j + k];
        }
        store_first(gradient + j, gradient_of_terms<FORMULA>(first, second, factors), count);
    }
}

// Writes the gradient of a row from its saved terms. `interleaved`: whole steps of the row are in
// the order of load_two, which only FIRST supports. factors_of(segment) returns SegmentFactors.
template <class FactorsOf>
void gradient_from_saved(
    const SavedTerms& saved, const GradientRow& gradient, TermFormula formula, bool interleaved,
    const FactorsOf& factors_of) {
    const int64_t vocab = gradient.vocab;
    const int64_t interleaved_end = interleaved ? vocab / STEP_COLUMNS * STEP_COLUMNS : 0;
    with_dtype(gradient.dtype, [&](auto element) {
        using Out = decltype(element);
        Out* out = reinterpret_cast<Out*>(gradient.base);
        for (int s = 0; s < saved.num_segments; s++) {
            const bool is_last = s + 1 == saved.num_segments;
            const SegmentFactors factors = factors_of(saved.segments[s]);
            // What lies before the first segment is -inf.
            const int64_t begin = s == 0 ? 0 : saved.segments[s].begin;
            const int64_t end = is_last ? vocab : saved.segments[s + 1].begin;
            if (factors.is_zero) {
                memset(out + begin, 0, size_t(end - begin) * sizeof(Out));
                continue;
            }
            const float* a = saved.terms[0];
            const float* b = saved.terms[1];
            const int64_t n = end - begin;
            if (formula == FIRST) {
                const int64_t middle = begin > interleaved_end ? begin : min(end, interleaved_end);
                write_gradient_of_terms<Out, FIRST>(
                    a + begin, a, out + begin, middle - begin, true, factors);
                write_gradient_of_terms<Out, FIRST>(
                    a + middle, a, out + middle, end - middle, false, factors);
            } else if (formula == BOTH) {
                write_gradient_of_terms<Out, BOTH>(
                    a + begin, b + begin, out + begin, n, false, factors);
            } else if (formula == BY_SIGN) {
                write_gradient_of_terms<Out, BY_SIGN>(
                    a + begin, b + begin, out + begin, n, false, factors);
            } else {
                write_gradient_of_terms<Out, INFINITE>(
                    a + begin, b + begin, out + begin, n, false, factors);
            }
        }
    });
}

// ---- the fused loss

// d loss / d log-prob and d loss / d entropy of a token.
struct TokenGradients {
    double logp, entropy;
};

// Evaluates the loss formula for row i. Stores its log-prob, entropy and loss, and returns the
// gradients.
inline TokenGradients run_loss_program(
    const FusedLossJob& job, int64_t i, float logp, float entropy) {
    float inputs[MAX_REGISTERS];
    inputs[0] = logp;
    inputs[1] = entropy;
    for (int k = INPUTS_FROM_SOFTMAX; k < job.program->num_inputs; k++) {
        inputs[k] = job.inputs[k - INPUTS_FROM_SOFTMAX][i];
    }
    float results[LOSS_PROGRAM_OUTPUTS];
    evaluate(*job.program, job.numbers, inputs, results);
    const auto [loss, grad_logp, grad_entropy] = results;
    job.outputs[LOGPS][i] = logp;
    job.outputs[ENTROPIES][i] = entropy;
    job.outputs[LOSSES][i] = loss;
    return {grad_logp, job.loss_has_entropy ? grad_entropy : 0.0};
}

// The coefficients of a row from the gradients of its log-prob and its entropy H, whose gradient is
// dH / dz_j = -p_j (log p_j + H). H may be NaN if its gradient is 0.
inline RowCoefficients row_coefficients(const TokenGradients& token, double entropy) {
    double constant = 0;
    if (token.entropy != 0) constant -= token.entropy * entropy;
    return {token.logp, constant, -token.entropy, 0};
}

// Computes the softmax sums of row i, then the loss formula, then the gradient, without a
// reference.
void fused_loss_of_row(const FusedLossJob& job, int64_t i, const SavedTermsBuffer& buffer) {
    const int64_t vocab = job.policy.rows.vocab;
    const LogitRow row(job.policy, i);
    const GradientRow gradient(job.grad_logits, i);
    const TargetLogit target(row, job.targets[i], vocab);

    // The gradient of the entropy needs the logits: exponentials alone are of no use for it.
    const bool saves_exp = gradient.base && !job.loss_has_entropy && buffer.segments;
    const bool interleaved = row.dtype == BF16 && gradient.dtype == BF16;
    SavedTerms saved = saved_terms_for(row, gradient, buffer);
    const RowSums result = saves_exp ? softmax_sums_saving_exp(row, vocab, interleaved, saved)
                                     : softmax_sums(row, vocab, WITH_SHIFTED);

    // Sums are rounded to fp32 as softmax_sums_of_row does, so that results are the same.
    const float sum_exp = float(result.sums.sum_exp);
    const Softmax softmax(result.max_logit, sum_exp, target.z, float(result.sums.sum_exp_shifted));
    const TokenGradients token = run_loss_program(job, i, float(softmax.logp), softmax.entropy);
    if (!gradient.base) return;

    const RowCoefficients coefficients = row_coefficients(token, softmax.entropy);
    if (coefficients.all_zero()) return gradient.fill_zero();
    const GradientPolynomial polynomial(
        coefficients, row.transform, result.max_logit, sum_exp, softmax.log_sum_exp);
    if (!polynomial.is_finite()) return gradient.fill_nan();
    if (saves_exp) {
        gradient_from_saved(saved, gradient, FIRST, interleaved, [&](const Segment& segment) {
            const double rescaled = exp(double(segment.shift) - double(polynomial.max_logit));
            const Vec factor = term_factor(float(polynomial.per_exp * rescaled));
            return SegmentFactors{factor, factor, factor};
        });
    } else {
        gradient_from_logits(row, gradient, polynomial);
    }
    if (!target.in_vocab) return;
    gradient.set(target.column, target_gradient(coefficients, softmax.logp, target.dz_dx));
}

// ---- scaling

// Multiplies the elements begin .. end - 1 by the factor.
void scale(const ScaleJob& job, int64_t begin, int64_t end) {
    with_dtype(job.dtype, [&](auto element) {
        using T = decltype(element);
        T* data = reinterpret_cast<T*>(job.data) + begin;
        const int64_t n = end - begin;
        const Vec factor = broadcast(job.factor);
        int64_t j = 0;
        for (; j + LANES <= n; j += LANES) {
            store_keeping_nan(data + j, mul(load(data + j), factor));
        }
        for (; j < n; j++) {
            T lanes[LANES];
            store_keeping_nan(lanes, mul(load_first(data + j, 1), factor));
            data[j] = lanes[0];
        }
    });
}

}  // namespace
}  // namespace grpo
