// The matmuls of kernels.h for processors with AMX (bf16 tiles). Compiled for that instruction set
// only, and without C++ library headers: see kernels.cpp.
//
// Both operands are packed into strips of STRIP rows (left) or columns (right). Along the inner
// dimension a strip is a sequence of pairs of tiles of 16 x 16 units: one tile of the first 16 rows
// or columns and one of the others. The innermost loop multiplies a strip by a strip; its sums over
// up to BLOCK_TILES pairs of tiles stay in tile registers. Whatever lies beyond an end is packed as
// 0 in both operands: a product of 0 with what memory happens to hold could be NaN.
#include "packing.h"

namespace grpo {
namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_ROW_BYTES = LANES * sizeof(uint32_t);
constexpr int64_t TILE_UNITS = TILE_ROWS * LANES;
// Distance between tiles. At multiples of 4 KiB they would evict each other from the L1 cache.
constexpr int64_t TILE_STRIDE = TILE_UNITS + LANES;
constexpr int64_t TILE_PAIR_STRIDE = 2 * TILE_STRIDE;
// Rows or columns of a strip.
constexpr int64_t STRIP = 2 * TILE_ROWS;
// bf16 elements of a tile along the inner dimension.
constexpr int64_t TILE_INNER = 2 * LANES;
// Sums of a strip by a strip: [half of the left strip][half of the right strip][row][column].
constexpr int64_t STRIP_SUMS = STRIP * STRIP;

// Pairs of tiles that are summed in one block, in fp32. A strip of them, 34 KiB, stays in L1.
constexpr int64_t BLOCK_TILES = 16;
constexpr int64_t BLOCK_STRIDE = BLOCK_TILES * TILE_PAIR_STRIDE;

// ---- operands: how elements become bf16 tiles. Each element is in TILES_PER_ELEMENT tiles, which
// follow each other along the inner dimension. `load` reads TILE_INNER elements of a row that has n
// left.

struct Bf16Operand {
    using Element = uint16_t;
    static constexpr int TILES_PER_ELEMENT = 1;
    template <class T> static __m512i load(const T* p, int64_t n, bool) {
        return Bf16DotProduct::load(p, n);
    }
};

// An fp32 element as the sum of two bf16 numbers, high + low, which keeps 16 bits of the mantissa.
// Of the four products of two elements the largest three are summed, in the order of the tiles:
//   left   high  high  low
//   right  high  low   high
// An element that is not finite stays so, if only as NaN.
struct Fp32AsTwoBf16 {
    using Element = float;
    static constexpr int TILES_PER_ELEMENT = 3;
    static __m512i load(const float* p, int64_t n, bool low) {
        const __m512i high = Bf16DotProduct::load(p, n);
        if (!low) return high;
        const __m512 first_high = widen(_mm512_castsi512_si256(high));
        const __m512 second_high = widen(_mm512_extracti64x4_epi64(high, 1));
        const __m512 first_low = _mm512_sub_ps(load_fp32(p, n), first_high);
        const __m512 second_low = _mm512_sub_ps(load_fp32(p + LANES, n - LANES), second_high);
        return (__m512i)_mm512_cvtne2ps_pbh(second_low, first_low);
    }
    static __m512 widen(__m256i x) { return _mm512_castsi512_ps(WidenedBf16Fma::widen(x)); }
};
inline bool left_tile_is_low(int tile) { return tile == 2; }
inline bool right_tile_is_low(int tile) { return tile == 1; }

// ---- tile registers

// While one lives, the 8 tile registers of the thread have 16 rows of 64 bytes. Then they are
// released: otherwise the system would save 8 KiB at each switch of threads, and other code with
// tiles, such as oneDNN's, would find this configuration. At a thread's first tile instruction the
// system allocates those 8 KiB; if it cannot, the process dies of SIGSEGV. Tile products round to
// nearest and take denormals for 0 whatever MXCSR says, as vdpbf16ps does.
struct TileConfiguration {
    TileConfiguration() {
        alignas(CACHE_LINE) static const struct {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } configuration;
        _tile_loadconfig(&configuration);
    }
    ~TileConfiguration() { _tile_release(); }
    TileConfiguration(const TileConfiguration&) = delete;
    TileConfiguration& operator=(const TileConfiguration&) = delete;
};

// Multiplies a left strip by a right strip over num_tiles pairs of tiles. Writes STRIP_SUMS sums.
// STREAM_RIGHT: the right strip bypasses L1, so that the left one stays there. Short strips fit
// both.
template <bool STREAM_RIGHT>
void multiply(const uint32_t* left, const uint32_t* right, int64_t num_tiles, float* sums) {
    // The compiler does not know that tile loads read memory: without this it could move the stores
    // of the packing behind them.
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint32_t* end = left + num_tiles * TILE_PAIR_STRIDE;
    for (; left != end; left += TILE_PAIR_STRIDE, right += TILE_PAIR_STRIDE) {
        _tile_loadd(4, left, TILE_ROW_BYTES);
        if (STREAM_RIGHT) {
            _tile_stream_loadd(6, right, TILE_ROW_BYTES);
        } else {
            _tile_loadd(6, right, TILE_ROW_BYTES);
        }
        _tile_dpbf16ps(0, 4, 6);
        if (STREAM_RIGHT) {
            _tile_stream_loadd(7, right + TILE_STRIDE, TILE_ROW_BYTES);
        } else {
            _tile_loadd(7, right + TILE_STRIDE, TILE_ROW_BYTES);
        }
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + TILE_STRIDE, TILE_ROW_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, TILE_ROW_BYTES);
    _tile_stored(1, sums + TILE_UNITS, TILE_ROW_BYTES);
    _tile_stored(2, sums + 2 * TILE_UNITS, TILE_ROW_BYTES);
    _tile_stored(3, sums + 3 * TILE_UNITS, TILE_ROW_BYTES);
    asm volatile("" ::: "memory");  // nor does it know that tile stores write memory
}

// total [STRIP_SUMS] += sums; `starts`: total = sums.
void add_strip_sums(const float* sums, float* total, bool starts) {
    for (int64_t k = 0; k < STRIP_SUMS; k += LANES) {
        __m512 x = _mm512_load_ps(sums + k);
        if (!starts) x = _mm512_add_ps(x, _mm512_load_ps(total + k));
        _mm512_store_ps(total + k, x);
    }
}

// ---- sizes

// Pairs of tiles of a strip of `inner` elements.
template <class Operand> int64_t strip_tiles(int64_t inner) {
    return ceil_div(inner, TILE_INNER) * Operand::TILES_PER_ELEMENT;
}
// Units of a packed strip.
template <class Operand> int64_t strip_units(int64_t inner) {
    return strip_tiles<Operand>(inner) * TILE_PAIR_STRIDE;
}
int64_t num_strips(int64_t rows) { return ceil_div(rows, STRIP); }

// With nothing to sum, one empty block writes 0.
int64_t num_blocks_of(int64_t inner, int64_t block) { return inner ? ceil_div(inner, block) : 1; }

// Where row (or column) i of a strip begins in its first pair of tiles.
int64_t row_in_tile_pair(int64_t i) {
    const int64_t tile = i % STRIP / TILE_ROWS;
    return tile * TILE_STRIDE + i % TILE_ROWS * LANES;
}

// ---- packing. `inner` is the length of the inner dimension, in elements.

void store_tile(const __m512i (&x)[LANES], uint32_t* tile) {
    for (int k = 0; k < LANES; k++) _mm512_store_si512(tile + k * LANES, x[k]);
}

// Packs left strips of rows of `from` [rows, inner], in the order of memory.
template <class Operand, class T>
void pack_left_of_rows(
    const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* strips) {
    for (int64_t i = 0; i < num_strips(rows) * STRIP; i++) {
        uint32_t* to = strips + i / STRIP * strip_units<Operand>(inner) + row_in_tile_pair(i);
        for (int64_t k = 0; k < inner; k += TILE_INNER) {
            for (int tile = 0; tile < Operand::TILES_PER_ELEMENT; tile++) {
                __m512i x = _mm512_setzero_si512();
                if (i < rows) {
                    x = Operand::load(from + i * stride + k, inner - k, left_tile_is_low(tile));
                }
                _mm512_store_si512(to, x);
                to += TILE_PAIR_STRIDE;
            }
        }
    }
}

// Packs right strips whose columns are rows of `from` [columns, inner].
template <class Operand>
void pack_right_of_rows(
    const typename Operand::Element* from, int64_t stride, int64_t columns, int64_t inner,
    uint32_t* strips) {
    for (int64_t j = 0; j < num_strips(columns) * STRIP; j += LANES) {
        uint32_t* to = strips + j / STRIP * strip_units<Operand>(inner) + row_in_tile_pair(j);
        for (int64_t k = 0; k < inner; k += TILE_INNER) {
            for (int tile = 0; tile < Operand::TILES_PER_ELEMENT; tile++) {
                __m512i x[LANES];
                for (int r = 0; r < LANES; r++) {
                    x[r] = _mm512_setzero_si512();
                    if (j + r >= columns) continue;
                    const auto* row = from + (j + r) * stride + k;
                    x[r] = Operand::load(row, inner - k, right_tile_is_low(tile));
                }
                transpose(x);
                store_tile(x, to);
                to += TILE_PAIR_STRIDE;
            }
        }
    }
}

// Interleaves the rows k and k + 1 of `from` [inner, columns], so that each unit is a pair along
// the inner dimension, for 32 columns.
template <class Operand, class T>
InterleavedRows interleaved_rows(
    const T* from, int64_t stride, int64_t k, int64_t inner, int64_t columns, bool low) {
    __m512i even_row = _mm512_setzero_si512();
    __m512i odd_row = even_row;
    if (k < inner) even_row = Operand::load(from + k * stride, columns, low);
    if (k + 1 < inner) odd_row = Operand::load(from + (k + 1) * stride, columns, low);
    return interleave(even_row, odd_row);
}

// Packs left strips whose rows are columns of `from` [inner, rows].
template <class Operand, class T>
void pack_left_of_columns(
    const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to) {
    for (int64_t j = 0; j < rows; j += STRIP) {
        for (int64_t k = 0; k < inner; k += TILE_INNER) {
            for (int tile = 0; tile < Operand::TILES_PER_ELEMENT; tile++) {
                __m512i first[LANES], second[LANES];
                for (int r = 0; r < LANES; r++) {
                    const InterleavedRows pairs = interleaved_rows<Operand>(
                        from + j, stride, k + 2 * r, inner, rows - j, left_tile_is_low(tile));
                    first[r] = pairs.low;
                    second[r] = pairs.high;
                }
                transpose(first);
                transpose(second);
                store_tile(first, to);
                store_tile(second, to + TILE_STRIDE);
                to += TILE_PAIR_STRIDE;
            }
        }
    }
}

// Packs right strips of columns of `from` [inner, columns], in the order of memory.
template <class Operand>
void pack_right_of_columns(
    const typename Operand::Element* from, int64_t stride, int64_t columns, int64_t inner,
    uint32_t* strips) {
    for (int64_t k = 0; k < ceil_div(inner, TILE_INNER) * TILE_INNER; k += 2) {
        for (int tile = 0; tile < Operand::TILES_PER_ELEMENT; tile++) {
            const int64_t tile_pair = k / TILE_INNER * Operand::TILES_PER_ELEMENT + tile;
            const int64_t row_in_tile = k % TILE_INNER / 2;
            uint32_t* to = strips + tile_pair * TILE_PAIR_STRIDE + row_in_tile * LANES;
            for (int64_t j = 0; j < columns; j += STRIP) {
                const InterleavedRows pairs = interleaved_rows<Operand>(
                    from + j, stride, k, inner, columns - j, right_tile_is_low(tile));
                _mm512_store_si512(to, pairs.low);
                _mm512_store_si512(to + TILE_STRIDE, pairs.high);
                to += strip_units<Operand>(inner);
            }
        }
    }
}

// ---- logits = hidden weight^T + bias. The rows of the weight are the left operand, so that they
// are packed in the order of memory. The sums are transposed when they are stored.

int64_t packed_hidden_bytes(int64_t rows, int64_t width, bool is_bf16) {
    const int64_t units =
        is_bf16 ? strip_units<Bf16Operand>(width) : strip_units<Fp32AsTwoBf16>(width);
    return num_strips(rows) * units * int64_t(sizeof(uint32_t));
}

template <class Operand> void pack_hidden_as(const LogitsMatmul& job, int64_t begin, int64_t end) {
    pack_right_of_rows<Operand>(
        job.hidden.at<typename Operand::Element>(begin, 0), job.hidden.stride, end - begin,
        job.width, job.packed_hidden + begin / STRIP * strip_units<Operand>(job.width));
}

// Stores the sums of a strip of the weight, rows v .. v + STRIP - 1, by a strip of hidden states,
// rows i .. i + STRIP - 1, plus the bias. Ids from `end` on are not stored.
void store_logits(
    const float* sums, const LogitsMatmul& job, int64_t i, int64_t v, int64_t end,
    bool bypasses_caches) {
    const int64_t columns = end - v;
    const int64_t second_columns = columns - LANES;
    const bool streams = bypasses_caches && second_columns >= LANES;
    __m512 first_bias = _mm512_setzero_ps();
    __m512 second_bias = first_bias;
    if (job.bias) {
        first_bias = load_fp32(job.bias + v, columns);
        second_bias = load_fp32(job.bias + v + LANES, second_columns);
    }
    for (int half = 0; half < 2; half++) {
        const float* first_sums = sums + half * TILE_UNITS;
        const float* second_sums = sums + (half + 2) * TILE_UNITS;
        __m512i x[LANES], y[LANES];
        for (int k = 0; k < LANES; k++) {
            x[k] = _mm512_load_si512(first_sums + k * LANES);
            y[k] = _mm512_load_si512(second_sums + k * LANES);
        }
        transpose(x);
        transpose(y);
        for (int64_t k = 0; k < min(LANES, job.rows - i - half * LANES); k++) {
            float* out = job.out.at<float>(i + half * LANES + k, v);
            const __m512 first = _mm512_add_ps(_mm512_castsi512_ps(x[k]), first_bias);
            const __m512 second = _mm512_add_ps(_mm512_castsi512_ps(y[k]), second_bias);
            if (streams) {
                _mm512_stream_ps(out, first);
                _mm512_stream_ps(out + LANES, second);
            } else {
                _mm512_mask_storeu_ps(out, first16(columns), first);
                _mm512_mask_storeu_ps(out + LANES, first16(second_columns), second);
            }
        }
    }
}

// Computes the logits of the ids begin .. end - 1 for all rows.
template <class Operand> bool logits_as(const LogitsMatmul& job, int64_t begin, int64_t end) {
    // Strips of the weight that are packed at once. Wide hidden states do not stay in the L2 cache:
    // a block of them is loaded there once for all of these strips.
    constexpr int64_t MAX_GROUP_STRIPS = 4;
    constexpr int64_t WIDTH_PER_STRIP = 1024;
    const int64_t group_strips = min(MAX_GROUP_STRIPS, num_blocks_of(job.width, WIDTH_PER_STRIP));
    const int64_t num_tiles = strip_tiles<Operand>(job.width);
    const int64_t units = strip_units<Operand>(job.width);
    const int64_t num_blocks = num_blocks_of(num_tiles, BLOCK_TILES);
    const bool has_blocks = num_blocks > 1;
    const Scratch weight(group_strips * units);
    const Scratch partial_sums(has_blocks ? group_strips * num_strips(job.rows) * STRIP_SUMS : 0);
    if (weight.is_missing || partial_sums.is_missing) return false;
    const bool is_aligned = reinterpret_cast<uintptr_t>(job.out.base) % CACHE_LINE == 0 &&
                            job.out.stride % LANES == 0 && begin % LANES == 0;
    const TileConfiguration configuration;
    alignas(CACHE_LINE) float sums[STRIP_SUMS];
    for (int64_t first = begin; first < end; first += group_strips * STRIP) {
        const int64_t last = min(end, first + group_strips * STRIP);
        pack_left_of_rows<Operand>(
            job.weight.at<typename Operand::Element>(first, 0), job.weight.stride, last - first,
            job.width, weight.data);
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t block_tiles = min(BLOCK_TILES, num_tiles - block * BLOCK_TILES);
            float* total = partial_sums.as_floats();
            for (int64_t v = first; v < last; v += STRIP) {
                const uint32_t* weight_strip =
                    weight.data + (v - first) / STRIP * units + block * BLOCK_STRIDE;
                for (int64_t i = 0; i < job.rows; i += STRIP) {
                    const uint32_t* hidden_strip =
                        job.packed_hidden + i / STRIP * units + block * BLOCK_STRIDE;
                    multiply<true>(weight_strip, hidden_strip, block_tiles, sums);
                    if (has_blocks) add_strip_sums(sums, total, block == 0);
                    if (block == num_blocks - 1) {
                        store_logits(has_blocks ? total : sums, job, i, v, last, is_aligned);
                    }
                    if (has_blocks) total += STRIP_SUMS;
                }
            }
        }
    }
    _mm_sfence();
    return true;
}

