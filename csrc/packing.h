// Packs the operands of the matmuls into the layout that is multiplied. Along the inner dimension
// everything is counted in units of 32 bits: a pair of neighbouring bf16 values, or one fp32 value.
//   left operand   rows of units, one row after the other
//   right operand  panels [unit][column] of PANEL_COLUMNS columns, so that one unit of all columns
//                  is NUM_VECTORS registers
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#include "kernels.h"

namespace grpo {
namespace {

#define UNROLLED _Pragma("GCC unroll 16")

constexpr int LANES = 16;  // 32-bit lanes of a register
constexpr int NUM_VECTORS = 4;
static_assert(NUM_VECTORS * LANES == PANEL_COLUMNS, "");

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Masks of the first n lanes; n may be negative or larger than the register.
inline __mmask16 first16(int64_t n) {
    if (n <= 0) return __mmask16(0);
    return n >= 16 ? __mmask16(-1) : __mmask16((1u << n) - 1);
}
inline __mmask32 first32(int64_t n) {
    if (n <= 0) return __mmask32(0);
    return n >= 32 ? __mmask32(-1) : __mmask32((1u << n) - 1);
}

// Load a register of a row that has n elements left; lanes beyond the end are 0.
inline __m512i load_bf16(const uint16_t* p, int64_t n) {
    return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(first32(n), p);
}
inline __m512 load_fp32(const float* p, int64_t n) {
    return n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first16(n), p);
}

// Memory of one call on one thread. If `is_missing`, the allocation failed: the matmul returns
// false and the binding raises MemoryError.
struct Scratch {
    uint32_t* data;
    bool is_missing;

    explicit Scratch(int64_t num_units)
        : data(
              static_cast<uint32_t*>(
                  aligned_alloc(CACHE_LINE, size_t(ceil_div(num_units, LANES)) * CACHE_LINE))),
          is_missing(!data && num_units) {}
    ~Scratch() { free(data); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    float* as_floats() const { return reinterpret_cast<float*>(data); }
};

// Prefetches a matrix that the next step reads in short strided pieces, which the hardware's
// prefetcher does not recognise. Between the tiles of the current step it prefetches a few cache
// lines at a time.
struct StridedPrefetch {
    const char* base = nullptr;
    int64_t stride = 0, num_rows = 0, row_bytes = 0;
    int64_t row = 0, byte = 0;  // the next line to prefetch

    template <class T>
    void set_matrix(const T* matrix, int64_t row_stride, int64_t rows, int64_t columns) {
        base = reinterpret_cast<const char*>(matrix);
        stride = row_stride * int64_t(sizeof(T));
        num_rows = rows;
        row_bytes = columns * int64_t(sizeof(T));
        row = 0;
        byte = 0;
    }
    int64_t num_lines() const { return num_rows * ceil_div(row_bytes, CACHE_LINE); }
    void fetch(int64_t count) {
        for (; count > 0 && row < num_rows; count--) {
            _mm_prefetch(base + row * stride + byte, _MM_HINT_T1);
            byte += CACHE_LINE;
            if (byte < row_bytes) continue;
            byte = 0;
            row++;
        }
    }
};

// ---- arithmetics: how two units are multiplied and added to a sum. `load` reads 16 units of a row
// that has n elements left; units beyond the end are 0.

// bf16 operands with vdpbf16ps.
struct Bf16DotProduct {
    using Element = uint16_t;
    static constexpr int ELEMENTS_PER_UNIT = 2;
    static __m512i load(const uint16_t* p, int64_t n) { return load_bf16(p, n); }
    // Rounds to bf16.
    static __m512i load(const float* p, int64_t n) {
        return (__m512i)_mm512_cvtne2ps_pbh(load_fp32(p + 16, n - 16), load_fp32(p, n));
    }
    static __m512 add_product(__m512 sum, __m512i left, __m512i right) {
        return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
    }
};

// fp32 operands with fp32 FMA.
struct Fp32Fma {
    using Element = float;
    static constexpr int ELEMENTS_PER_UNIT = 1;
    static __m512i load(const float* p, int64_t n) { return _mm512_castps_si512(load_fp32(p, n)); }
    static __m512 add_product(__m512 sum, __m512i left, __m512i right) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sum);
    }
};

