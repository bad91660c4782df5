// The products of products.h with AVX512_BF16. Compiled for that instruction set only, and without C++ library headers: see
// kernels.cpp.
#include "products.h"

#include <immintrin.h>
#include <stdlib.h>

namespace grpo {
namespace {

// The innermost loop multiplies TILE_ROWS rows of the left operand with a panel of PANEL_COLUMNS columns of the right one.
// vdpbf16ps takes two neighbours along the inner dimension at a time, a pair: 32 bits.
//   left:  rows of pairs, one row after the other
//   right: panels [pair][column], so that one pair of all columns is VECTORS registers
constexpr int TILE_ROWS = 6, VECTORS = 4, LANES = 16;
static_assert(VECTORS * LANES == PANEL_COLUMNS, "");

// Pairs that are summed in one go, in fp32. Longer sums lose accuracy; shorter ones spend more time on adding blocks up.
constexpr int64_t BLOCK_PAIRS = 256;
// Rows of one block of the left operand are this far apart: not a multiple of 4 KiB, so that they share the L1 cache.
constexpr int64_t BLOCK_STRIDE = BLOCK_PAIRS + LANES;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t pairs_of(int64_t n) { return (n + 1) / 2; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline __mmask16 first16(int64_t n) { return n >= 16 ? __mmask16(-1) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1); }
inline __mmask32 first32(int64_t n) { return n >= 32 ? __mmask32(-1) : n <= 0 ? __mmask32(0) : __mmask32((1u << n) - 1); }

// Memory of one call on one thread. `missing` says that there was none: the caller returns false, and its own caller raises.
struct Scratch {
    uint32_t* data;
    bool missing;
    explicit Scratch(int64_t elements)
        : data(static_cast<uint32_t*>(aligned_alloc(64, size_t(ceil_div(elements, LANES)) * 64))), missing(!data && elements) {}
    ~Scratch() { free(data); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};

// Memory that a later step reads in short strided pieces, which the hardware does not foresee: fetched a few lines at a time
// between the tiles of the present step.
struct Ahead {
    const char* base = nullptr;
    int64_t stride = 0, rows = 0, bytes = 0;  // bytes of each row
    int64_t row = 0, at = 0;

    template <class T> void plan(const T* first, int64_t row_stride, int64_t row_count, int64_t columns) {
        base = reinterpret_cast<const char*>(first);
        stride = row_stride * int64_t(sizeof(T)), rows = row_count, bytes = columns * int64_t(sizeof(T));
        row = at = 0;
    }
    int64_t lines() const { return rows * ceil_div(bytes, 64); }
    void fetch(int64_t count) {
        for (; count > 0 && row < rows; count--) {
            _mm_prefetch(base + row * stride + at, _MM_HINT_T1);
            at += 64;
            if (at >= bytes) at = 0, row++;
        }
    }
};

// Where a tile goes: out = start + product.
struct Destination {
    float* out;
    int64_t stride;
    const float* start;  // null: 0
    int64_t start_stride;
    int64_t columns;
    bool stream;  // past the caches; out is aligned then

    Destination at_row(int64_t i) const {
        return {out + i * stride, stride, start ? start + i * start_stride : nullptr, start_stride, columns, stream};
    }
};

#define UNROLL _Pragma("GCC unroll 16")

template <int ROWS>
void tile(const uint32_t* left, int64_t left_stride, const uint32_t* panel, int64_t pairs, const Destination& to) {
    if (!to.stream) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int c = 0; c < VECTORS; c++) __builtin_prefetch(to.out + r * to.stride + c * LANES, 1);
        }
    }
    __m512 sum[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int c = 0; c < VECTORS; c++) sum[r][c] = _mm512_setzero_ps();
    }
    for (const uint32_t* end = panel + pairs * PANEL_COLUMNS; panel != end; panel += PANEL_COLUMNS, left++) {
        __m512bh right[VECTORS];
        UNROLL for (int c = 0; c < VECTORS; c++) right[c] = (__m512bh)_mm512_load_si512(panel + c * LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(int(left[r * left_stride]));
            UNROLL for (int c = 0; c < VECTORS; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair, right[c]);
        }
    }
    if (to.columns >= PANEL_COLUMNS) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int c = 0; c < VECTORS; c++) {
                float* out = to.out + r * to.stride + c * LANES;
                __m512 value = sum[r][c];
                if (to.start) value = _mm512_add_ps(value, _mm512_loadu_ps(to.start + r * to.start_stride + c * LANES));
                if (to.stream) _mm512_stream_ps(out, value);
                else _mm512_storeu_ps(out, value);
            }
        }
    } else {
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int c = 0; c < VECTORS; c++) {
                const __mmask16 keep = first16(to.columns - c * LANES);
                __m512 value = sum[r][c];
                if (to.start) {
                    const float* start = to.start + r * to.start_stride + c * LANES;
                    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(keep, start));
                }
                _mm512_mask_storeu_ps(to.out + r * to.stride + c * LANES, keep, value);
            }
        }
    }
}

