// Products over slots: dot products of a row of the hidden states with a row of the weight, and weighted sums of such rows, see
// rows/ragged.py. Compiled once per instruction set, like simd.h.
//
// The time goes into reading rows from random places in memory. So several rows are read at the same time, and the next ones are
// prefetched meanwhile. The result of a slot or a key depends neither on other slots or keys nor on how threads divide them.
#pragma once
#include "one_row.h"

namespace grpo {
namespace {

// Rows that are read at the same time, and the partial sums of each; all sums are in registers.
constexpr int DOTS = W == 16 ? 4 : 2, PARTS = 4;
constexpr int TERMS = 4;

// The least number of rows that are prefetched ahead.
constexpr int AHEAD = 4;

// Rows to prefetch, a few columns at a time.
struct Ahead {
    struct Start {
        const char* at;
        int element;
    };
    Start rows[2 * (AHEAD + TERMS)];
    int count = 0;

    void add(const Matrix& table, int64_t i, int64_t first_column) {
        const int element = size_of(table.dtype);
        rows[count++] = {table.base + (i * table.stride + first_column) * element, element};
    }
    void fetch(int64_t column, int columns) const {
        for (int r = 0; r < count; r++) {
            const char* at = rows[r].at + column * rows[r].element;
            for (int b = 0; b < columns * rows[r].element; b += 64) __builtin_prefetch(at + b);
        }
    }
};

// ---- logits

// N dot products of rows. Each result is the same for any N.
template <class H, class T, int N>
void dots(const H* const* x, const T* const* y, int64_t n, float* const* out, const Ahead& ahead) {
    F sum[N][PARTS];
    for (int r = 0; r < N; r++) {
        for (int k = 0; k < PARTS; k++) sum[r][k] = all(0.0f);
    }
    int64_t j = 0;
    for (; j + PARTS * W <= n; j += PARTS * W) {
        ahead.fetch(j, PARTS * W);
        for (int r = 0; r < N; r++) {
            for (int k = 0; k < PARTS; k++) sum[r][k] = fma(load(x[r] + j + k * W), load(y[r] + j + k * W), sum[r][k]);
        }
    }
    ahead.fetch(j, int(n - j));
    for (; j + W <= n; j += W) {
        for (int r = 0; r < N; r++) sum[r][0] = fma(load(x[r] + j), load(y[r] + j), sum[r][0]);
    }
    for (int r = 0; r < N; r++) {
        const int rest = int(n - j);
        if (rest) sum[r][1] = fma(load_some(x[r] + j, rest), load_some(y[r] + j, rest), sum[r][1]);
        *out[r] = float(sum_lanes(add(add(sum[r][0], sum[r][1]), add(sum[r][2], sum[r][3]))));
    }
}

template <class H, class T> void slot_logits(const SlotLogits& job, int64_t begin, int64_t end) {
    const Slots& slots = job.slots;
    const auto used = [&](int64_t s) {
        while (s < end && slots.ids[s] < 0) s++;
        return s;
    };
    for (int64_t s = begin; s < end; s++) {
        if (slots.ids[s] < 0) job.logits[s] = -INFINITY;
    }
    for (int64_t s = used(begin); s < end;) {
        const H* x[DOTS];
        const T* y[DOTS];
        float* out[DOTS];
        int n = 0;
        for (; n < DOTS && s < end; n++, s = used(s + 1)) {
            x[n] = job.hidden.at<H>(slots.rows[s], 0), y[n] = job.weight.at<T>(slots.ids[s], 0), out[n] = job.logits + s;
        }
        Ahead ahead;
        for (int64_t next = s; ahead.count < DOTS && next < end; next = used(next + 1)) ahead.add(job.weight, slots.ids[next], 0);
        if (n == DOTS) {
            dots<H, T, DOTS>(x, y, job.hidden.columns, out, ahead);
        } else {  // the last ones
            for (int r = 0; r < n; r++) dots<H, T, 1>(x + r, y + r, job.hidden.columns, out + r, ahead);
        }
    }
}

void slot_logits(const SlotLogits& job, int64_t begin, int64_t end) {
    with_type(job.hidden.dtype, [&](auto h) {
        with_type(job.weight.dtype, [&](auto w) { slot_logits<decltype(h), decltype(w)>(job, begin, end); });
    });
}

// ---- sums

// Iterates over the slots of a range in order: which slots count, and the key of each.
struct Places {
    const SlotSums& job;
    int64_t end;