// bf16 operands with fp32 FMA: on Intel, vdpbf16ps runs at half the rate of FMA.
struct WidenedBf16Fma : Fp32Fma {
    using Element = uint16_t;
    static __m512i widen(__m256i x) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
    static __m512i load(const uint16_t* p, int64_t n) {
        if (n < 16) return widen(_mm256_maskz_loadu_epi16(first16(n), p));
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // Rounds to bf16.
    static __m512i load(const float* p, int64_t n) {
        return widen((__m256i)_mm512_cvtneps_pbh(load_fp32(p, n)));
    }
};

template <class Arithmetic> int64_t num_units(int64_t num_elements) {
    return ceil_div(num_elements, Arithmetic::ELEMENTS_PER_UNIT);
}

// ---- transposition

struct InterleavedRows {
    __m512i low, high;  // units of the columns 0..15 and 16..31
};

// Interleaves two rows of 32 bf16 values: each unit of the result is the pair of one column.
inline InterleavedRows interleave(__m512i even_row, __m512i odd_row) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    return {
        _mm512_permutex2var_epi16(even_row, low, odd_row),
        _mm512_permutex2var_epi16(even_row, high, odd_row)};
}

// Transposes 16 x 16 elements of 32 bits in place.
inline void transpose(__m512i (&x)[16]) {
    constexpr int EVEN_LANES = 0x88, ODD_LANES = 0xdd;  // the 128-bit lanes 0 and 2, or 1 and 3
    __m512i y[16];
    UNROLLED
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    // x[i + k]: column k of each 128-bit lane, of the rows i .. i + 3
    UNROLLED
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLLED
    for (int k = 0; k < 4; k++) {
        y[k] = _mm512_shuffle_i32x4(x[k], x[k + 4], EVEN_LANES);
        y[k + 4] = _mm512_shuffle_i32x4(x[k], x[k + 4], ODD_LANES);
        y[k + 8] = _mm512_shuffle_i32x4(x[k + 8], x[k + 12], EVEN_LANES);
        y[k + 12] = _mm512_shuffle_i32x4(x[k + 8], x[k + 12], ODD_LANES);
    }
    UNROLLED
    for (int k = 0; k < 4; k++) {
        x[k] = _mm512_shuffle_i32x4(y[k], y[k + 8], EVEN_LANES);
        x[k + 8] = _mm512_shuffle_i32x4(y[k], y[k + 8], ODD_LANES);
        x[k + 4] = _mm512_shuffle_i32x4(y[k + 4], y[k + 12], EVEN_LANES);
        x[k + 12] = _mm512_shuffle_i32x4(y[k + 4], y[k + 12], ODD_LANES);
    }
}

// ---- packing. `inner` is the length of the inner dimension, in elements.

// Packs one panel whose columns are rows of `from` [columns, inner].
template <class Arithmetic>
void pack_panel_of_rows(
    const typename Arithmetic::Element* from, int64_t stride, int64_t columns, int64_t inner,
    uint32_t* panel) {
    const int64_t units = num_units<Arithmetic>(inner);
    for (int c = 0; c < NUM_VECTORS; c++) {
        const int64_t count = columns - c * LANES;
        for (int64_t u = 0; u < units; u += LANES) {
            const int64_t k = u * Arithmetic::ELEMENTS_PER_UNIT;
            __m512i x[LANES];
            for (int r = 0; r < LANES; r++) {
                const auto* row = from + (c * LANES + r) * stride + k;
                x[r] = r < count ? Arithmetic::load(row, inner - k) : _mm512_setzero_si512();
            }
            transpose(x);
            for (int r = 0; r < min(LANES, units - u); r++) {
                _mm512_store_si512(panel + (u + r) * PANEL_COLUMNS + c * LANES, x[r]);
            }
        }
    }
}

