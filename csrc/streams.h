// Two rows of logits over the same ids, read block by block. Compiled once per instruction set, like simd.h.
//
// Both rows are turned into transformed fp32 logits block by block, in the L1 cache. Only `Stream` deals with dtypes and transforms,
// which may differ between the rows.
#pragma once
#include "divergence.h"
#include "row_gradient.h"

namespace grpo {
namespace {

// SIDE: vectors processed at the same time; four would need more registers than there are. SUMMED: elements that are summed in fp32
// before the sum is added to one in fp64.
constexpr int SIDE = 2;
constexpr int64_t GROUP = int64_t(SIDE) * W;
constexpr int64_t SUMMED = 32 * GROUP < LOGITS ? 32 * GROUP : LOGITS;

constexpr float SMALLEST = 1.17549435e-38f;  // the smallest normal fp32 number

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline F minus(F a) { return sub(all(0.0f), a); }

// ---- one row

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

template <class T> float fetch(const T* x, int64_t n, const RowTransform& t, float* z, float* slopes) {
    switch (t.mode) {
        case PLAIN: return fetch<T, PLAIN>(x, n, t, z, slopes);
        case SCALED: return fetch<T, SCALED>(x, n, t, z, slopes);
        default: return fetch<T, CAPPED>(x, n, t, z, slopes);
    }
}

// A row of logits of any dtype and transform.
struct Stream {
    const char* base;
    int dtype, element;
    RowTransform t;

    Stream(const Rows& rows, int64_t row, const Transform& transform, int64_t i)
        : base(rows.row(row)), dtype(rows.dtype), element(dtype == FP32 ? 4 : 2), t(transform, transform.inverse(i)) {}

    // The transformed logits of n elements from j on. They are written to `buffer`, unless the row in memory already is what is needed.
    Logits logits(int64_t j, int64_t n, float* buffer, float* slopes = nullptr) const {
        const char* x = base + j * element;
        switch (dtype) {
            case FP32: {
                const float* plain = reinterpret_cast<const float*>(x);
                if (t.mode == PLAIN && n % W == 0) return {plain, max_of(plain, n)};
                return {buffer, fetch(plain, n, t, buffer, slopes)};
            }
            case BF16: return {buffer, fetch(reinterpret_cast<const bf16*>(x), n, t, buffer, slopes)};
            default: return {buffer, fetch(reinterpret_cast<const fp16*>(x), n, t, buffer, slopes)};
        }
    }
    // One transformed logit, and dz/dx.
    float logit(int64_t j, double* slope = nullptr) const {
        float z[W], factor[W] = {1};
        z[0] = logits(j, 1, z, factor).z[0];
        if (slope) *slope = double(t.slope) * (t.mode == CAPPED ? factor[0] : 1.0f);
        return z[0];
    }
    // Prefetches the same group of the next block. For 16-bit rows each cache line is prefetched twice; avoiding that costs more.
    INLINED void prefetch(int64_t j) const {
        const char* next = base + (j + LOGITS) * element;
        for (int64_t k = 0; k < GROUP; k += 16) __builtin_prefetch(next + k * element);
    }
};

struct Block {
    alignas(64) float z[LOGITS], w[LOGITS], slopes[LOGITS];
};

// ---- both rows

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

}  // namespace
}  // namespace grpo
