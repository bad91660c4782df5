// Packs the operands of the products into the layout that is multiplied. Along the inner dimension everything is counted in units of
// 32 bits: a pair of neighbouring bf16 values, or one fp32 value.
//   left:  rows of units, one row after the other
//   right: panels [unit][column] of PANEL_COLUMNS columns, so that one unit of all columns is VECTORS registers
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#include "kernels.h"

namespace grpo {
namespace {

#define UNROLL _Pragma("GCC unroll 16")

constexpr int VECTORS = 4, LANES = 16;
static_assert(VECTORS * LANES == PANEL_COLUMNS, "");

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline __mmask16 first16(int64_t n) { return n >= 16 ? __mmask16(-1) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1); }
inline __mmask32 first32(int64_t n) { return n >= 32 ? __mmask32(-1) : n <= 0 ? __mmask32(0) : __mmask32((1u << n) - 1); }

inline __m512i load_bf16(const uint16_t* p, int64_t n) {
    return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(first32(n), p);
}
inline __m512 load_fp32(const float* p, int64_t n) { return n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first16(n), p); }

// Memory of one call on one thread. `missing` is true if the allocation failed: the product then returns false and the binding raises.
struct Scratch {
    uint32_t* data;
    bool missing;
    explicit Scratch(int64_t elements)
        : data(static_cast<uint32_t*>(aligned_alloc(64, size_t(ceil_div(elements, LANES)) * 64))), missing(!data && elements) {}
    ~Scratch() { free(data); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};

// Memory that the next step reads in short strided pieces, which the hardware's prefetcher does not recognise. It is prefetched a few
// cache lines at a time, between the tiles of the current step.
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

// The types of operands. `load` reads 16 units of a row that has n elements left; units beyond the end are 0.
struct Bf16 {
    using Element = uint16_t;
    static constexpr int PER_UNIT = 2;
    static __m512i load(const uint16_t* p, int64_t n) { return load_bf16(p, n); }
    static __m512i load(const float* p, int64_t n) {  // rounded
        return (__m512i)_mm512_cvtne2ps_pbh(load_fp32(p + 16, n - 16), load_fp32(p, n));
    }
    static __m512 add_product(__m512 sum, __m512i left, __m512i right) {
        return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
    }
};

struct Fp32 {
    using Element = float;
    static constexpr int PER_UNIT = 1;
    static __m512i load(const float* p, int64_t n) { return _mm512_castps_si512(load_fp32(p, n)); }
    static __m512 add_product(__m512 sum, __m512i left, __m512i right) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sum);
    }
};

// bf16 operands in fp32 arithmetic: on Intel vdpbf16ps runs at half its rate.
struct Widened : Fp32 {
    using Element = uint16_t;
    static __m512i widen(__m256i x) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
    static __m512i load(const uint16_t* p, int64_t n) {
        return widen(n >= 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi16(first16(n), p));
    }
    static __m512i load(const float* p, int64_t n) { return widen((__m256i)_mm512_cvtneps_pbh(load_fp32(p, n))); }  // rounded
};

template <class Op> int64_t units_of(int64_t n) { return ceil_div(n, Op::PER_UNIT); }

struct Interleaved {
    __m512i low, high;  // pairs of columns 0..15 and 16..31
};

// Interleaves two rows of bf16: each unit of the result pairs the two rows' values of one column, for 32 columns.
inline Interleaved interleave(__m512i even_row, __m512i odd_row) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    return {_mm512_permutex2var_epi16(even_row, low, odd_row), _mm512_permutex2var_epi16(even_row, high, odd_row)};
}

// Transposes 16 x 16 elements of 32 bits in place.
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