void rows_times_panel(const uint32_t* left, int64_t left_stride, int64_t rows, const uint32_t* panel, int64_t pairs,
                      const Destination& to, Ahead& ahead, int64_t lines_per_tile) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= rows; i += TILE_ROWS) {
        ahead.fetch(lines_per_tile);
        tile<TILE_ROWS>(left + i * left_stride, left_stride, panel, pairs, to.at_row(i));
    }
    left += i * left_stride;
    const Destination rest = to.at_row(i);
    switch (rows - i) {
        case 1: return tile<1>(left, left_stride, panel, pairs, rest);
        case 2: return tile<2>(left, left_stride, panel, pairs, rest);
        case 3: return tile<3>(left, left_stride, panel, pairs, rest);
        case 4: return tile<4>(left, left_stride, panel, pairs, rest);
        case 5: return tile<5>(left, left_stride, panel, pairs, rest);
    }
}

inline __m512i load_bf16(const uint16_t* p, int64_t n) {
    return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(first32(n), p);
}
// 32 values, which are rounded if they are not bf16 already.
inline __m512i load_rounded(const uint16_t* p, int64_t n) { return load_bf16(p, n); }
inline __m512i load_rounded(const float* p, int64_t n) {
    if (n >= 32) return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(first16(n - 16), p + 16), _mm512_maskz_loadu_ps(first16(n), p));
}

struct Interleaved {
    __m512i low, high;  // pairs of columns 0..15 and 16..31
};

// Pairs of one column in two rows, for 32 columns.
inline Interleaved interleave(__m512i even_row, __m512i odd_row) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    return {_mm512_permutex2var_epi16(even_row, low, odd_row), _mm512_permutex2var_epi16(even_row, high, odd_row)};
}

// 16 x 16 elements of 32 bits.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {  // x[i + k]: column k of each 128-bit lane, rows i..i + 3
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLL for (int k = 0; k < 4; k++) {
        y[k] = _mm512_shuffle_i32x4(x[k], x[k + 4], 0x88);
        y[k + 4] = _mm512_shuffle_i32x4(x[k], x[k + 4], 0xdd);
        y[k + 8] = _mm512_shuffle_i32x4(x[k + 8], x[k + 12], 0x88);
        y[k + 12] = _mm512_shuffle_i32x4(x[k + 8], x[k + 12], 0xdd);
    }
    UNROLL for (int k = 0; k < 4; k++) {
        x[k] = _mm512_shuffle_i32x4(y[k], y[k + 8], 0x88);
        x[k + 8] = _mm512_shuffle_i32x4(y[k], y[k + 8], 0xdd);
        x[k + 4] = _mm512_shuffle_i32x4(y[k + 4], y[k + 12], 0x88);
        x[k + 12] = _mm512_shuffle_i32x4(y[k + 4], y[k + 12], 0xdd);
    }
}

// A panel whose columns are rows [columns] of `from`, inner dimension contiguous.
void pack_panel_of_rows(const uint16_t* from, int64_t stride, int64_t columns, int64_t inner, uint32_t* panel) {
    for (int c = 0; c < VECTORS; c++) {
        const int64_t count = columns - c * LANES;
        for (int64_t p = 0; p < pairs_of(inner); p += LANES) {
            __m512i x[LANES];
            for (int r = 0; r < LANES; r++) {
                x[r] = r < count ? load_bf16(from + (c * LANES + r) * stride + 2 * p, inner - 2 * p) : _mm512_setzero_si512();
            }
            transpose(x);
            for (int k = 0; k < min(LANES, pairs_of(inner) - p); k++) {
                _mm512_store_si512(panel + (p + k) * PANEL_COLUMNS + c * LANES, x[k]);
            }
        }
    }
}

