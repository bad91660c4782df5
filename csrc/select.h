// Selects the columns of a row that form the sparse gradient, see rows/selection.py. Compiled once per instruction set, like simd.h.
//
// Masses are integers, so that their sums are the same in any order. Columns are taken in few stretches of a row; in the others only
// the sum of the masses is computed.
#pragma once
#include "one_row.h"

namespace grpo {
namespace {

// Elements whose masses are summed before it is checked whether one of them is taken.
constexpr int STRETCH = 256;
static_assert(STRETCH % STEP == 0, "a stretch must be a multiple of a step");

constexpr float WHOLE_STEP = 2147483648.0f;  // 2^STEP_BITS

// Sums of numbers in [0, 2^31), each truncated to an integer. The low and high 16 bits are summed separately, so that no 32-bit sum
// of a stretch overflows.
struct MassSums {
    typedef int32_t I __attribute__((vector_size(4 * W)));
    I low = {}, high = {};

    INLINED void take(F units) {
        const I mass = __builtin_convertvector(units, I);
        low += mass & 0xffff, high += mass >> 16;
    }
    int64_t total() const {
        int64_t sum = 0;
        for (int k = 0; k < W; k++) sum += low[k] + (int64_t(high[k]) << 16);
        return sum;
    }
};

// The selection of the columns of one row.
struct Selection {
    const SelectJob& job;
    int64_t i, target;
    int64_t mass = 0, before = 0;  // units of sampled columns so far; the running sum, which starts at `starts`
    int64_t count = 0;

    Selection(const SelectJob& job, int64_t i) : job(job), i(i), target(job.targets[i]) {
        if (job.ids) before = job.starts[i];
    }

    template <class T> void take(const T* x, int64_t j) {
        if (!job.ids || count >= job.capacity) return;
        job.ids[i * job.capacity + count] = int32_t(j);
        job.taken[i * job.capacity + count++] = lane0(load_some(x + j, 1));
    }
    // Takes columns of the next stretch, which has n columns from j on. `units` are their masses; `sum` is the sum of those below a
    // whole step.
    template <class T> void go_on(const T* x, int64_t j, int n, const float* units, int64_t sum, bool has_whole) {
        const bool has_target = target >= j && target < j + n;
        if (has_target && units[target - j] < WHOLE_STEP) sum -= int64_t(units[target - j]);
        mass += sum;
        if (has_target || has_whole || (before >> STEP_BITS) != ((before + sum) >> STEP_BITS)) {
            int64_t at = before;
            for (int k = 0; job.ids && k < n; k++) {
                if (j + k == target || units[k] >= WHOLE_STEP) {
                    take(x, j + k);
                    continue;
                }
                const int64_t after = at + int64_t(units[k]);
                if ((at >> STEP_BITS) != (after >> STEP_BITS)) take(x, j + k);
                at = after;
            }
        }
        before += sum;
    }
    void finish() {
        if (job.masses) job.masses[i] = mass;
        for (; job.ids && count < job.capacity; count++) job.ids[i * job.capacity + count] = -1, job.taken[i * job.capacity + count] = 0;
    }
};

template <class T, Mode MODE> void select_columns(Selection& row, const T* x, const RowTransform& t, float max, float inverse_sum) {
    const SelectJob& job = row.job;
    const int64_t vocab = job.own.rows.vocab;
    const F m = all(max), inverse = all(inverse_sum), per_unit = all(job.per_unit), whole = all(WHOLE_STEP);
    float units[STRETCH];
    F most = all(0.0f);
    MassSums sums;
    auto to_units = [&](auto& v, int last, float* to) INLINED_LAMBDA {  // of a few vectors of logits; the last vector has `last` elements
        constexpr int N = sizeof(v) / sizeof(F);
        F d[N], e[N];
        Keep keep[N];
        for (int k = 0; k < N; k++) d[k] = sub(transformed<MODE>(t, v[k]).z, m);
        if (last < W) d[N - 1] = choose(first_lanes(last), d[N - 1], all(-INFINITY));
        for (int k = 0; k < N; k++) keep[k] = not_below(d[k], all(EXP_CUTOFF));
        exp_where(keep, d, e);
        for (int k = 0; k < N; k++) {
            const F u = mul(mul(e[k], inverse), per_unit);
            store(to + k * W, u);
            most = max_ignoring_nan(u, most);
            sums.take(choose(not_below(u, whole), all(0.0f), u));
        }
    };
    for (int64_t j = 0; j < vocab; j += STRETCH) {
        const int n = vocab - j < STRETCH ? int(vocab - j) : STRETCH;
        int k = 0;
        most = all(0.0f), sums = MassSums();
        for (; k + STEP <= n; k += STEP) {
            for (size_t byte = 0; byte < STEP * sizeof(T); byte += 64) {
                __builtin_prefetch(reinterpret_cast<const char*>(x + j + k) + PREFETCH_BYTES + byte);
            }
            F v[UNROLL];
            for (int r = 0; r < UNROLL; r++) v[r] = load(x + j + k + r * W);
            to_units(v, W, units + k);
        }
        for (; k < n; k += W) {
            const int rest = n - k < W ? n - k : W;
            F v[1] = {load_some(x + j + k, rest)};
            to_units(v, rest, units + k);
        }
        row.go_on(x, j, n, units, sums.total(), any_above(most, all(2147483520.0f)));
    }
}

void select(const SelectJob& job, int64_t i) {
    Selection selection(job, i);
    const Row row(job.own, i);
    const float max = job.of[MAX][i], inverse = float(1.0 / double(job.of[SUM][i]));
    with_type(row.dtype, [&](auto e) {
        const auto* x = row.as<decltype(e)>();
        if (!(fabsf(inverse) < INFINITY && fabsf(max) < INFINITY)) {  // such a row has no probabilities
            if (selection.target >= 0 && selection.target < job.own.rows.vocab) selection.take(x, selection.target);
            return;
        }
        with_mode(row.t.mode, [&](auto m) { select_columns<decltype(e), decltype(m)::mode>(selection, x, row.t, max, inverse); });
    });
    selection.finish();
}

}  // namespace
}  // namespace grpo
