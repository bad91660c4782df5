// The sparse products of sparse.h. Compiled once per instruction set, and without C++ library headers: see kernels.cpp.
//
// The time goes into reading rows from random places in memory. So several rows are read at the same time, and the next ones are
// prefetched meanwhile. The result of a slot or a key depends neither on other slots or keys nor on how threads divide them.
#include "sparse.h"

#include "kernels.h"
#include "simd.h"

namespace grpo {
namespace {

// Rows that are read at the same time, and the partial sums of each; all sums are in registers.
constexpr int DOTS = W == 16 ? 4 : 2, PARTS = 4;
constexpr int TERMS = 4;

// The least number of rows that are prefetched ahead.
constexpr int AHEAD = 4;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int element_size(int dtype) { return dtype == FP32 ? 4 : 2; }

template <class T> T* row_of(const Table& table, int64_t i) { return reinterpret_cast<T*>(table.base) + i * table.stride; }

// Rows to prefetch, a few columns at a time.
struct Ahead {
    struct Row {
        const char* at;
        int element;
    };
    Row rows[2 * (AHEAD + TERMS)];
    int count = 0;

    void add(const Table& table, int64_t i, int64_t first_column) {
        const int element = element_size(table.dtype);
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
    const auto used = [&](int64_t s) {
        while (s < end && job.ids[s] < 0) s++;
        return s;
    };
    for (int64_t s = begin; s < end; s++) {
        if (job.ids[s] < 0) job.logits[s] = -INFINITY;
    }
    for (int64_t s = used(begin); s < end;) {
        const H* x[DOTS];
        const T* y[DOTS];
        float* out[DOTS];
        int n = 0;
        for (; n < DOTS && s < end; n++, s = used(s + 1)) {
            x[n] = row_of<H>(job.hidden, job.rows[s]), y[n] = row_of<T>(job.weight, job.ids[s]), out[n] = job.logits + s;
        }
        Ahead ahead;
        for (int64_t next = s; ahead.count < DOTS && next < end; next = used(next + 1)) ahead.add(job.weight, job.ids[next], 0);
        switch (n) {
            case 1: dots<H, T, 1>(x, y, job.width, out, ahead); break;
            case 2: dots<H, T, 2>(x, y, job.width, out, ahead); break;
            case 3: dots<H, T, DOTS < 3 ? 1 : 3>(x, y, job.width, out, ahead); break;
            default: dots<H, T, DOTS>(x, y, job.width, out, ahead); break;
        }
    }
}

template <class H> void logits_of(const SlotLogits& job, int64_t begin, int64_t end) {
    switch (job.weight.dtype) {
        case FP32: return slot_logits<H, float>(job, begin, end);
        case BF16: return slot_logits<H, bf16>(job, begin, end);
        default: return slot_logits<H, fp16>(job, begin, end);
    }
}

void logits(const SlotLogits& job, int64_t begin, int64_t end) {
    switch (job.hidden.dtype) {
        case FP32: return logits_of<float>(job, begin, end);
        case BF16: return logits_of<bf16>(job, begin, end);
        default: return logits_of<fp16>(job, begin, end);
    }
}

// ---- sums

// Iterates over the slots of a range in order: which slots count, and the key of each.
struct Places {
    const SlotSums& job;
    int64_t end;