// ---- the gradients

// Where the sums of a strip by a strip are written: out = start + sums.
struct Destination {
    const float* start;  // null: 0
    int64_t start_stride;
    char* out;
    int64_t stride;
    bool is_bf16;          // the result is rounded
    bool bypasses_caches;  // then `out` must be aligned
    int64_t rows, columns;
};

// Stores the sums of a strip by a strip, up to the rows and columns of the destination.
void store_sums(const float* sums, const Destination& to) {
    const int64_t second_columns = to.columns - LANES;
    const bool streams = to.bypasses_caches && second_columns >= LANES;
    for (int64_t r = 0; r < min(to.rows, STRIP); r++) {
        const float* row = sums + r / TILE_ROWS * 2 * TILE_UNITS + r % TILE_ROWS * LANES;
        __m512 first = _mm512_load_ps(row);
        __m512 second = _mm512_load_ps(row + TILE_UNITS);
        if (to.start) {
            const float* start = to.start + r * to.start_stride;
            first = _mm512_add_ps(first, load_fp32(start, to.columns));
            second = _mm512_add_ps(second, load_fp32(start + LANES, second_columns));
        }
        if (to.is_bf16) {
            uint16_t* out = reinterpret_cast<uint16_t*>(to.out) + r * to.stride;
            const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            if (streams) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(out), rounded);
            } else {
                _mm512_mask_storeu_epi16(out, first32(to.columns), rounded);
            }
            continue;
        }
        float* out = reinterpret_cast<float*>(to.out) + r * to.stride;
        if (streams) {
            _mm512_stream_ps(out, first);
            _mm512_stream_ps(out + LANES, second);
        } else {
            _mm512_mask_storeu_ps(out, first16(to.columns), first);
            _mm512_mask_storeu_ps(out + LANES, first16(second_columns), second);
        }
    }
}

