// The matrix products of kernels.h for processors with AVX512_BF16. Compiled for that instruction set only, and without C++ library
// headers: see kernels.cpp.
#include "packing.h"

namespace grpo {
namespace {

// The innermost loop multiplies TILE_ROWS rows of the left operand by a panel of PANEL_COLUMNS columns of the right operand.
constexpr int TILE_ROWS = 6;

// Units summed in one block, in fp32. Longer sums lose accuracy; shorter ones spend more time on adding blocks.
constexpr int64_t BLOCK_UNITS = 256;
// Distance between rows of one block of the left operand. It is not a multiple of 4 KiB, so that rows do not evict each other from
// the L1 cache.
constexpr int64_t BLOCK_STRIDE = BLOCK_UNITS + LANES;

// Where a tile is written: out = start + product. If `rounded` is given, the tile is written there, rounded to bf16.
struct Destination {
    float* out;
    int64_t stride;
    const float* start;  // null: 0
    int64_t start_stride;
    int64_t columns;
    bool stream;  // bypasses the caches; `out` must be aligned
    uint16_t* rounded = nullptr;

    Destination at_row(int64_t i) const {
        return {out + i * stride, stride, start ? start + i * start_stride : nullptr, start_stride, columns, stream,
                rounded ? rounded + i * stride : nullptr};
    }
};

// Stores one row of a tile.
inline void store_row(__m512 (&sum)[VECTORS], const Destination& to, int64_t row) {
    const float* start = to.start ? to.start + row * to.start_stride : nullptr;
    if (start) {
        UNROLL for (int c = 0; c < VECTORS; c++) sum[c] = _mm512_add_ps(sum[c], load_fp32(start + c * LANES, to.columns - c * LANES));
    }
    if (to.rounded) {
        UNROLL for (int c = 0; c < VECTORS; c += 2) {
            uint16_t* out = to.rounded + row * to.stride + c * LANES;
            const __m512i value = (__m512i)_mm512_cvtne2ps_pbh(sum[c + 1], sum[c]);
            if (to.stream && to.columns >= PANEL_COLUMNS) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), value);
            else _mm512_mask_storeu_epi16(out, first32(to.columns - c * LANES), value);
        }
        return;
    }
    UNROLL for (int c = 0; c < VECTORS; c++) {
        float* out = to.out + row * to.stride + c * LANES;
        if (to.stream && to.columns >= PANEL_COLUMNS) _mm512_stream_ps(out, sum[c]);
        else _mm512_mask_storeu_ps(out, first16(to.columns - c * LANES), sum[c]);
    }
}

template <class Op, int ROWS>
void tile(const uint32_t* left, int64_t left_stride, const uint32_t* panel, int64_t units, const Destination& to) {
    if (!to.stream && to.out) {
        // Numbers, not pointers: those behind the last column lead nowhere, which a prefetch may do.
        const uintptr_t out = reinterpret_cast<uintptr_t>(to.out);
        UNROLL for (int r = 0; r < ROWS; r++) {
            UNROLL for (int c = 0; c < VECTORS; c++) {
                __builtin_prefetch(reinterpret_cast<const void*>(out + sizeof(float) * (r * to.stride + c * LANES)), 1);
            }
        }
    }
    __m512 sum[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int c = 0; c < VECTORS; c++) sum[r][c] = _mm512_setzero_ps();
    }
    for (const uint32_t* end = panel + units * PANEL_COLUMNS; panel != end; panel += PANEL_COLUMNS, left++) {
        __m512i right[VECTORS];
        UNROLL for (int c = 0; c < VECTORS; c++) right[c] = _mm512_load_si512(panel + c * LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const __m512i unit = _mm512_set1_epi32(int(left[r * left_stride]));
            UNROLL for (int c = 0; c < VECTORS; c++) sum[r][c] = Op::add_product(sum[r][c], unit, right[c]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) store_row(sum[r], to, r);
}

template <class Op>
void rows_times_panel(const uint32_t* left, int64_t left_stride, int64_t rows, const uint32_t* panel, int64_t units,
                      const Destination& to, Ahead& ahead, int64_t lines_per_tile) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= rows; i += TILE_ROWS) {
        ahead.fetch(lines_per_tile);
        tile<Op, TILE_ROWS>(left + i * left_stride, left_stride, panel, units, to.at_row(i));
    }
    left += i * left_stride;
    const Destination rest = to.at_row(i);
    switch (rows - i) {
        case 1: return tile<Op, 1>(left, left_stride, panel, units, rest);
        case 2: return tile<Op, 2>(left, left_stride, panel, units, rest);
        case 3: return tile<Op, 3>(left, left_stride, panel, units, rest);
        case 4: return tile<Op, 4>(left, left_stride, panel, units, rest);
        case 5: return tile<Op, 5>(left, left_stride, panel, units, rest);
    }
}

