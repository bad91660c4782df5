// Kernels over (row, id) pairs, see kernels.h: dot products of rows of the hidden states with rows
// of the weight, and weighted sums of such rows. Compiled once per instruction set, like simd.h.
//
// The time goes into reading rows from random places in memory. So several rows are read at the
// same time, and the next ones are prefetched meanwhile. The result of a pair or a key depends
// neither on other pairs or keys nor on how threads divide them.
#pragma once
#include "softmax_rows.h"

namespace grpo {
namespace {

// Dot products computed at the same time, and the sums of each; all sums stay in registers.
constexpr int NUM_DOTS = LANES == 16 ? 4 : 2;
constexpr int SUMS_PER_DOT = 4;
// Rows added to a weighted sum at the same time.
constexpr int NUM_TERMS = 4;
// Rows of the weighted sums to prefetch before they are needed.
constexpr int NUM_PREFETCHED = 4;

// Rows to prefetch, a few columns at a time.
struct RowPrefetch {
    struct Row {
        const char* address;
        int element_size;
    };
    Row rows[2 * (NUM_PREFETCHED + NUM_TERMS)];
    int count = 0;

    void add(const Matrix& matrix, int64_t i, int64_t first_column) {
        const int element_size = size_of(matrix.dtype);
        const int64_t offset = i * matrix.stride + first_column;
        rows[count++] = {matrix.base + offset * element_size, element_size};
    }
    void fetch(int64_t column, int num_columns) const {
        for (int r = 0; r < count; r++) {
            const char* address = rows[r].address + column * rows[r].element_size;
            for (int byte = 0; byte < num_columns * rows[r].element_size; byte += CACHE_LINE) {
                __builtin_prefetch(address + byte);
            }
        }
    }
};

// ---- logits of pairs

// N dot products of rows x[r] [n] and y[r] [n]. Each result is the same for any N.
template <class X, class Y, int N>
void dot_products(
    const X* const* x, const Y* const* y, int64_t n, float* const* results,
    const RowPrefetch& prefetch) {
    Vec sum[N][SUMS_PER_DOT];
    for (int r = 0; r < N; r++) {
        for (int k = 0; k < SUMS_PER_DOT; k++) sum[r][k] = broadcast(0.0f);
    }
    constexpr int COLUMNS = SUMS_PER_DOT * LANES;
    int64_t j = 0;
    for (; j + COLUMNS <= n; j += COLUMNS) {
        prefetch.fetch(j, COLUMNS);
        for (int r = 0; r < N; r++) {
            for (int k = 0; k < SUMS_PER_DOT; k++) {
                const int64_t column = j + k * LANES;
                sum[r][k] = fma(load(x[r] + column), load(y[r] + column), sum[r][k]);
            }
        }
    }
    prefetch.fetch(j, int(n - j));
    for (; j + LANES <= n; j += LANES) {
        for (int r = 0; r < N; r++) sum[r][0] = fma(load(x[r] + j), load(y[r] + j), sum[r][0]);
    }
    const int num_left = int(n - j);
    for (int r = 0; r < N; r++) {
        if (num_left) {
            const Vec x_left = load_first(x[r] + j, num_left);
            sum[r][1] = fma(x_left, load_first(y[r] + j, num_left), sum[r][1]);
        }
        const Vec total = add(add(sum[r][0], sum[r][1]), add(sum[r][2], sum[r][3]));
        *results[r] = float(sum_lanes(total));
    }
}

// Computes the logits of the pairs begin .. end - 1, NUM_DOTS dot products at a time. X and Y are
// the types of hidden states and weight.
template <class X, class Y> void pair_logits(const PairLogitsJob& job, int64_t begin, int64_t end) {
    const RowIdPairs& pairs = job.pairs;
    const auto next_used = [&](int64_t pair) {
        while (pair < end && pairs.ids[pair] < 0) pair++;
        return pair;
    };
    for (int64_t pair = begin; pair < end; pair++) {
        if (pairs.ids[pair] < 0) job.logits[pair] = -INFINITY;
    }
    int64_t pair = next_used(begin);
    while (pair < end) {
        const X* x[NUM_DOTS];
        const Y* y[NUM_DOTS];
        float* logits[NUM_DOTS];
        int n = 0;
        for (; n < NUM_DOTS && pair < end; n++) {
            x[n] = job.hidden.at<X>(pairs.rows[pair], 0);
            y[n] = job.weight.at<Y>(pairs.ids[pair], 0);
            logits[n] = job.logits + pair;
            pair = next_used(pair + 1);
        }
        RowPrefetch prefetch;
        for (int64_t next = pair; prefetch.count < NUM_DOTS && next < end;) {
            prefetch.add(job.weight, pairs.ids[next], 0);
            next = next_used(next + 1);
        }
        const int64_t width = job.hidden.columns;
        if (n == NUM_DOTS) {
            dot_products<X, Y, NUM_DOTS>(x, y, width, logits, prefetch);
        } else {  // the last ones
            for (int r = 0; r < n; r++) {
                dot_products<X, Y, 1>(x + r, y + r, width, logits + r, prefetch);
            }
        }
    }
}

void pair_logits(const PairLogitsJob& job, int64_t begin, int64_t end) {
    with_dtype(job.hidden.dtype, [&](auto hidden) {
        with_dtype(job.weight.dtype, [&](auto weight) {
            pair_logits<decltype(hidden), decltype(weight)>(job, begin, end);
        });
    });
}

// ---- weighted sums of rows

// The pairs of a SegmentedSumJob in the order of their keys. Positions index `by_id` if there is
// one, else the pairs. Unused pairs and those with value 0 are skipped.
struct PairIterator {
    const SegmentedSumJob& job;
    int64_t end;  // of the range whose keys are summed

