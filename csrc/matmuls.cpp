// The matmuls of kernels.h for processors with AVX512_BF16, with vdpbf16ps or fp32 FMA. Compiled
// for that instruction set only, and without C++ library headers: see kernels.cpp.
//
// The left operand is packed into blocks of BLOCK_UNITS units of the inner dimension, the right one
// into panels. A tile of the output, TILE_ROWS rows by a panel, stays in registers while a block is
// summed. Tiles of further blocks are added to the sums in memory.
#include "packing.h"

namespace grpo {
namespace {

constexpr int TILE_ROWS = 6;

// Units summed in one block, in fp32. Longer sums lose accuracy; shorter ones spend more time on
// adding blocks.
constexpr int64_t BLOCK_UNITS = 256;
// Distance between rows of one block of the left operand. It is not a multiple of 4 KiB, so that
// rows do not evict each other from the L1 cache.
constexpr int64_t BLOCK_STRIDE = BLOCK_UNITS + LANES;
// Distance between panels of one block of the right operand.
constexpr int64_t BLOCK_PANEL_UNITS = BLOCK_UNITS * PANEL_COLUMNS;

// ---- tiles

// Where a tile of [rows, columns] is written: out = start + product.
struct Destination {
    float* out;
    int64_t stride;
    const float* start;  // null: 0
    int64_t start_stride;
    int64_t columns;
    bool bypasses_caches;         // then `out` must be aligned
    uint16_t* rounded = nullptr;  // written instead of `out`, rounded to bf16

    Destination at_row(int64_t i) const {
        Destination rows = *this;
        rows.out += i * stride;
        if (start) rows.start += i * start_stride;
        if (rounded) rows.rounded += i * stride;
        return rows;
    }
};

// Stores one row of a tile.
inline void store_row(__m512 (&sum)[NUM_VECTORS], const Destination& to, int64_t row) {
    const bool streams = to.bypasses_caches && to.columns >= PANEL_COLUMNS;
    if (to.start) {
        const float* start = to.start + row * to.start_stride;
        UNROLLED
        for (int c = 0; c < NUM_VECTORS; c++) {
            const __m512 x = load_fp32(start + c * LANES, to.columns - c * LANES);
            sum[c] = _mm512_add_ps(sum[c], x);
        }
    }
    if (to.rounded) {
        UNROLLED
        for (int c = 0; c < NUM_VECTORS; c += 2) {
            uint16_t* out = to.rounded + row * to.stride + c * LANES;
            const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(sum[c + 1], sum[c]);
            if (streams) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(out), rounded);
            } else {
                _mm512_mask_storeu_epi16(out, first32(to.columns - c * LANES), rounded);
            }
        }
        return;
    }
    UNROLLED
    for (int c = 0; c < NUM_VECTORS; c++) {
        float* out = to.out + row * to.stride + c * LANES;
        if (streams) {
            _mm512_stream_ps(out, sum[c]);
        } else {
            _mm512_mask_storeu_ps(out, first16(to.columns - c * LANES), sum[c]);
        }
    }
}

// Multiplies ROWS rows of the left operand by a panel of the right one, and stores the tile. The
// inner dimension has `units` units, see packing.h.
template <class Arithmetic, int ROWS>
void multiply_tile(
    const uint32_t* left, int64_t left_stride, const uint32_t* panel, int64_t units,
    const Destination& to) {
    if (!to.bypasses_caches && to.out) {
        // Integers instead of pointers: those behind the last column are no valid pointers, but may
        // be prefetched.
        const uintptr_t out = reinterpret_cast<uintptr_t>(to.out);
        UNROLLED
        for (int r = 0; r < ROWS; r++) {
            UNROLLED
            for (int c = 0; c < NUM_VECTORS; c++) {
                const uintptr_t offset = sizeof(float) * (r * to.stride + c * LANES);
                __builtin_prefetch(reinterpret_cast<const void*>(out + offset), 1);
            }
        }
    }
    __m512 sum[ROWS][NUM_VECTORS];
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
        UNROLLED
        for (int c = 0; c < NUM_VECTORS; c++) sum[r][c] = _mm512_setzero_ps();
    }
    const uint32_t* end = panel + units * PANEL_COLUMNS;
    for (; panel != end; panel += PANEL_COLUMNS, left++) {
        __m512i right[NUM_VECTORS];
        UNROLLED
        for (int c = 0; c < NUM_VECTORS; c++) {
            right[c] = _mm512_load_si512(panel + c * LANES);
        }
        UNROLLED
        for (int r = 0; r < ROWS; r++) {
            const __m512i unit = _mm512_set1_epi32(int(left[r * left_stride]));
            UNROLLED
            for (int c = 0; c < NUM_VECTORS; c++) {
                sum[r][c] = Arithmetic::add_product(sum[r][c], unit, right[c]);
            }
        }
    }
    UNROLLED
    for (int r = 0; r < ROWS; r++) store_row(sum[r], to, r);
}