// Panels of the columns of `from`, whose rows [inner] are the inner dimension; panels are panel_stride apart.
void pack_panels_of_columns(const uint16_t* from, int64_t stride, int64_t columns, int64_t inner, uint32_t* panels,
                            int64_t panel_stride) {
    for (int64_t p = 0; p < pairs_of(inner); p++) {
        const uint16_t *even = from + 2 * p * stride, *odd = even + stride;
        const bool has_odd = 2 * p + 1 < inner;
        for (int64_t j = 0; j < ceil_div(columns, PANEL_COLUMNS) * PANEL_COLUMNS; j += 32) {
            const __m512i x = load_bf16(even + j, columns - j);
            const Interleaved pairs = interleave(x, has_odd ? load_bf16(odd + j, columns - j) : _mm512_setzero_si512());
            uint32_t* to = panels + j / PANEL_COLUMNS * panel_stride + p * PANEL_COLUMNS + j % PANEL_COLUMNS;
            _mm512_store_si512(to, pairs.low);
            _mm512_store_si512(to + LANES, pairs.high);
        }
    }
}

// Rows of pairs from rows [inner], rounded; the last pair of an odd row is filled with 0.
template <class T> void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to, int64_t to_stride) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t p = 0; p < pairs_of(inner); p += LANES) {
            const __m512i x = load_rounded(from + i * stride + 2 * p, inner - 2 * p);
            _mm512_mask_storeu_epi32(to + i * to_stride + p, first16(pairs_of(inner) - p), x);
        }
    }
}

// Rows of pairs from the columns of `from` [inner, rows], rounded.
template <class T>
void pack_rows_of_columns(const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to, int64_t to_stride) {
    for (int64_t p = 0; p < pairs_of(inner); p += LANES) {
        for (int64_t j = 0; j < rows; j += 32) {
            __m512i low[LANES], high[LANES];
            for (int k = 0; k < LANES; k++) {
                const int64_t even = 2 * (p + k);
                const __m512i zero = _mm512_setzero_si512();
                const __m512i x = even < inner ? load_rounded(from + even * stride + j, rows - j) : zero;
                const __m512i y = even + 1 < inner ? load_rounded(from + (even + 1) * stride + j, rows - j) : zero;
                const Interleaved pairs = interleave(x, y);
                low[k] = pairs.low, high[k] = pairs.high;
            }
            transpose(low);
            transpose(high);
            const __mmask16 keep = first16(pairs_of(inner) - p);
            for (int k = 0; k < min(LANES, rows - j); k++) _mm512_mask_storeu_epi32(to + (j + k) * to_stride + p, keep, low[k]);
            for (int k = 0; k < min(LANES, rows - j - LANES); k++) {
                _mm512_mask_storeu_epi32(to + (j + LANES + k) * to_stride + p, keep, high[k]);
            }
        }
    }
}

template <class T> const T* element(const GradientMatrix& m, int64_t i, int64_t j) {
    return reinterpret_cast<const T*>(m.data) + i * m.stride + j;
}

// Blocks of the inner dimension one after the other: [block][row][pair].
uint32_t* left_block(uint32_t* packed, int64_t rows, int64_t block) { return packed + block * rows * BLOCK_STRIDE; }
int64_t blocks_of(int64_t inner) { return inner ? ceil_div(inner, 2 * BLOCK_PAIRS) : 1; }  // a sum of nothing is 0
int64_t block_size(int64_t inner, int64_t block) { return min(2 * BLOCK_PAIRS, inner - block * 2 * BLOCK_PAIRS); }

int64_t hidden_pack_bytes(int64_t rows, int64_t width) { return blocks_of(width) * rows * BLOCK_STRIDE * 4; }

void pack_hidden(const LogitsProduct& job, int64_t begin, int64_t end) {
    for (int64_t b = 0; b < blocks_of(job.width); b++) {
        pack_rows(job.hidden.data + begin * job.hidden.stride + b * 2 * BLOCK_PAIRS, job.hidden.stride, end - begin,
                  block_size(job.width, b), left_block(job.packed, job.rows, b) + begin * BLOCK_STRIDE, BLOCK_STRIDE);
    }
}