// ---- grad_hidden = grad_logits weight

// Computes a rectangle of grad_hidden whose sums stay in the L2 cache. T is the type of
// grad_logits.
template <class Operand, class T>
bool grad_hidden_block(
    const GradHiddenMatmul& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    // Ids of a block: 8 or 9 pairs of tiles.
    constexpr int64_t BLOCK = Operand::TILES_PER_ELEMENT == 1 ? 256 : 96;
    const int64_t rows = end - begin;
    const int64_t columns = last_column - first_column;
    const int64_t row_strips = num_strips(rows);
    const int64_t column_strips = num_strips(columns);
    const int64_t num_blocks = num_blocks_of(job.vocab, BLOCK);
    const Scratch left(row_strips * strip_units<Operand>(BLOCK));
    const Scratch right(column_strips * strip_units<Operand>(BLOCK));
    const Scratch partial_sums(row_strips * column_strips * STRIP_SUMS);
    if (left.is_missing || right.is_missing || partial_sums.is_missing) return false;
    const TileConfiguration configuration;
    alignas(CACHE_LINE) float sums[STRIP_SUMS];
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first_id = block * BLOCK;
        const int64_t inner = min(BLOCK, job.vocab - first_id);
        const int64_t next_id = first_id + inner;
        const int64_t units = strip_units<Operand>(inner);
        pack_left_of_rows<Operand>(
            job.grad_logits.at<T>(begin, first_id), job.grad_logits.stride, rows, inner, left.data);
        pack_right_of_columns<Operand>(
            job.weight.at<typename Operand::Element>(first_id, first_column), job.weight.stride,
            columns, inner, right.data);
        // Prefetching the weight as well gives no speed-up.
        StridedPrefetch prefetch;
        if (block + 1 < num_blocks) {
            prefetch.set_matrix(
                job.grad_logits.at<T>(begin, next_id), job.grad_logits.stride, rows,
                min(BLOCK, job.vocab - next_id));
        }
        const int64_t lines_per_strip = ceil_div(prefetch.num_lines(), row_strips * column_strips);
        float* total = partial_sums.as_floats();
        for (int64_t i = 0; i < row_strips; i++) {
            for (int64_t j = 0; j < column_strips; j++) {
                multiply<false>(
                    left.data + i * units, right.data + j * units, strip_tiles<Operand>(inner),
                    sums);
                add_strip_sums(sums, total, block == 0);
                total += STRIP_SUMS;
                prefetch.fetch(lines_per_strip);
            }
        }
    }
    const float* total = partial_sums.as_floats();
    for (int64_t i = begin; i < end; i += STRIP) {
        for (int64_t j = first_column; j < last_column; j += STRIP) {
            char* out = reinterpret_cast<char*>(job.out.at<float>(i, j));
            store_sums(
                total, {nullptr, 0, out, job.out.stride, false, false, end - i, last_column - j});
            total += STRIP_SUMS;
        }
    }
    return true;
}