// Multiplies `rows` rows of the left operand by a panel, tile by tile.
template <class Arithmetic>
void multiply_panel(
    const uint32_t* left, int64_t left_stride, int64_t rows, const uint32_t* panel, int64_t units,
    const Destination& to, StridedPrefetch& prefetch, int64_t lines_per_tile) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= rows; i += TILE_ROWS) {
        prefetch.fetch(lines_per_tile);
        const uint32_t* tile = left + i * left_stride;
        multiply_tile<Arithmetic, TILE_ROWS>(tile, left_stride, panel, units, to.at_row(i));
    }
    // The last rows, fewer than a tile has.
    left += i * left_stride;
    const Destination last = to.at_row(i);
    switch (rows - i) {
        case 1: return multiply_tile<Arithmetic, 1>(left, left_stride, panel, units, last);
        case 2: return multiply_tile<Arithmetic, 2>(left, left_stride, panel, units, last);
        case 3: return multiply_tile<Arithmetic, 3>(left, left_stride, panel, units, last);
        case 4: return multiply_tile<Arithmetic, 4>(left, left_stride, panel, units, last);
        case 5: return multiply_tile<Arithmetic, 5>(left, left_stride, panel, units, last);
    }
}

int64_t num_tiles(int64_t rows) { return rows / TILE_ROWS + 1; }

// ---- blocks of the inner dimension

// The packed left operand holds its blocks one after the other: [block][row][unit].
uint32_t* left_block(uint32_t* packed, int64_t rows, int64_t block) {
    return packed + block * rows * BLOCK_STRIDE;
}

template <class Arithmetic> struct Blocks {
    static constexpr int64_t LENGTH = BLOCK_UNITS * Arithmetic::ELEMENTS_PER_UNIT;

    // With nothing to sum, one empty block writes 0.
    static int64_t count(int64_t inner) { return inner ? ceil_div(inner, LENGTH) : 1; }
    static int64_t begin(int64_t block) { return block * LENGTH; }
    static int64_t size(int64_t inner, int64_t block) { return min(LENGTH, inner - begin(block)); }
};

// ---- logits = hidden weight^T + bias

template <class Bf16Arithmetic>
int64_t packed_hidden_bytes(int64_t rows, int64_t width, bool is_bf16) {
    const int64_t num_blocks =
        is_bf16 ? Blocks<Bf16Arithmetic>::count(width) : Blocks<Fp32Fma>::count(width);
    return num_blocks * rows * BLOCK_STRIDE * int64_t(sizeof(uint32_t));
}

// Packs the rows begin .. end - 1 of the hidden states, as left operand.
template <class Arithmetic>
void pack_hidden_as(const LogitsMatmul& job, int64_t begin, int64_t end) {
    using Element = typename Arithmetic::Element;
    for (int64_t block = 0; block < Blocks<Arithmetic>::count(job.width); block++) {
        const int64_t first = Blocks<Arithmetic>::begin(block);
        uint32_t* packed = left_block(job.packed_hidden, job.rows, block) + begin * BLOCK_STRIDE;
        pack_rows<Arithmetic>(
            job.hidden.at<Element>(begin, first), job.hidden.stride, end - begin,
            Blocks<Arithmetic>::size(job.width, block), packed, BLOCK_STRIDE);
    }
}