// The packed left operand holds the blocks of the inner dimension one after the other: [block][row][unit].
uint32_t* left_block(uint32_t* packed, int64_t rows, int64_t block) { return packed + block * rows * BLOCK_STRIDE; }

template <class Op> struct Blocks {
    static constexpr int64_t LENGTH = BLOCK_UNITS * Op::PER_UNIT;
    static int64_t of(int64_t inner) { return inner ? ceil_div(inner, LENGTH) : 1; }  // with nothing to sum, one empty block writes 0
    static int64_t size(int64_t inner, int64_t block) { return min(LENGTH, inner - block * LENGTH); }
};

template <class Op16> int64_t hidden_pack_bytes(int64_t rows, int64_t width, bool is_bf16) {
    return (is_bf16 ? Blocks<Op16>::of(width) : Blocks<Fp32>::of(width)) * rows * BLOCK_STRIDE * 4;
}

template <class Op> void pack_hidden_of(const LogitsProduct& job, int64_t begin, int64_t end) {
    using Element = typename Op::Element;
    for (int64_t b = 0; b < Blocks<Op>::of(job.width); b++) {
        pack_rows<Op>(job.hidden.at<Element>(begin, b * Blocks<Op>::LENGTH), job.hidden.stride, end - begin,
                      Blocks<Op>::size(job.width, b), left_block(job.packed, job.rows, b) + begin * BLOCK_STRIDE, BLOCK_STRIDE);
    }
}

template <class Op> bool logits_of(const LogitsProduct& job, int64_t begin, int64_t end) {
    using Element = typename Op::Element;
    const int64_t blocks = Blocks<Op>::of(job.width), tiles = job.rows / TILE_ROWS + 1;
    const Scratch panel(BLOCK_UNITS * PANEL_COLUMNS), partial(blocks > 1 ? job.rows * PANEL_COLUMNS : 0);
    if (panel.missing || partial.missing) return false;
    float* sums = reinterpret_cast<float*>(partial.data);
    for (int64_t v = begin; v < end; v += PANEL_COLUMNS) {
        const int64_t columns = min(PANEL_COLUMNS, end - v);
        float* out = job.out.at<float>(0, v);
        const float* bias = job.bias ? job.bias + v : nullptr;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t k = b * Blocks<Op>::LENGTH, inner = Blocks<Op>::size(job.width, b);
            pack_panel_of_rows<Op>(job.weight.at<Element>(v, k), job.weight.stride, columns, inner, panel.data);
            Ahead ahead;
            if (b + 1 < blocks) {
                ahead.plan(job.weight.at<Element>(v, k + inner), job.weight.stride, columns, Blocks<Op>::size(job.width, b + 1));
            } else if (v + columns < end) {
                ahead.plan(job.weight.at<Element>(v + columns, 0), job.weight.stride, min(PANEL_COLUMNS, end - v - columns),
                           Blocks<Op>::size(job.width, 0));
            }
            Destination to{sums, PANEL_COLUMNS, sums, PANEL_COLUMNS, columns, false};
            if (b == 0) to.start = bias, to.start_stride = 0;
            if (b == blocks - 1) to.out = out, to.stride = job.out.stride;
            rows_times_panel<Op>(left_block(job.packed, job.rows, b), BLOCK_STRIDE, job.rows, panel.data, units_of<Op>(inner), to,
                                 ahead, ceil_div(ahead.lines(), tiles));
        }
    }
    return true;
}

// Columns of H packed at once. A block of the weight of this width takes 512 KiB, half of an L2 cache.
constexpr int64_t HIDDEN_GROUP = 512;
static_assert(HIDDEN_GROUP % PANEL_COLUMNS == 0, "");