// Computes a rectangle of grad_hidden: rows [begin, end) and columns [first_column, last_column).
// The sum over the vocabulary is computed in blocks. T is the type of grad_logits.
template <class Operand, class T>
bool grad_hidden_as(
    const GradHiddenMatmul& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    // Rectangles of at most 512 x 512 sums, or of 256 x 1024.
    constexpr int64_t MAX_ROWS = 512, MAX_COLUMNS = 512;
    const int64_t block_columns = end - begin <= MAX_ROWS / 2 ? 2 * MAX_COLUMNS : MAX_COLUMNS;
    for (int64_t i = begin; i < end; i += MAX_ROWS) {
        for (int64_t j = first_column; j < last_column; j += block_columns) {
            const int64_t block_end = min(end, i + MAX_ROWS);
            const int64_t column_end = min(last_column, j + block_columns);
            if (!grad_hidden_block<Operand, T>(job, i, block_end, j, column_end)) return false;
        }
    }
    return true;
}

// ---- grad_weight = start + grad_logits^T hidden

int64_t packed_hidden_panels_bytes(int64_t rows, int64_t width, bool is_bf16) {
    const int64_t units =
        is_bf16 ? strip_units<Bf16Operand>(rows) : strip_units<Fp32AsTwoBf16>(rows);
    return num_strips(width) * units * int64_t(sizeof(uint32_t));
}