bool logits(const LogitsProduct& job, int64_t begin, int64_t end) {
    const int64_t blocks = blocks_of(job.width), tiles = job.rows / TILE_ROWS + 1;
    const Scratch panel(BLOCK_PAIRS * PANEL_COLUMNS), partial(blocks > 1 ? job.rows * PANEL_COLUMNS : 0);
    if (panel.missing || partial.missing) return false;
    float* sums = reinterpret_cast<float*>(partial.data);
    for (int64_t v = begin; v < end; v += PANEL_COLUMNS) {
        const int64_t columns = min(PANEL_COLUMNS, end - v);
        float* out = job.out.data + v;
        const float* bias = job.bias ? job.bias + v : nullptr;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t k = b * 2 * BLOCK_PAIRS, inner = block_size(job.width, b);
            const uint16_t* weight = job.weight.data + v * job.weight.stride;
            pack_panel_of_rows(weight + k, job.weight.stride, columns, inner, panel.data);
            Ahead ahead;
            if (b + 1 < blocks) {
                ahead.plan(weight + k + inner, job.weight.stride, columns, block_size(job.width, b + 1));
            } else if (v + columns < end) {
                ahead.plan(weight + columns * job.weight.stride, job.weight.stride, min(PANEL_COLUMNS, end - v - columns),
                           block_size(job.width, 0));
            }
            Destination to{sums, PANEL_COLUMNS, sums, PANEL_COLUMNS, columns, false};
            if (b == 0) to.start = bias, to.start_stride = 0;
            if (b == blocks - 1) to.out = out, to.stride = job.out.stride;
            rows_times_panel(left_block(job.packed, job.rows, b), BLOCK_STRIDE, job.rows, panel.data, pairs_of(inner), to,
                             ahead, ceil_div(ahead.lines(), tiles));
        }
    }
    return true;
}

// Columns of H whose block of the weight is packed at once: with the block's 512 rows 512 KiB, half of an L2 cache.
constexpr int64_t HIDDEN_GROUP = 512;
static_assert(HIDDEN_GROUP % PANEL_COLUMNS == 0, "");

template <class T>
bool d_hidden_of(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    const int64_t rows = end - begin, panel_stride = BLOCK_PAIRS * PANEL_COLUMNS;
    const Scratch left(rows * BLOCK_STRIDE), panels(HIDDEN_GROUP / PANEL_COLUMNS * panel_stride);
    if (left.missing || panels.missing) return false;
    const int64_t blocks = blocks_of(job.vocab), tiles = rows / TILE_ROWS + 1;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t k = b * 2 * BLOCK_PAIRS, inner = block_size(job.vocab, b);
        pack_rows(element<T>(job.gradient, begin, k), job.gradient.stride, rows, inner, left.data, BLOCK_STRIDE);
        for (int64_t group = first_column; group < last_column; group += HIDDEN_GROUP) {
            const int64_t width = min(HIDDEN_GROUP, last_column - group);
            pack_panels_of_columns(job.weight.data + k * job.weight.stride + group, job.weight.stride, width, inner,
                                   panels.data, panel_stride);
            // What the next group packs: its columns of the same rows, or the next rows and their gradient.
            Ahead weight, gradient;
            const bool last = group + HIDDEN_GROUP >= last_column;
            if (!last) {
                weight.plan(job.weight.data + k * job.weight.stride + group + HIDDEN_GROUP, job.weight.stride, inner,
                            min(HIDDEN_GROUP, last_column - group - HIDDEN_GROUP));
            } else if (b + 1 < blocks) {
                const int64_t next = block_size(job.vocab, b + 1);
                weight.plan(job.weight.data + (k + inner) * job.weight.stride + first_column, job.weight.stride, next,
                            min(HIDDEN_GROUP, last_column - first_column));
                gradient.plan(element<T>(job.gradient, begin, k + inner), job.gradient.stride, rows, next);
            }
            const int64_t all_tiles = tiles * ceil_div(width, PANEL_COLUMNS);
            const int64_t weight_lines = ceil_div(weight.lines(), all_tiles);
            const int64_t gradient_lines = ceil_div(gradient.lines(), ceil_div(width, PANEL_COLUMNS));
            for (int64_t h = 0; h < width; h += PANEL_COLUMNS) {
                float* out = job.out.data + begin * job.out.stride + group + h;
                const Destination to{
                    out, job.out.stride, b ? out : nullptr, job.out.stride, min(PANEL_COLUMNS, width - h), false};
                gradient.fetch(gradient_lines);
                rows_times_panel(left.data, BLOCK_STRIDE, rows, panels.data + h / PANEL_COLUMNS * panel_stride,
                                 pairs_of(inner), to, weight, weight_lines);
            }
        }
    }
    return true;
}