// Computes the logits of the ids begin .. end - 1 for all rows, a panel of ids at a time.
template <class Arithmetic> bool logits_as(const LogitsMatmul& job, int64_t begin, int64_t end) {
    using Element = typename Arithmetic::Element;
    const int64_t num_blocks = Blocks<Arithmetic>::count(job.width);
    const Scratch panel(BLOCK_PANEL_UNITS);
    const Scratch partial_sums(num_blocks > 1 ? job.rows * PANEL_COLUMNS : 0);
    if (panel.is_missing || partial_sums.is_missing) return false;
    float* sums = partial_sums.as_floats();
    for (int64_t v = begin; v < end; v += PANEL_COLUMNS) {
        const int64_t columns = min(PANEL_COLUMNS, end - v);
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t first = Blocks<Arithmetic>::begin(block);
            const int64_t inner = Blocks<Arithmetic>::size(job.width, block);
            const bool is_last_block = block + 1 == num_blocks;
            pack_panel_of_rows<Arithmetic>(
                job.weight.at<Element>(v, first), job.weight.stride, columns, inner, panel.data);
            StridedPrefetch prefetch;
            if (!is_last_block) {
                prefetch.set_matrix(
                    job.weight.at<Element>(v, first + inner), job.weight.stride, columns,
                    Blocks<Arithmetic>::size(job.width, block + 1));
            } else if (v + columns < end) {
                prefetch.set_matrix(
                    job.weight.at<Element>(v + columns, 0), job.weight.stride,
                    min(PANEL_COLUMNS, end - v - columns), Blocks<Arithmetic>::size(job.width, 0));
            }
            Destination to{sums, PANEL_COLUMNS, sums, PANEL_COLUMNS, columns, false};
            if (block == 0) {
                to.start = job.bias ? job.bias + v : nullptr;
                to.start_stride = 0;
            }
            if (is_last_block) {
                to.out = job.out.at<float>(0, v);
                to.stride = job.out.stride;
            }
            multiply_panel<Arithmetic>(
                left_block(job.packed_hidden, job.rows, block), BLOCK_STRIDE, job.rows, panel.data,
                num_units<Arithmetic>(inner), to, prefetch,
                ceil_div(prefetch.num_lines(), num_tiles(job.rows)));
        }
    }
    return true;
}

// ---- grad_hidden = grad_logits weight

// Columns of H that are packed at once. A block of the weight of this width takes 512 KiB, half of
// an L2 cache.
constexpr int64_t HIDDEN_GROUP = 512;
static_assert(HIDDEN_GROUP % PANEL_COLUMNS == 0, "");

// Computes a rectangle of grad_hidden: rows [begin, end) and columns [first_column, last_column).
// The sum over the vocabulary is computed in blocks. T is the type of grad_logits.
template <class Arithmetic, class T>
bool grad_hidden_as(
    const GradHiddenMatmul& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    using Element = typename Arithmetic::Element;
    const int64_t rows = end - begin;
    const Scratch left(rows * BLOCK_STRIDE);
    const Scratch panels(HIDDEN_GROUP / PANEL_COLUMNS * BLOCK_PANEL_UNITS);
    if (left.is_missing || panels.is_missing) return false;
    const int64_t num_blocks = Blocks<Arithmetic>::count(job.vocab);
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first = Blocks<Arithmetic>::begin(block);
        const int64_t inner = Blocks<Arithmetic>::size(job.vocab, block);
        pack_rows<Arithmetic>(
            job.grad_logits.at<T>(begin, first), job.grad_logits.stride, rows, inner, left.data,
            BLOCK_STRIDE);
        for (int64_t group = first_column; group < last_column; group += HIDDEN_GROUP) {
            const int64_t width = min(HIDDEN_GROUP, last_column - group);
            const int64_t num_panels = ceil_div(width, PANEL_COLUMNS);
            pack_panels_of_columns<Arithmetic>(
                job.weight.at<Element>(first, group), job.weight.stride, width, inner, panels.data,
                BLOCK_PANEL_UNITS);
            // Prefetch what the next group packs: other columns of the same rows of the weight, or
            // its next rows and their gradient.
            StridedPrefetch weight, grad_logits;
            const bool is_last_group = group + HIDDEN_GROUP >= last_column;
            if (!is_last_group) {
                weight.set_matrix(
                    job.weight.at<Element>(first, group + HIDDEN_GROUP), job.weight.stride, inner,
                    min(HIDDEN_GROUP, last_column - group - HIDDEN_GROUP));
            } else if (block + 1 < num_blocks) {
                const int64_t next_inner = Blocks<Arithmetic>::size(job.vocab, block + 1);
                weight.set_matrix(
                    job.weight.at<Element>(first + inner, first_column), job.weight.stride,
                    next_inner, min(HIDDEN_GROUP, last_column - first_column));
                grad_logits.set_matrix(
                    job.grad_logits.at<T>(begin, first + inner), job.grad_logits.stride, rows,
                    next_inner);
            }
            const int64_t weight_lines_per_tile =
                ceil_div(weight.num_lines(), num_tiles(rows) * num_panels);
            const int64_t grad_lines_per_panel = ceil_div(grad_logits.num_lines(), num_panels);
            for (int64_t h = 0; h < width; h += PANEL_COLUMNS) {
                float* out = job.out.at<float>(begin, group + h);
                const float* start = block ? out : nullptr;
                const int64_t columns = min(PANEL_COLUMNS, width - h);
                const Destination to{out, job.out.stride, start, job.out.stride, columns, false};
                grad_logits.fetch(grad_lines_per_panel);
                multiply_panel<Arithmetic>(
                    left.data, BLOCK_STRIDE, rows,
                    panels.data + h / PANEL_COLUMNS * BLOCK_PANEL_UNITS,
                    num_units<Arithmetic>(inner), to, weight, weight_lines_per_tile);
            }
        }
    }
    return true;
}