// Packs panels whose columns are columns of `from` [inner, columns]. Panels are panel_stride apart.
template <class Arithmetic>
void pack_panels_of_columns(
    const typename Arithmetic::Element* from, int64_t stride, int64_t columns, int64_t inner,
    uint32_t* panels, int64_t panel_stride) {
    constexpr int ELEMENTS_PER_UNIT = Arithmetic::ELEMENTS_PER_UNIT;
    const int64_t padded_columns = ceil_div(columns, PANEL_COLUMNS) * PANEL_COLUMNS;
    for (int64_t u = 0; u < num_units<Arithmetic>(inner); u++) {
        const auto* row = from + ELEMENTS_PER_UNIT * u * stride;
        const bool has_odd_row = 2 * u + 1 < inner;
        for (int64_t j = 0; j < padded_columns; j += LANES * ELEMENTS_PER_UNIT) {
            uint32_t* panel = panels + j / PANEL_COLUMNS * panel_stride;
            uint32_t* to = panel + u * PANEL_COLUMNS + j % PANEL_COLUMNS;
            const __m512i x = Arithmetic::load(row + j, columns - j);
            if constexpr (ELEMENTS_PER_UNIT == 2) {
                __m512i odd_row = _mm512_setzero_si512();
                if (has_odd_row) odd_row = Arithmetic::load(row + stride + j, columns - j);
                const InterleavedRows pairs = interleave(x, odd_row);
                _mm512_store_si512(to, pairs.low);
                _mm512_store_si512(to + LANES, pairs.high);
            } else {
                _mm512_store_si512(to, x);
            }
        }
    }
}

// Packs rows of `from` [rows, inner] into rows of units. Elements beyond the end in the last unit
// are 0.
template <class Arithmetic, class T>
void pack_rows(
    const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to, int64_t to_stride) {
    const int64_t units = num_units<Arithmetic>(inner);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t u = 0; u < units; u += LANES) {
            const int64_t k = u * Arithmetic::ELEMENTS_PER_UNIT;
            const __m512i x = Arithmetic::load(from + i * stride + k, inner - k);
            _mm512_mask_storeu_epi32(to + i * to_stride + u, first16(units - u), x);
        }
    }
}

// Transposes 16 x 16 units and stores the first `units` units of the first `rows` rows.
inline void store_transposed(
    __m512i (&x)[LANES], int64_t rows, int64_t units, uint32_t* to, int64_t to_stride) {
    transpose(x);
    for (int r = 0; r < min(LANES, rows); r++) {
        _mm512_mask_storeu_epi32(to + r * to_stride, first16(units), x[r]);
    }
}

// Packs the columns of `from` [inner, rows] into rows of units.
template <class Arithmetic, class T>
void pack_rows_of_columns(
    const T* from, int64_t stride, int64_t rows, int64_t inner, uint32_t* to, int64_t to_stride) {
    constexpr int ELEMENTS_PER_UNIT = Arithmetic::ELEMENTS_PER_UNIT;
    const int64_t units = num_units<Arithmetic>(inner);
    const auto load_row = [&](int64_t k, int64_t j) {
        if (k >= inner) return _mm512_setzero_si512();
        return Arithmetic::load(from + k * stride + j, rows - j);
    };
    for (int64_t u = 0; u < units; u += LANES) {
        for (int64_t j = 0; j < rows; j += LANES * ELEMENTS_PER_UNIT) {
            __m512i low[LANES], high[LANES];
            for (int r = 0; r < LANES; r++) {
                const int64_t k = ELEMENTS_PER_UNIT * (u + r);
                if constexpr (ELEMENTS_PER_UNIT == 2) {
                    const InterleavedRows pairs = interleave(load_row(k, j), load_row(k + 1, j));
                    low[r] = pairs.low;
                    high[r] = pairs.high;
                } else {
                    low[r] = load_row(k, j);
                }
            }
            store_transposed(low, rows - j, units - u, to + j * to_stride + u, to_stride);
            if constexpr (ELEMENTS_PER_UNIT == 2) {
                uint32_t* to_high = to + (j + LANES) * to_stride + u;
                store_transposed(high, rows - j - LANES, units - u, to_high, to_stride);
            }
        }
    }
}

}  // namespace
}  // namespace grpo