template <class Operand>
void pack_hidden_panels_as(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    const int64_t first_column = begin * PANEL_COLUMNS;
    const int64_t last_column = min(job.width, end * PANEL_COLUMNS);
    pack_right_of_columns<Operand>(
        job.hidden.at<typename Operand::Element>(0, first_column), job.hidden.stride,
        last_column - first_column, job.rows,
        job.packed_hidden + first_column / STRIP * strip_units<Operand>(job.rows));
}

// Rows of the weight whose gradient is packed at once.
constexpr int64_t VOCAB_GROUP = 192;

// Computes the rows begin .. end - 1 of grad_weight, VOCAB_GROUP ids at a time. The sum over the N
// rows of hidden states is computed in blocks. T is the type of grad_logits.
template <class Operand, class T>
bool grad_weight_as(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    const int64_t num_tiles = strip_tiles<Operand>(job.rows);
    const int64_t units = strip_units<Operand>(job.rows);
    const int64_t num_blocks = num_blocks_of(num_tiles, BLOCK_TILES);
    const bool is_rounded = job.out.is_bf16();
    const Scratch left(VOCAB_GROUP / STRIP * units);
    // The sums [STRIP, width] of one strip of V, as [strip of H][row][column].
    const Scratch partial_sums(num_blocks > 1 ? num_strips(job.width) * STRIP_SUMS : 0);
    if (left.is_missing || partial_sums.is_missing) return false;
    const int64_t elements_per_line = CACHE_LINE / size_of(job.out.dtype);
    const bool is_aligned = reinterpret_cast<uintptr_t>(job.out.base) % CACHE_LINE == 0 &&
                            job.out.stride % elements_per_line == 0;
    const TileConfiguration configuration;
    alignas(CACHE_LINE) float sums[STRIP_SUMS];
    for (int64_t group = begin; group < end; group += VOCAB_GROUP) {
        const int64_t last = min(end, group + VOCAB_GROUP);
        pack_left_of_columns<Operand>(
            job.grad_logits.at<T>(0, group), job.grad_logits.stride, last - group, job.rows,
            left.data);
        StridedPrefetch prefetch;
        if (last < end) {
            prefetch.set_matrix(
                job.grad_logits.at<T>(0, last), job.grad_logits.stride, job.rows,
                min(VOCAB_GROUP, end - last));
        }
        const int64_t num_products = num_strips(last - group) * num_strips(job.width) * num_blocks;
        const int64_t lines_per_product = ceil_div(prefetch.num_lines(), num_products);
        for (int64_t v = group; v < last; v += STRIP) {
            for (int64_t block = 0; block < num_blocks; block++) {
                const int64_t block_tiles = min(BLOCK_TILES, num_tiles - block * BLOCK_TILES);
                const uint32_t* grad_strip =
                    left.data + (v - group) / STRIP * units + block * BLOCK_STRIDE;
                for (int64_t h = 0; h < job.width; h += STRIP) {
                    const uint32_t* hidden_strip =
                        job.packed_hidden + h / STRIP * units + block * BLOCK_STRIDE;
                    float* partial = partial_sums.as_floats() + h / STRIP * STRIP_SUMS;
                    Destination to{partial,  STRIP,        reinterpret_cast<char*>(partial),
                                   STRIP,    false,        false,
                                   last - v, job.width - h};
                    if (block == 0) {
                        to.start = job.start.base ? job.start.at<float>(v, h) : nullptr;
                        to.start_stride = job.start.stride;
                    }
                    if (block + 1 == num_blocks) {
                        const int64_t offset = v * job.out.stride + h;
                        to.out = job.out.base + offset * size_of(job.out.dtype);
                        to.stride = job.out.stride;
                        to.is_bf16 = is_rounded;
                        // `start` has just been read, so that fp32 results are in the caches.
                        to.bypasses_caches = is_aligned && (is_rounded || !job.start.base);
                    }
                    multiply<false>(grad_strip, hidden_strip, block_tiles, sums);
                    store_sums(sums, to);
                    prefetch.fetch(lines_per_product);
                }
            }
        }
    }
    _mm_sfence();
    return true;
}