// ---- grad_weight = start + grad_logits^T hidden

// The packed hidden states are [panel of H][unit of N][column].
template <class Bf16Arithmetic>
int64_t packed_hidden_panels_bytes(int64_t rows, int64_t width, bool is_bf16) {
    const int64_t units = is_bf16 ? num_units<Bf16Arithmetic>(rows) : num_units<Fp32Fma>(rows);
    const int64_t num_panels = ceil_div(width, PANEL_COLUMNS);
    return num_panels * units * PANEL_COLUMNS * int64_t(sizeof(uint32_t));
}

// Packs the panels begin .. end - 1 of the hidden states, as right operand.
template <class Arithmetic>
void pack_hidden_panels_as(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    const int64_t panel_units = num_units<Arithmetic>(job.rows) * PANEL_COLUMNS;
    const int64_t first_column = begin * PANEL_COLUMNS;
    const int64_t last_column = min(job.width, end * PANEL_COLUMNS);
    pack_panels_of_columns<Arithmetic>(
        job.hidden.at<typename Arithmetic::Element>(0, first_column), job.hidden.stride,
        last_column - first_column, job.rows, job.packed_hidden + begin * panel_units, panel_units);
}

// Rows of the weight whose gradient is packed at once. A panel of the hidden states is loaded into
// L1 once for all of them.
constexpr int64_t VOCAB_GROUP = 96;

// Computes the rows begin .. end - 1 of grad_weight, VOCAB_GROUP ids at a time. The sum over the N
// rows of hidden states is computed in blocks. T is the type of grad_logits.
template <class Arithmetic, class T>
bool grad_weight_as(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    const int64_t num_blocks = Blocks<Arithmetic>::count(job.rows);
    const int64_t num_panels = ceil_div(job.width, PANEL_COLUMNS);
    const int64_t panel_units = num_units<Arithmetic>(job.rows) * PANEL_COLUMNS;
    const bool is_rounded = job.out.is_bf16();
    // A sum that is rounded to bf16 at its end needs fp32 memory for the blocks before.
    const Scratch left(num_blocks * VOCAB_GROUP * BLOCK_STRIDE);
    const Scratch partial_sums(is_rounded ? VOCAB_GROUP * PANEL_COLUMNS : 0);
    if (left.is_missing || partial_sums.is_missing) return false;
    float* sums = partial_sums.as_floats();
    const int64_t elements_per_line = CACHE_LINE / size_of(job.out.dtype);
    const bool is_aligned = reinterpret_cast<uintptr_t>(job.out.base) % CACHE_LINE == 0 &&
                            job.out.stride % elements_per_line == 0;
    for (int64_t v = begin; v < end; v += VOCAB_GROUP) {
        const int64_t group = min(VOCAB_GROUP, end - v);
        for (int64_t block = 0; block < num_blocks; block++) {
            pack_rows_of_columns<Arithmetic>(
                job.grad_logits.at<T>(Blocks<Arithmetic>::begin(block), v), job.grad_logits.stride,
                group, Blocks<Arithmetic>::size(job.rows, block),
                left_block(left.data, VOCAB_GROUP, block), BLOCK_STRIDE);
        }
        StridedPrefetch prefetch;
        if (v + group < end) {
            prefetch.set_matrix(
                job.grad_logits.at<T>(0, v + group), job.grad_logits.stride, job.rows,
                min(VOCAB_GROUP, end - v - group));
        }
        const int64_t lines_per_tile =
            ceil_div(prefetch.num_lines(), num_panels * num_blocks * num_tiles(group));
        for (int64_t h = 0; h < job.width; h += PANEL_COLUMNS) {
            const int64_t columns = min(PANEL_COLUMNS, job.width - h);
            for (int64_t block = 0; block < num_blocks; block++) {
                const bool is_last_block = block + 1 == num_blocks;
                Destination to{sums, PANEL_COLUMNS, sums, PANEL_COLUMNS, columns, false};
                if (!is_rounded) {
                    to.out = job.out.at<float>(v, h);
                    to.stride = job.out.stride;
                    to.start = to.out;
                    to.start_stride = job.out.stride;
                }
                if (block == 0) {
                    to.start = job.start.base ? job.start.at<float>(v, h) : nullptr;
                    to.start_stride = job.start.stride;
                }
                if (is_rounded && is_last_block) {
                    to.rounded = job.out.at<uint16_t>(v, h);
                    to.stride = job.out.stride;
                }
                // An fp32 result that is read again should stay in the caches.
                const bool is_read_again = !is_rounded && (num_blocks > 1 || job.start.base);
                to.bypasses_caches = is_aligned && is_last_block && !is_read_again;
                const uint32_t* panel =
                    job.packed_hidden + h / PANEL_COLUMNS * panel_units + block * BLOCK_PANEL_UNITS;
                multiply_panel<Arithmetic>(
                    left_block(left.data, VOCAB_GROUP, block), BLOCK_STRIDE, group, panel,
                    num_units<Arithmetic>(Blocks<Arithmetic>::size(job.rows, block)), to, prefetch,
                    lines_per_tile);
            }
        }
    }
    _mm_sfence();
    return true;
}

