// The matrix products of kernels.h for processors with AMX (bf16 tiles). Compiled for that instruction set only, and without C++ library
// headers: see kernels.cpp.
//
// Both operands are packed into strips of PAIR rows or columns: for each tile of the inner dimension two tiles of 16 x 16 units, one
// of the first 16 rows or columns and one of the others. A step multiplies a strip by a strip; a sum over BLOCK_TILES tiles stays in
// the tile registers. Whatever is beyond an end is 0 in both operands: zeros beside what memory happens to hold could be NaN.
#include "packing.h"

namespace grpo {
namespace {

constexpr int64_t TILE = 16 * 16;        // units of a tile
constexpr int64_t APART = TILE + LANES;  // from one tile to the next: at multiples of 4 KiB they would evict each other from L1
constexpr int64_t PAIR = 32;             // rows or columns of a strip; elements of a tile along the inner dimension
constexpr int64_t STEP = 4 * TILE;       // sums of a step: [half of the left strip][half of the right strip][row][column]

// Tiles along the inner dimension that are summed in one block, in fp32. A strip of them, 34 KiB, stays in L1.
constexpr int64_t BLOCK_TILES = 16;

// What tiles hold of the elements of an operand: PARTS tiles of each. `load` reads 32 elements of a row that has n left.
struct Whole {
    using Element = uint16_t;
    static constexpr int PARTS = 1;
    template <class T> static __m512i load(const T* p, int64_t n, bool) { return Bf16::load(p, n); }
};

// An fp32 element as the sum of two bf16 numbers, high + low, which has 16 bits. Of their four products the largest three are summed,
// in this order of tiles. What is not finite stays so, if only as NaN.
struct Split {
    using Element = float;
    static constexpr int PARTS = 3;  // left: high, high, low; right: high, low, high
    static __m512i load(const float* p, int64_t n, bool low) {
        const __m512i high = Bf16::load(p, n);
        if (!low) return high;
        const __m512 x = _mm512_sub_ps(load_fp32(p, n), widened(_mm512_castsi512_si256(high)));
        const __m512 y = _mm512_sub_ps(load_fp32(p + LANES, n - LANES), widened(_mm512_extracti64x4_epi64(high, 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(y, x);
    }
    static __m512 widened(__m256i x) { return _mm512_castsi512_ps(Widened::widen(x)); }
};
inline bool low_left(int part) { return part == 2; }
inline bool low_right(int part) { return part == 1; }

// As long as one lives, the tile registers of the thread are 16 rows of 64 bytes. Then they are released: the system would save 8 KiB
// at each switch of threads, and other code with tiles, such as oneDNN's, would find this configuration. At a thread's first tile
// instruction the system allocates those 8 KiB; if it cannot, the process dies of SIGSEGV. Tiles round to nearest and take denormals
// for 0 whatever MXCSR says, as vdpbf16ps does.
struct Tiles {
    Tiles() {
        alignas(64) static const struct {
            uint8_t palette = 1, start = 0, zero[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The STEP sums of two strips over `count` tiles. ONCE: the right strip bypasses L1, so that the left one stays there. Of short strips
// both fit.
template <bool ONCE> void multiply(const uint32_t* left, const uint32_t* right, int64_t count, float* sums) {
    // The compiler does not know that tile loads read memory: without this it could move the stores of the packing behind them.
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const uint32_t* end = left + count * 2 * APART; left != end; left += 2 * APART, right += 2 * APART) {
        _tile_loadd(4, left, 64);
        if (ONCE) _tile_stream_loadd(6, right, 64);
        else _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (ONCE) _tile_stream_loadd(7, right + APART, 64);
        else _tile_loadd(7, right + APART, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + APART, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    _tile_stored(2, sums + 2 * TILE, 64);
    _tile_stored(3, sums + 3 * TILE, 64);
    asm volatile("" ::: "memory");  // nor that tile stores write it
}

// Adds the sums of a step to `partial`, or starts it.
void add_step(const float* sums, float* partial, bool first) {
    for (int64_t k = 0; k < STEP; k += LANES) {
        const __m512 x = _mm512_load_ps(sums + k);
        _mm512_store_ps(partial + k, first ? x : _mm512_add_ps(x, _mm512_load_ps(partial + k)));
    }
}

float* as_floats(const Scratch& scratch) { return reinterpret_cast<float*>(scratch.data); }

// ---- packing

template <class Op> int64_t tiles_of(int64_t inner) { return ceil_div(inner, PAIR) * Op::PARTS; }
template <class Op> int64_t strip(int64_t inner) { return tiles_of<Op>(inner) * 2 * APART; }  // units
int64_t strips(int64_t rows) { return ceil_div(rows, PAIR); }
int64_t blocks_of(int64_t inner, int64_t block) { return inner ? ceil_div(inner, block) : 1; }  // with nothing to sum, one writes 0

void store_tile(const __m512i (&x)[LANES], uint32_t* tile) {
    for (int k = 0; k < LANES; k++) _mm512_store_si512(tile + k * LANES, x[k]);
}

// Left strips of rows of `from`; the inner dimension is contiguous there.
template <class Op, class T> void pack_left(const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to) {
    for (int64_t i = 0; i < strips(rows) * PAIR; i++) {  // row by row: memory is read as it lies
        uint32_t* row = to + i / PAIR * strip<Op>(inner) + i % PAIR / LANES * APART + i % LANES * LANES;
        for (int64_t t = 0; t < inner; t += PAIR) {
            for (int part = 0; part < Op::PARTS; part++, row += 2 * APART) {
                const __m512i x = i < rows ? Op::load(from + i * stride + t, inner - t, low_left(part)) : _mm512_setzero_si512();
                _mm512_store_si512(row, x);
            }
        }
    }
}

// Right strips whose columns are rows of `from`; the inner dimension is contiguous there.
template <class Op>
void pack_right_of_rows(const typename Op::Element* from, int64_t stride, int64_t columns, int64_t inner, uint32_t* to) {
    for (int64_t j = 0; j < strips(columns) * PAIR; j += LANES) {
        uint32_t* tile = to + j / PAIR * strip<Op>(inner) + j % PAIR / LANES * APART;
        for (int64_t t = 0; t < inner; t += PAIR) {
            for (int part = 0; part < Op::PARTS; part++, tile += 2 * APART) {
                __m512i x[LANES];
                for (int r = 0; r < LANES; r++) {
                    const auto* row = from + (j + r) * stride + t;
                    x[r] = j + r < columns ? Op::load(row, inner - t, low_right(part)) : _mm512_setzero_si512();
                }
                transpose(x);
                store_tile(x, tile);
            }
        }
    }
}

// Two rows of `from`, the inner dimension, as pairs of 32 columns.
template <class Op, class T>
Interleaved pairs_of_rows(const T* from, int64_t stride, int64_t row, int64_t inner, int64_t columns, bool low) {
    const __m512i zero = _mm512_setzero_si512();
    return interleave(row < inner ? Op::load(from + row * stride, columns, low) : zero,
                      row + 1 < inner ? Op::load(from + (row + 1) * stride, columns, low) : zero);
}

// Left strips whose rows are columns of `from`; the rows of `from` are the inner dimension.
template <class Op, class T> void pack_left_of_columns(const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to) {
    for (int64_t j = 0; j < rows; j += PAIR) {
        for (int64_t t = 0; t < inner; t += PAIR) {
            for (int part = 0; part < Op::PARTS; part++, to += 2 * APART) {
                __m512i low[LANES], high[LANES];
                for (int k = 0; k < LANES; k++) {
                    const Interleaved pairs = pairs_of_rows<Op>(from + j, stride, t + 2 * k, inner, rows - j, low_left(part));
                    low[k] = pairs.low, high[k] = pairs.high;
                }
                transpose(low);
                transpose(high);
                store_tile(low, to);
                store_tile(high, to + APART);
            }
        }
    }
}

// Right strips of columns of `from`; the rows of `from` are the inner dimension.
template <class Op> void pack_right(const typename Op::Element* from, int64_t stride, int64_t columns, int64_t inner, uint32_t* to) {
    for (int64_t k = 0; k < ceil_div(inner, PAIR) * PAIR; k += 2) {  // row by row: memory is read as it lies
        for (int part = 0; part < Op::PARTS; part++) {
            uint32_t* row = to + (k / PAIR * Op::PARTS + part) * 2 * APART + k % PAIR / 2 * LANES;
            for (int64_t j = 0; j < columns; j += PAIR, row += strip<Op>(inner)) {
                const Interleaved pairs = pairs_of_rows<Op>(from + j, stride, k, inner, columns - j, low_right(part));
                _mm512_store_si512(row, pairs.low);
                _mm512_store_si512(row + APART, pairs.high);
            }
        }
    }
}

// ---- logits. The rows of the weight are the left operand, so that they are packed as they lie; results are transposed.

int64_t hidden_pack_bytes(int64_t rows, int64_t width, bool is_bf16) {
    return strips(rows) * (is_bf16 ? strip<Whole>(width) : strip<Split>(width)) * 4;
}

template <class Op> void pack_hidden_of(const LogitsProduct& job, int64_t begin, int64_t end) {
    pack_right_of_rows<Op>(job.hidden.at<typename Op::Element>(begin, 0), job.hidden.stride, end - begin, job.width,
                           job.packed + begin / PAIR * strip<Op>(job.width));
}

// Stores the sums of a step: PAIR columns of V from v on, of PAIR rows of N from i on.
void store_logits(const float* sums, const LogitsProduct& job, int64_t i, int64_t v, int64_t end, bool stream) {
    const int64_t columns = end - v, rest = columns - LANES;
    __m512 low = _mm512_setzero_ps(), high = low;
    if (job.bias) low = load_fp32(job.bias + v, columns), high = load_fp32(job.bias + v + LANES, rest);
    for (int half = 0; half < 2; half++) {
        __m512i x[LANES], y[LANES];
        for (int k = 0; k < LANES; k++) {
            x[k] = _mm512_load_si512(sums + half * TILE + k * LANES);
            y[k] = _mm512_load_si512(sums + (half + 2) * TILE + k * LANES);
        }
        transpose(x);
        transpose(y);
        for (int64_t k = 0; k < min(LANES, job.rows - i - half * LANES); k++) {
            float* out = job.out.at<float>(i + half * LANES + k, v);
            const __m512 a = _mm512_add_ps(_mm512_castsi512_ps(x[k]), low), b = _mm512_add_ps(_mm512_castsi512_ps(y[k]), high);
            if (stream && rest >= LANES) {
                _mm512_stream_ps(out, a), _mm512_stream_ps(out + LANES, b);
            } else {
                _mm512_mask_storeu_ps(out, first16(columns), a), _mm512_mask_storeu_ps(out + LANES, first16(rest), b);
            }
        }
    }
}

template <class Op> bool logits_of(const LogitsProduct& job, int64_t begin, int64_t end) {
    const int64_t count = tiles_of<Op>(job.width), step = strip<Op>(job.width), blocks = blocks_of(count, BLOCK_TILES);
    // Rows of the weight that are packed at once. Wide hidden states do not stay in the L2 cache: a block of them is loaded there once
    // for all of these rows.
    const int64_t group = min(4, blocks_of(job.width, 1024)) * PAIR;
    const Scratch weight(group / PAIR * step), partial(blocks > 1 ? group / PAIR * strips(job.rows) * STEP : 0);
    if (weight.missing || partial.missing) return false;
    const bool aligned = reinterpret_cast<uintptr_t>(job.out.base) % 64 == 0 && job.out.stride % LANES == 0 && begin % LANES == 0;
    const Tiles tiles;
    alignas(64) float sums[STEP];
    for (int64_t first = begin; first < end; first += group) {
        const int64_t last = min(end, first + group);
        pack_left<Op>(job.weight.at<typename Op::Element>(first, 0), job.weight.stride, last - first, job.width, weight.data);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = b * BLOCK_TILES * 2 * APART;
            float* sum = as_floats(partial);
            for (int64_t v = first; v < last; v += PAIR) {
                for (int64_t i = 0; i < job.rows; i += PAIR, sum += blocks > 1 ? STEP : 0) {
                    multiply<true>(weight.data + (v - first) / PAIR * step + at, job.packed + i / PAIR * step + at,
                                   min(BLOCK_TILES, count - b * BLOCK_TILES), sums);
                    if (blocks > 1) add_step(sums, sum, b == 0);
                    if (b == blocks - 1) store_logits(blocks > 1 ? sum : sums, job, i, v, last, aligned);
                }
            }
        }
    }
    _mm_sfence();
    return true;
}

// ---- the gradients

// Where the sums of a step go: out = start + sums, PAIR columns of as many rows as there are.
struct Destination {
    const float* start;  // null: 0
    int64_t start_stride;
    char* out;
    int64_t stride;
    bool is_bf16, stream;  // rounded; past the caches, where `out` is aligned
    int64_t rows, columns;
};

void store(const float* sums, const Destination& to) {
    const int64_t rest = to.columns - LANES;
    for (int64_t r = 0; r < min(to.rows, PAIR); r++) {
        const float* sum = sums + r / LANES * 2 * TILE + r % LANES * LANES;
        __m512 x = _mm512_load_ps(sum), y = _mm512_load_ps(sum + TILE);
        if (to.start) {
            const float* start = to.start + r * to.start_stride;
            x = _mm512_add_ps(x, load_fp32(start, to.columns)), y = _mm512_add_ps(y, load_fp32(start + LANES, rest));
        }
        if (to.is_bf16) {
            uint16_t* out = reinterpret_cast<uint16_t*>(to.out) + r * to.stride;
            const __m512i value = (__m512i)_mm512_cvtne2ps_pbh(y, x);
            if (to.stream && rest >= LANES) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), value);
            else _mm512_mask_storeu_epi16(out, first32(to.columns), value);
            continue;
        }
        float* out = reinterpret_cast<float*>(to.out) + r * to.stride;
        if (to.stream && rest >= LANES) {
            _mm512_stream_ps(out, x), _mm512_stream_ps(out + LANES, y);
        } else {
            _mm512_mask_storeu_ps(out, first16(to.columns), x), _mm512_mask_storeu_ps(out + LANES, first16(rest), y);
        }
    }
}

// A rectangle whose sums stay in the L2 cache.
template <class Op, class T>
bool rectangle_of_d_hidden(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    constexpr int64_t BLOCK = Op::PARTS == 1 ? 256 : 96;  // ids of a block: 8 or 9 tiles
    const int64_t rows = end - begin, columns = last_column - first_column, blocks = blocks_of(job.vocab, BLOCK);
    const Scratch left(strips(rows) * strip<Op>(BLOCK)), right(strips(columns) * strip<Op>(BLOCK));
    const Scratch partial(strips(rows) * strips(columns) * STEP);
    if (left.missing || right.missing || partial.missing) return false;
    const Tiles tiles;
    alignas(64) float sums[STEP];
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t k = b * BLOCK, inner = min(BLOCK, job.vocab - k), step = strip<Op>(inner);
        pack_left<Op>(job.gradient.at<T>(begin, k), job.gradient.stride, rows, inner, left.data);
        pack_right<Op>(job.weight.at<typename Op::Element>(k, first_column), job.weight.stride, columns, inner, right.data);
        Ahead ahead;  // of the weight too it gains nothing
        if (b + 1 < blocks) {
            ahead.plan(job.gradient.at<T>(begin, k + inner), job.gradient.stride, rows, min(BLOCK, job.vocab - k - inner));
        }
        const int64_t lines = ceil_div(ahead.lines(), strips(rows) * strips(columns));
        float* sum = as_floats(partial);
        for (int64_t i = 0; i < strips(rows); i++) {
            for (int64_t j = 0; j < strips(columns); j++, sum += STEP) {
                multiply<false>(left.data + i * step, right.data + j * step, tiles_of<Op>(inner), sums);
                add_step(sums, sum, b == 0);
                ahead.fetch(lines);
            }
        }
    }
    const float* sum = as_floats(partial);
    for (int64_t i = begin; i < end; i += PAIR) {
        for (int64_t j = first_column; j < last_column; j += PAIR, sum += STEP) {
            char* out = job.out.base + 4 * (i * job.out.stride + j);
            store(sum, {nullptr, 0, out, job.out.stride, false, false, end - i, last_column - j});
        }
    }
    return true;
}

template <class Op, class T>
bool d_hidden_of(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    const int64_t rows = 512, columns = end - begin <= 256 ? 1024 : 512;
    for (int64_t i = begin; i < end; i += rows) {
        for (int64_t j = first_column; j < last_column; j += columns) {
            if (!rectangle_of_d_hidden<Op, T>(job, i, min(end, i + rows), j, min(last_column, j + columns))) return false;
        }
    }
    return true;
}

int64_t hidden_panel_bytes(int64_t rows, int64_t width, bool is_bf16) {
    return strips(width) * (is_bf16 ? strip<Whole>(rows) : strip<Split>(rows)) * 4;
}

template <class Op> void pack_hidden_panels_of(const WeightGradProduct& job, int64_t begin, int64_t end) {
    const int64_t h = begin * PANEL_COLUMNS;
    pack_right<Op>(job.hidden.at<typename Op::Element>(0, h), job.hidden.stride, min(job.width, end * PANEL_COLUMNS) - h, job.rows,
                   job.packed + h / PAIR * strip<Op>(job.rows));
}

// Rows of the weight whose gradient is packed at once.
constexpr int64_t VOCAB_GROUP = 192;

template <class Op, class T> bool d_weight_of(const WeightGradProduct& job, int64_t begin, int64_t end) {
    const int64_t count = tiles_of<Op>(job.rows), step = strip<Op>(job.rows), blocks = blocks_of(count, BLOCK_TILES);
    const Scratch left(VOCAB_GROUP / PAIR * step), partial(blocks > 1 ? strips(job.width) * PAIR * PAIR : 0);  // sums of a strip of V
    if (left.missing || partial.missing) return false;
    const bool aligned = reinterpret_cast<uintptr_t>(job.out.base) % 64 == 0 && job.out.stride % (job.out.is_bf16() ? 32 : 16) == 0;
    const Tiles tiles;
    alignas(64) float sums[STEP];
    for (int64_t group = begin; group < end; group += VOCAB_GROUP) {
        const int64_t last = min(end, group + VOCAB_GROUP);
        pack_left_of_columns<Op>(job.gradient.at<T>(0, group), job.gradient.stride, last - group, job.rows, left.data);
        Ahead ahead;
        if (last < end) ahead.plan(job.gradient.at<T>(0, last), job.gradient.stride, job.rows, min(VOCAB_GROUP, end - last));
        const int64_t lines = ceil_div(ahead.lines(), strips(last - group) * strips(job.width) * blocks);
        for (int64_t v = group; v < last; v += PAIR) {
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t at = b * BLOCK_TILES * 2 * APART;
                for (int64_t h = 0; h < job.width; h += PAIR) {
                    float* before = as_floats(partial) + h * PAIR;
                    Destination to{before, PAIR, reinterpret_cast<char*>(before), PAIR, false, false, last - v, job.width - h};
                    if (b == 0) {
                        to.start = job.start.base ? job.start.at<float>(v, h) : nullptr;
                        to.start_stride = job.start.stride;
                    }
                    if (b + 1 == blocks) {
                        to.out = job.out.base + (v * job.out.stride + h) * (job.out.is_bf16() ? 2 : 4), to.stride = job.out.stride;
                        to.is_bf16 = job.out.is_bf16();
                        to.stream = aligned && (job.out.is_bf16() || !job.start.base);  // what was read just now is in the caches
                    }
                    multiply<false>(left.data + (v - group) / PAIR * step + at, job.packed + h / PAIR * step + at,
                                    min(BLOCK_TILES, count - b * BLOCK_TILES), sums);
                    store(sums, to);
                    ahead.fetch(lines);
                }
            }
        }
    }
    _mm_sfence();
    return true;
}

// ---- by the types of the operands

void pack_hidden(const LogitsProduct& job, int64_t begin, int64_t end) {
    job.hidden.is_bf16() ? pack_hidden_of<Whole>(job, begin, end) : pack_hidden_of<Split>(job, begin, end);
}

bool logits(const LogitsProduct& job, int64_t begin, int64_t end) {
    return job.weight.is_bf16() ? logits_of<Whole>(job, begin, end) : logits_of<Split>(job, begin, end);
}

bool d_hidden(const HiddenGradProduct& job, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    if (!job.weight.is_bf16()) return d_hidden_of<Split, float>(job, begin, end, first_column, last_column);
    return job.gradient.is_bf16() ? d_hidden_of<Whole, uint16_t>(job, begin, end, first_column, last_column)
                                : d_hidden_of<Whole, float>(job, begin, end, first_column, last_column);
}

void pack_hidden_panels(const WeightGradProduct& job, int64_t begin, int64_t end) {
    job.hidden.is_bf16() ? pack_hidden_panels_of<Whole>(job, begin, end) : pack_hidden_panels_of<Split>(job, begin, end);
}

bool d_weight(const WeightGradProduct& job, int64_t begin, int64_t end) {
    if (!job.hidden.is_bf16()) return d_weight_of<Split, float>(job, begin, end);
    return job.gradient.is_bf16() ? d_weight_of<Whole, uint16_t>(job, begin, end) : d_weight_of<Whole, float>(job, begin, end);
}

}  // namespace

extern const Products products_amx;
const Products products_amx = {hidden_pack_bytes,  pack_hidden, logits, d_hidden, hidden_panel_bytes,
                               pack_hidden_panels, d_weight,    PAIR,   16384};

}  // namespace grpo