// T is the type of the gradients.
template <class Op, class T>
bool d_hidden_of(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    using Element = typename Op::Element;
    const int64_t rows = end - begin, panel_stride = BLOCK_UNITS * PANEL_COLUMNS;
    const Scratch left(rows * BLOCK_STRIDE), panels(HIDDEN_GROUP / PANEL_COLUMNS * panel_stride);
    if (left.missing || panels.missing) return false;
    const int64_t blocks = Blocks<Op>::of(job.vocab), tiles = rows / TILE_ROWS + 1;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t k = b * Blocks<Op>::LENGTH, inner = Blocks<Op>::size(job.vocab, b);
        pack_rows<Op>(job.gradient.at<T>(begin, k), job.gradient.stride, rows, inner, left.data, BLOCK_STRIDE);
        for (int64_t group = first_column; group < last_column; group += HIDDEN_GROUP) {
            const int64_t width = min(HIDDEN_GROUP, last_column - group);
            pack_panels_of_columns<Op>(job.weight.at<Element>(k, group), job.weight.stride, width, inner, panels.data, panel_stride);
            // Prefetch what the next group packs: other columns of the same rows of the weight, or its next rows and their gradient.
            Ahead weight, gradient;
            const bool last = group + HIDDEN_GROUP >= last_column;
            if (!last) {
                weight.plan(job.weight.at<Element>(k, group + HIDDEN_GROUP), job.weight.stride, inner,
                            min(HIDDEN_GROUP, last_column - group - HIDDEN_GROUP));
            } else if (b + 1 < blocks) {
                const int64_t next = Blocks<Op>::size(job.vocab, b + 1);
                weight.plan(job.weight.at<Element>(k + inner, first_column), job.weight.stride, next,
                            min(HIDDEN_GROUP, last_column - first_column));
                gradient.plan(job.gradient.at<T>(begin, k + inner), job.gradient.stride, rows, next);
            }
            const int64_t all_tiles = tiles * ceil_div(width, PANEL_COLUMNS);
            const int64_t weight_lines = ceil_div(weight.lines(), all_tiles);
            const int64_t gradient_lines = ceil_div(gradient.lines(), ceil_div(width, PANEL_COLUMNS));
            for (int64_t h = 0; h < width; h += PANEL_COLUMNS) {
                float* out = job.out.at<float>(begin, group + h);
                const Destination to{
                    out, job.out.stride, b ? out : nullptr, job.out.stride, min(PANEL_COLUMNS, width - h), false};
                gradient.fetch(gradient_lines);
                rows_times_panel<Op>(left.data, BLOCK_STRIDE, rows, panels.data + h / PANEL_COLUMNS * panel_stride,
                                     units_of<Op>(inner), to, weight, weight_lines);
            }
        }
    }
    return true;
}

// [panel of H][unit of N][column]
template <class Op16> int64_t hidden_panel_bytes(int64_t rows, int64_t width, bool is_bf16) {
    const int64_t units = is_bf16 ? units_of<Op16>(rows) : units_of<Fp32>(rows);
    return ceil_div(width, PANEL_COLUMNS) * units * PANEL_COLUMNS * 4;
}

template <class Op> void pack_hidden_panels_of(const WeightGradProduct& job, int64_t begin, int64_t end) {
    const int64_t panel_stride = units_of<Op>(job.rows) * PANEL_COLUMNS, h = begin * PANEL_COLUMNS;
    pack_panels_of_columns<Op>(job.hidden.at<typename Op::Element>(0, h), job.hidden.stride,
                               min(job.width, end * PANEL_COLUMNS) - h, job.rows, job.packed + begin * panel_stride, panel_stride);
}

// Rows of the weight whose gradient is packed at once. A panel of the hidden states is loaded into L1 once for all of them.
constexpr int64_t VOCAB_GROUP = 96;