bool d_hidden(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    return job.gradient.is_bf16 ? d_hidden_of<uint16_t>(job, begin, end, first_column, last_column)
                                : d_hidden_of<float>(job, begin, end, first_column, last_column);
}

// [panel of H][pair of N][column]
int64_t hidden_panel_bytes(int64_t rows, int64_t width) {
    return ceil_div(width, PANEL_COLUMNS) * pairs_of(rows) * PANEL_COLUMNS * 4;
}

void pack_hidden_panels(const WeightGradProduct& job, int64_t begin, int64_t end) {
    const int64_t panel_stride = pairs_of(job.rows) * PANEL_COLUMNS, h = begin * PANEL_COLUMNS;
    pack_panels_of_columns(job.hidden.data + h, job.hidden.stride, min(job.width, end * PANEL_COLUMNS) - h, job.rows,
                           job.packed + begin * panel_stride, panel_stride);
}

// Rows of the weight whose gradient is packed at once: a panel of the hidden states is fetched into L1 once for them.
constexpr int64_t VOCAB_GROUP = 96;

template <class T> bool add_d_weight_of(const WeightGradProduct& job, int64_t begin, int64_t end) {
    const int64_t blocks = blocks_of(job.rows), panels = ceil_div(job.width, PANEL_COLUMNS);
    const Scratch left(blocks * VOCAB_GROUP * BLOCK_STRIDE);
    if (left.missing) return false;
    const bool aligned = reinterpret_cast<uintptr_t>(job.sum.data) % 64 == 0 && job.sum.stride % LANES == 0;
    for (int64_t v = begin; v < end; v += VOCAB_GROUP) {
        const int64_t group = min(VOCAB_GROUP, end - v);
        for (int64_t b = 0; b < blocks; b++) {
            pack_rows_of_columns(element<T>(job.gradient, b * 2 * BLOCK_PAIRS, v), job.gradient.stride, group,
                                 block_size(job.rows, b), left_block(left.data, VOCAB_GROUP, b), BLOCK_STRIDE);
        }
        Ahead ahead;
        if (v + group < end) {
            ahead.plan(element<T>(job.gradient, 0, v + group), job.gradient.stride, job.rows,
                       min(VOCAB_GROUP, end - v - group));
        }
        const int64_t lines_per_tile = ceil_div(ahead.lines(), panels * blocks * (group / TILE_ROWS + 1));
        for (int64_t h = 0; h < job.width; h += PANEL_COLUMNS) {
            float* sum = job.sum.data + v * job.sum.stride + h;
            for (int64_t b = 0; b < blocks; b++) {
                const Destination to{sum, job.sum.stride, job.first && b == 0 ? nullptr : sum, job.sum.stride,
                                     min(PANEL_COLUMNS, job.width - h), job.first && blocks == 1 && aligned};
                const uint32_t* panel =
                    job.packed + h / PANEL_COLUMNS * pairs_of(job.rows) * PANEL_COLUMNS + b * BLOCK_PAIRS * PANEL_COLUMNS;
                rows_times_panel(left_block(left.data, VOCAB_GROUP, b), BLOCK_STRIDE, group, panel,
                                 pairs_of(block_size(job.rows, b)), to, ahead, lines_per_tile);
            }
        }
    }
    _mm_sfence();
    return true;
}

bool add_d_weight(const WeightGradProduct& job, int64_t begin, int64_t end) {
    return job.gradient.is_bf16 ? add_d_weight_of<uint16_t>(job, begin, end) : add_d_weight_of<float>(job, begin, end);
}

}  // namespace

extern const Products products_avx512bf16;
const Products products_avx512bf16 = {hidden_pack_bytes, pack_hidden,        logits,      d_hidden,
                                      hidden_panel_bytes, pack_hidden_panels, add_d_weight};

}  // namespace grpo