// Packs a panel whose columns are rows of `from`; the inner dimension is contiguous there.
template <class Op>
void pack_panel_of_rows(const typename Op::Element* from, int64_t stride, int64_t columns, int64_t inner, uint32_t* panel) {
    const int64_t units = units_of<Op>(inner);
    for (int c = 0; c < VECTORS; c++) {
        const int64_t count = columns - c * LANES;
        for (int64_t u = 0; u < units; u += LANES) {
            const int64_t at = u * Op::PER_UNIT;
            __m512i x[LANES];
            for (int r = 0; r < LANES; r++) {
                x[r] = r < count ? Op::load(from + (c * LANES + r) * stride + at, inner - at) : _mm512_setzero_si512();
            }
            transpose(x);
            for (int k = 0; k < min(LANES, units - u); k++) _mm512_store_si512(panel + (u + k) * PANEL_COLUMNS + c * LANES, x[k]);
        }
    }
}

// Packs panels whose columns are columns of `from`; the rows of `from` are the inner dimension. Panels are panel_stride apart.
template <class Op>
void pack_panels_of_columns(const typename Op::Element* from, int64_t stride, int64_t columns, int64_t inner, uint32_t* panels,
                            int64_t panel_stride) {
    for (int64_t u = 0; u < units_of<Op>(inner); u++) {
        const auto* row = from + Op::PER_UNIT * u * stride;
        const bool has_odd = 2 * u + 1 < inner;
        for (int64_t j = 0; j < ceil_div(columns, PANEL_COLUMNS) * PANEL_COLUMNS; j += LANES * Op::PER_UNIT) {
            uint32_t* to = panels + j / PANEL_COLUMNS * panel_stride + u * PANEL_COLUMNS + j % PANEL_COLUMNS;
            const __m512i x = Op::load(row + j, columns - j);
            if constexpr (Op::PER_UNIT == 2) {
                const Interleaved pairs = interleave(x, has_odd ? Op::load(row + stride + j, columns - j) : _mm512_setzero_si512());
                _mm512_store_si512(to, pairs.low);
                _mm512_store_si512(to + LANES, pairs.high);
            } else {
                _mm512_store_si512(to, x);
            }
        }
    }
}

// Packs rows of `from` into rows of units. Elements beyond the end in the last unit are 0.
template <class Op, class T>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to, int64_t to_stride) {
    const int64_t units = units_of<Op>(inner);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t u = 0; u < units; u += LANES) {
            const __m512i x = Op::load(from + i * stride + u * Op::PER_UNIT, inner - u * Op::PER_UNIT);
            _mm512_mask_storeu_epi32(to + i * to_stride + u, first16(units - u), x);
        }
    }
}

// Transposes 16 x 16 units and stores the first `units` units of the first `rows` rows of the result.
inline void store_transposed(__m512i (&x)[LANES], int64_t rows, int64_t units, uint32_t* to, int64_t to_stride) {
    transpose(x);
    for (int k = 0; k < min(LANES, rows); k++) _mm512_mask_storeu_epi32(to + k * to_stride, first16(units), x[k]);
}

// Packs the columns of `from` [inner, rows] into rows of units.
template <class Op, class T>
void pack_rows_of_columns(const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to, int64_t to_stride) {
    const int64_t units = units_of<Op>(inner);
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t u = 0; u < units; u += LANES) {
        for (int64_t j = 0; j < rows; j += LANES * Op::PER_UNIT) {
            __m512i low[LANES], high[LANES];
            for (int k = 0; k < LANES; k++) {
                const int64_t first = Op::PER_UNIT * (u + k);
                const __m512i x = first < inner ? Op::load(from + first * stride + j, rows - j) : zero;
                if constexpr (Op::PER_UNIT == 2) {
                    const __m512i y = first + 1 < inner ? Op::load(from + (first + 1) * stride + j, rows - j) : zero;
                    const Interleaved pairs = interleave(x, y);
                    low[k] = pairs.low, high[k] = pairs.high;
                } else {
                    low[k] = x;
                }
            }
            store_transposed(low, rows - j, units - u, to + j * to_stride + u, to_stride);
            if constexpr (Op::PER_UNIT == 2) {
                store_transposed(high, rows - j - LANES, units - u, to + (j + LANES) * to_stride + u, to_stride);
            }
        }
    }
}

}  // namespace
}  // namespace grpo