    int64_t slot(int64_t p) const { return job.by_id ? job.by_id[p].slot : p; }
    int64_t key(int64_t p) const { return job.by_id ? job.by_id[p].key : job.slots.rows[p]; }
    int64_t index(int64_t p) const { return job.by_id ? job.slots.rows[job.by_id[p].slot] : job.slots.ids[p]; }
    bool counts(int64_t p) const { return job.by_id || (job.slots.ids[p] >= 0 && job.values[p] != 0); }
    bool starts_key(int64_t p) const { return p == 0 || key(p) != key(p - 1); }

    int64_t first(int64_t begin) const {
        int64_t p = begin;
        while (p < end && !starts_key(p)) p++;
        return p < end ? seek(p) : job.count;
    }
    // The next place from p on that counts, or job.count if there is none. A key that begins in the range is continued beyond its end.
    int64_t seek(int64_t p) const {
        for (; p < job.count; p++) {
            if (p >= end && starts_key(p)) return job.count;
            if (counts(p)) return p;
        }
        return p;
    }
};

// Adds values[r] * rows[r] to the sum, in the order of r. The first pass over a key's slots starts it.
template <class S, int N> void add_terms(const S* const* rows, const float* values, float* sum, int64_t n, bool first, const Ahead& ahead) {
    constexpr int AT_ONCE = 256 / int(sizeof(S));
    F v[N];
    for (int r = 0; r < N; r++) v[r] = all(values[r]);
    for (int64_t j = 0; j < n;) {
        const int64_t end = min(j + AT_ONCE, n);
        ahead.fetch(j, int(end - j));
        for (; j + W <= end; j += W) {
            F s = first ? all(0.0f) : load(sum + j);
            for (int r = 0; r < N; r++) s = fma(v[r], load(rows[r] + j), s);
            store(sum + j, s);
        }
        if (j >= end) continue;
        F s = first ? all(0.0f) : load(sum + j);  // `sum` has W more elements than are used
        for (int r = 0; r < N; r++) s = fma(v[r], load_some(rows[r] + j, int(end - j)), s);
        store(sum + j, s);
        break;
    }
}

// Writes a sum, or adds it to what is there.
template <class O> void put_sum(const float* sum, O* out, int64_t n, bool keep) {
    int64_t j = 0;
    for (; j + W <= n; j += W) store_any(out + j, keep ? add(load(out + j), load(sum + j)) : load(sum + j));
    if (j == n) return;
    const int rest = int(n - j);
    O lanes[W];
    store_any(lanes, keep ? add(load_some(out + j, rest), load(sum + j)) : load(sum + j));
    for (int k = 0; k < rest; k++) out[j + k] = lanes[k];
}

template <class S> void slot_sums(const SlotSums& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    const Places places{job, end};
    const int64_t columns = last_column - first_column;
    alignas(64) float sum[SUM_COLUMNS + W];
    bool first = true;
    int64_t p = places.first(begin), next = p;
    int on_their_way = 0;
    while (p < job.count) {
        const int64_t key = places.key(p);
        const S* rows[TERMS];
        float values[TERMS];
        int n = 0;
        for (; n < TERMS && p < job.count && places.key(p) == key; n++, p = places.seek(p + 1)) {
            rows[n] = job.source.at<S>(places.index(p), first_column);
            values[n] = job.values[places.slot(p)];
        }
        Ahead ahead;
        on_their_way -= n;
        if (on_their_way < 0) on_their_way = 0, next = p;
        for (; on_their_way < AHEAD && next < job.count; on_their_way++, next = places.seek(next + 1)) {
            ahead.add(job.source, places.index(next), first_column);
            if (job.keep && places.starts_key(next)) ahead.add(job.out, places.key(next), first_column);
        }
        switch (n) {
            case 1: add_terms<S, 1>(rows, values, sum, columns, first, ahead); break;
            case 2: add_terms<S, 2>(rows, values, sum, columns, first, ahead); break;
            case 3: add_terms<S, 3>(rows, values, sum, columns, first, ahead); break;
            default: add_terms<S, TERMS>(rows, values, sum, columns, first, ahead); break;
        }
        first = p >= job.count || places.key(p) != key;
        if (first) {
            with_type(job.out.dtype, [&](auto o) { put_sum(sum, job.out.at<decltype(o)>(key, first_column), columns, job.keep); });
        }
    }
}

void slot_sums(const SlotSums& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    with_type(job.source.dtype, [&](auto s) { slot_sums<decltype(s)>(job, begin, end, first_column, last_column); });
}

}  // namespace
}  // namespace grpo