    int64_t slot(int64_t p) const { return job.by_id ? job.by_id[p].slot : p; }
    int64_t key(int64_t p) const { return job.by_id ? job.by_id[p].key : job.rows[p]; }
    int64_t index(int64_t p) const { return job.by_id ? job.rows[job.by_id[p].slot] : job.ids[p]; }
    bool counts(int64_t p) const { return job.by_id || (job.ids[p] >= 0 && job.values[p] != 0); }
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

// How one call of `terms` continues the sum of a key.
struct Stage {
    bool first, last;  // whether this is the first, or the last, pass over a key's slots
    bool keep;         // the last pass adds to what is in `out`
    float* sum;
    int64_t columns;
};

// Adds values[r] * rows[r] to the sum, in the order of r. The last pass writes the sum to `out`.
template <class S, class O, int N>
void terms(const S* const* rows, const float* values, O* out, const Stage& stage, const Ahead& ahead) {
    constexpr int STEP = 256 / int(sizeof(S));
    const bool first = stage.first, last = stage.last, keep = stage.keep;
    const int64_t n = stage.columns;
    float* sum = stage.sum;
    F v[N];
    for (int r = 0; r < N; r++) v[r] = all(values[r]);
    const auto go_on = [&](F s, int64_t j) {
        if (!last) store(sum + j, s);
        else store_any(out + j, keep ? add(load(out + j), s) : s);
    };
    int64_t j = 0;
    while (j < n) {
        const int64_t end = min(j + STEP, n);
        ahead.fetch(j, int(end - j));
        for (; j + W <= end; j += W) {
            F s = first ? all(0.0f) : load(sum + j);
            for (int r = 0; r < N; r++) s = fma(v[r], load(rows[r] + j), s);
            go_on(s, j);
        }
        if (j < end) break;
    }
    if (j < n) {  // `sum` has W more elements than are used
        const int rest = int(n - j);
        F s = first ? all(0.0f) : load(sum + j);
        for (int r = 0; r < N; r++) s = fma(v[r], load_some(rows[r] + j, rest), s);
        if (!last) return store(sum + j, s);
        O lanes[W];
        store_any(lanes, keep ? add(load_some(out + j, rest), s) : s);
        for (int k = 0; k < rest; k++) out[j + k] = lanes[k];
    }
}

template <class S, class O> void key_sums(const SlotSums& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    const Places places{job, end};
    alignas(64) float sum[SUM_COLUMNS + W];
    Stage stage{true, true, job.keep, sum, last_column - first_column};
    int64_t p = places.first(begin), next = p;
    int on_their_way = 0;
    while (p < job.count) {
        const int64_t key = places.key(p);
        const S* rows[TERMS];
        float values[TERMS];
        int n = 0;
        for (; n < TERMS && p < job.count && places.key(p) == key; n++, p = places.seek(p + 1)) {
            rows[n] = row_of<S>(job.source, places.index(p)) + first_column;
            values[n] = job.values[places.slot(p)];
        }
        Ahead ahead;
        on_their_way -= n;
        if (on_their_way < 0) on_their_way = 0, next = p;
        for (; on_their_way < AHEAD && next < job.count; on_their_way++, next = places.seek(next + 1)) {
            ahead.add(job.source, places.index(next), first_column);
            if (job.keep && places.starts_key(next)) ahead.add(job.out, places.key(next), first_column);
        }
        stage.last = p >= job.count || places.key(p) != key;
        O* out = row_of<O>(job.out, key) + first_column;
        switch (n) {
            case 1: terms<S, O, 1>(rows, values, out, stage, ahead); break;
            case 2: terms<S, O, 2>(rows, values, out, stage, ahead); break;
            case 3: terms<S, O, 3>(rows, values, out, stage, ahead); break;
            default: terms<S, O, TERMS>(rows, values, out, stage, ahead); break;
        }
        stage.first = stage.last;
    }
}

template <class S> void sums_of(const SlotSums& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    switch (job.out.dtype) {
        case FP32: return key_sums<S, float>(job, begin, end, first_column, last_column);
        case BF16: return key_sums<S, bf16>(job, begin, end, first_column, last_column);
        default: return key_sums<S, fp16>(job, begin, end, first_column, last_column);
    }
}

void sums(const SlotSums& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    switch (job.source.dtype) {
        case FP32: return sums_of<float>(job, begin, end, first_column, last_column);
        case BF16: return sums_of<bf16>(job, begin, end, first_column, last_column);
        default: return sums_of<fp16>(job, begin, end, first_column, last_column);
    }
}

}  // namespace

#define NAME_OF(isa) #isa
#define QUOTED(isa) NAME_OF(isa)
#define JOINED(a, b) a##b
#define TABLE(isa) JOINED(sparse_, isa)

extern const SparseKernels TABLE(GRPO_ISA);
const SparseKernels TABLE(GRPO_ISA) = {QUOTED(GRPO_ISA), logits, sums};

}  // namespace grpo