template <class Op, class T> bool d_weight_of(const WeightGradProduct& job, int64_t begin, int64_t end) {
    const int64_t blocks = Blocks<Op>::of(job.rows), panels = ceil_div(job.width, PANEL_COLUMNS);
    // A sum that is rounded to bf16 at its end needs fp32 memory for the blocks before.
    const Scratch left(blocks * VOCAB_GROUP * BLOCK_STRIDE), partial(job.out.is_bf16() ? VOCAB_GROUP * PANEL_COLUMNS : 0);
    if (left.missing || partial.missing) return false;
    float* sums = reinterpret_cast<float*>(partial.data);
    const bool aligned = reinterpret_cast<uintptr_t>(job.out.base) % 64 == 0 && job.out.stride % (job.out.is_bf16() ? 32 : 16) == 0;
    for (int64_t v = begin; v < end; v += VOCAB_GROUP) {
        const int64_t group = min(VOCAB_GROUP, end - v);
        for (int64_t b = 0; b < blocks; b++) {
            pack_rows_of_columns<Op>(job.gradient.at<T>(b * Blocks<Op>::LENGTH, v), job.gradient.stride, group,
                                     Blocks<Op>::size(job.rows, b), left_block(left.data, VOCAB_GROUP, b), BLOCK_STRIDE);
        }
        Ahead ahead;
        if (v + group < end) {
            ahead.plan(job.gradient.at<T>(0, v + group), job.gradient.stride, job.rows, min(VOCAB_GROUP, end - v - group));
        }
        const int64_t lines_per_tile = ceil_div(ahead.lines(), panels * blocks * (group / TILE_ROWS + 1));
        for (int64_t h = 0; h < job.width; h += PANEL_COLUMNS) {
            const int64_t at = v * job.out.stride + h, columns = min(PANEL_COLUMNS, job.width - h);
            float* out = reinterpret_cast<float*>(job.out.base) + (job.out.is_bf16() ? 0 : at);
            for (int64_t b = 0; b < blocks; b++) {
                const bool last = b + 1 == blocks;
                Destination to{out, job.out.stride, out, job.out.stride, columns, false};
                if (job.out.is_bf16()) to = {sums, PANEL_COLUMNS, sums, PANEL_COLUMNS, columns, false};
                if (b == 0) {
                    to.start = job.start.base ? job.start.at<float>(v, h) : nullptr;
                    to.start_stride = job.start.stride;
                }
                if (job.out.is_bf16() && last) to.rounded = reinterpret_cast<uint16_t*>(job.out.base) + at, to.stride = job.out.stride;
                to.stream = aligned && last && (job.out.is_bf16() || (blocks == 1 && !job.start.base));
                const uint32_t* panel =
                    job.packed + h / PANEL_COLUMNS * units_of<Op>(job.rows) * PANEL_COLUMNS + b * BLOCK_UNITS * PANEL_COLUMNS;
                rows_times_panel<Op>(left_block(left.data, VOCAB_GROUP, b), BLOCK_STRIDE, group, panel,
                                     units_of<Op>(Blocks<Op>::size(job.rows, b)), to, ahead, lines_per_tile);
            }
        }
    }
    _mm_sfence();
    return true;
}

// ---- by the types of the operands; Op16 multiplies those in bf16

template <class Op16> void pack_hidden(const LogitsProduct& job, int64_t begin, int64_t end) {
    job.hidden.is_bf16() ? pack_hidden_of<Op16>(job, begin, end) : pack_hidden_of<Fp32>(job, begin, end);
}

template <class Op16> bool logits(const LogitsProduct& job, int64_t begin, int64_t end) {
    return job.weight.is_bf16() ? logits_of<Op16>(job, begin, end) : logits_of<Fp32>(job, begin, end);
}

template <class Op16>
bool d_hidden(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    if (!job.weight.is_bf16()) return d_hidden_of<Fp32, float>(job, begin, end, first_column, last_column);
    return job.gradient.is_bf16() ? d_hidden_of<Op16, uint16_t>(job, begin, end, first_column, last_column)
                                : d_hidden_of<Op16, float>(job, begin, end, first_column, last_column);
}

template <class Op16> void pack_hidden_panels(const WeightGradProduct& job, int64_t begin, int64_t end) {
    job.hidden.is_bf16() ? pack_hidden_panels_of<Op16>(job, begin, end) : pack_hidden_panels_of<Fp32>(job, begin, end);
}

template <class Op16> bool d_weight(const WeightGradProduct& job, int64_t begin, int64_t end) {
    if (!job.hidden.is_bf16()) return d_weight_of<Fp32, float>(job, begin, end);
    return job.gradient.is_bf16() ? d_weight_of<Op16, uint16_t>(job, begin, end) : d_weight_of<Op16, float>(job, begin, end);
}

template <class Op16>
constexpr Products TABLE = {
    hidden_pack_bytes<Op16>,  pack_hidden<Op16>, logits<Op16>, d_hidden<Op16>, hidden_panel_bytes<Op16>, pack_hidden_panels<Op16>,
    d_weight<Op16>, TILE_ROWS, 0};

}  // namespace

extern const Products products_avx512bf16, products_fp32;
const Products products_avx512bf16 = TABLE<Bf16>, products_fp32 = TABLE<Widened>;

}  // namespace grpo