// ---- by the dtypes of the operands

template <class Bf16Arithmetic>
void pack_hidden(const LogitsMatmul& job, int64_t begin, int64_t end) {
    if (job.hidden.is_bf16()) return pack_hidden_as<Bf16Arithmetic>(job, begin, end);
    pack_hidden_as<Fp32Fma>(job, begin, end);
}

template <class Bf16Arithmetic> bool logits(const LogitsMatmul& job, int64_t begin, int64_t end) {
    if (job.weight.is_bf16()) return logits_as<Bf16Arithmetic>(job, begin, end);
    return logits_as<Fp32Fma>(job, begin, end);
}

template <class Bf16Arithmetic>
bool grad_hidden(
    const GradHiddenMatmul& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    if (!job.weight.is_bf16()) {
        return grad_hidden_as<Fp32Fma, float>(job, begin, end, first_column, last_column);
    }
    if (!job.grad_logits.is_bf16()) {
        return grad_hidden_as<Bf16Arithmetic, float>(job, begin, end, first_column, last_column);
    }
    return grad_hidden_as<Bf16Arithmetic, uint16_t>(job, begin, end, first_column, last_column);
}

template <class Bf16Arithmetic>
void pack_hidden_panels(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    if (job.hidden.is_bf16()) return pack_hidden_panels_as<Bf16Arithmetic>(job, begin, end);
    pack_hidden_panels_as<Fp32Fma>(job, begin, end);
}

template <class Bf16Arithmetic>
bool grad_weight(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    if (!job.hidden.is_bf16()) return grad_weight_as<Fp32Fma, float>(job, begin, end);
    if (!job.grad_logits.is_bf16()) return grad_weight_as<Bf16Arithmetic, float>(job, begin, end);
    return grad_weight_as<Bf16Arithmetic, uint16_t>(job, begin, end);
}

template <class Bf16Arithmetic>
constexpr Matmuls MATMULS = {
    packed_hidden_bytes<Bf16Arithmetic>,
    pack_hidden<Bf16Arithmetic>,
    logits<Bf16Arithmetic>,
    grad_hidden<Bf16Arithmetic>,
    packed_hidden_panels_bytes<Bf16Arithmetic>,
    pack_hidden_panels<Bf16Arithmetic>,
    grad_weight<Bf16Arithmetic>,
    /*row_unit=*/TILE_ROWS,
    /*vocab_split=*/0};

}  // namespace

extern const Matmuls matmuls_avx512bf16, matmuls_fp32;
const Matmuls matmuls_avx512bf16 = MATMULS<Bf16DotProduct>;
const Matmuls matmuls_fp32 = MATMULS<WidenedBf16Fma>;

}  // namespace grpo