    int64_t pair(int64_t position) const { return job.by_id ? job.by_id[position].pair : position; }
    int64_t key(int64_t position) const {
        return job.by_id ? job.by_id[position].key : job.pairs.rows[position];
    }
    int64_t source_row(int64_t position) const {
        return job.by_id ? job.pairs.rows[job.by_id[position].pair] : job.pairs.ids[position];
    }
    // Sorted pairs are all used and nonzero.
    bool is_used(int64_t position) const {
        if (job.by_id) return true;
        return job.pairs.ids[position] >= 0 && job.values[position] != 0;
    }
    bool starts_key(int64_t position) const {
        return position == 0 || key(position) != key(position - 1);
    }

    // Returns the first used position of the first key that starts at or behind `begin`.
    int64_t first(int64_t begin) const {
        int64_t position = begin;
        while (position < end && !starts_key(position)) position++;
        return position < end ? next_used(position) : job.count;
    }
    // Returns the next used position, or job.count if there is none. The key of the range's last
    // pair is continued beyond the range.
    int64_t next_used(int64_t position) const {
        for (; position < job.count; position++) {
            if (position >= end && starts_key(position)) return job.count;
            if (is_used(position)) return position;
        }
        return position;
    }
};

// sum [n] += values[r] * rows[r] [n] in the order of r; `starts`: the sum begins at 0. `sum` has
// LANES more elements than n.
template <class T, int N>
void add_rows(
    const T* const* rows, const float* values, float* sum, int64_t n, bool starts,
    const RowPrefetch& prefetch) {
    constexpr int BYTES_PER_FETCH = 4 * CACHE_LINE;
    constexpr int COLUMNS = BYTES_PER_FETCH / int(sizeof(T));
    Vec factors[N];
    for (int r = 0; r < N; r++) factors[r] = broadcast(values[r]);
    for (int64_t j = 0; j < n;) {
        const int64_t end = min(j + COLUMNS, n);
        prefetch.fetch(j, int(end - j));
        for (; j + LANES <= end; j += LANES) {
            Vec total = starts ? broadcast(0.0f) : load(sum + j);
            for (int r = 0; r < N; r++) total = fma(factors[r], load(rows[r] + j), total);
            store(sum + j, total);
        }
        if (j >= end) continue;
        const int num_left = int(end - j);
        Vec total = starts ? broadcast(0.0f) : load(sum + j);
        for (int r = 0; r < N; r++) {
            total = fma(factors[r], load_first(rows[r] + j, num_left), total);
        }
        store(sum + j, total);
        break;
    }
}

// Writes a sum to `out`, or adds it to what `out` holds.
template <class Out> void write_sum(const float* sum, Out* out, int64_t n, bool accumulate) {
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        const Vec total = load(sum + j);
        store_keeping_nan(out + j, accumulate ? add(load(out + j), total) : total);
    }
    if (j == n) return;
    const int num_left = int(n - j);
    const Vec total = load(sum + j);
    Out lanes[LANES];
    store_keeping_nan(lanes, accumulate ? add(load_first(out + j, num_left), total) : total);
    for (int k = 0; k < num_left; k++) out[j + k] = lanes[k];
}

// Computes the columns first_column .. last_column - 1 of the sums of the keys whose first pair is
// in [begin, end). T is the type of the source. NUM_TERMS rows are added at a time, and the next
// NUM_PREFETCHED rows are prefetched meanwhile.
template <class T>
void segmented_sum(
    const SegmentedSumJob& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    const PairIterator pairs{job, end};
    const int64_t num_columns = last_column - first_column;
    alignas(CACHE_LINE) float sum[SUM_COLUMNS + LANES];
    bool starts = true;  // the next row starts the sum of a key
    int64_t position = pairs.first(begin);
    int64_t next_to_prefetch = position;
    int num_prefetched = 0;
    while (position < job.count) {
        const int64_t key = pairs.key(position);
        const T* rows[NUM_TERMS];
        float values[NUM_TERMS];
        int n = 0;
        for (; n < NUM_TERMS && position < job.count && pairs.key(position) == key; n++) {
            rows[n] = job.source.at<T>(pairs.source_row(position), first_column);
            values[n] = job.values[pairs.pair(position)];
            position = pairs.next_used(position + 1);
        }
        RowPrefetch prefetch;
        num_prefetched -= n;
        if (num_prefetched < 0) {
            num_prefetched = 0;
            next_to_prefetch = position;
        }
        for (; num_prefetched < NUM_PREFETCHED && next_to_prefetch < job.count; num_prefetched++) {
            prefetch.add(job.source, pairs.source_row(next_to_prefetch), first_column);
            if (job.accumulate && pairs.starts_key(next_to_prefetch)) {
                prefetch.add(job.out, pairs.key(next_to_prefetch), first_column);
            }
            next_to_prefetch = pairs.next_used(next_to_prefetch + 1);
        }
        switch (n) {
            case 1: add_rows<T, 1>(rows, values, sum, num_columns, starts, prefetch); break;
            case 2: add_rows<T, 2>(rows, values, sum, num_columns, starts, prefetch); break;
            case 3: add_rows<T, 3>(rows, values, sum, num_columns, starts, prefetch); break;
            default: add_rows<T, NUM_TERMS>(rows, values, sum, num_columns, starts, prefetch);
        }
        starts = position >= job.count || pairs.key(position) != key;
        if (!starts) continue;
        with_dtype(job.out.dtype, [&](auto element) {
            auto* out = job.out.at<decltype(element)>(key, first_column);
            write_sum(sum, out, num_columns, job.accumulate);
        });
    }
}

void segmented_sum(
    const SegmentedSumJob& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    with_dtype(job.source.dtype, [&](auto element) {
        segmented_sum<decltype(element)>(job, begin, end, first_column, last_column);
    });
}

}  // namespace
}  // namespace grpo