// ---- by the dtypes of the operands

void pack_hidden(const LogitsMatmul& job, int64_t begin, int64_t end) {
    if (job.hidden.is_bf16()) return pack_hidden_as<Bf16Operand>(job, begin, end);
    pack_hidden_as<Fp32AsTwoBf16>(job, begin, end);
}

bool logits(const LogitsMatmul& job, int64_t begin, int64_t end) {
    if (job.weight.is_bf16()) return logits_as<Bf16Operand>(job, begin, end);
    return logits_as<Fp32AsTwoBf16>(job, begin, end);
}

bool grad_hidden(
    const GradHiddenMatmul& job, int64_t begin, int64_t end, int64_t first_column,
    int64_t last_column) {
    if (!job.weight.is_bf16()) {
        return grad_hidden_as<Fp32AsTwoBf16, float>(job, begin, end, first_column, last_column);
    }
    if (!job.grad_logits.is_bf16()) {
        return grad_hidden_as<Bf16Operand, float>(job, begin, end, first_column, last_column);
    }
    return grad_hidden_as<Bf16Operand, uint16_t>(job, begin, end, first_column, last_column);
}

void pack_hidden_panels(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    if (job.hidden.is_bf16()) return pack_hidden_panels_as<Bf16Operand>(job, begin, end);
    pack_hidden_panels_as<Fp32AsTwoBf16>(job, begin, end);
}

bool grad_weight(const GradWeightMatmul& job, int64_t begin, int64_t end) {
    if (!job.hidden.is_bf16()) return grad_weight_as<Fp32AsTwoBf16, float>(job, begin, end);
    if (!job.grad_logits.is_bf16()) return grad_weight_as<Bf16Operand, float>(job, begin, end);
    return grad_weight_as<Bf16Operand, uint16_t>(job, begin, end);
}

}  // namespace

extern const Matmuls matmuls_amx;
const Matmuls matmuls_amx = {
    packed_hidden_bytes,        pack_hidden,        logits,      grad_hidden,
    packed_hidden_panels_bytes, pack_hidden_panels, grad_weight,
    /*row_unit=*/STRIP,
    /*vocab_split=*/16384};

}  // namespace grpo
