// A vector type F of W floats; the compiler's flags choose the instruction set. Everything is in an unnamed namespace, so that the
// linker does not merge the copies of an inline function compiled for different instruction sets.
//
// Contraction is off (-ffp-contract=off): a product is fused with a sum only by fma().
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Functions that run at each step of a row are always inlined. Left to the compiler's size limits, some were not, and a row took twice
// as long.
#define INLINED inline __attribute__((always_inline))
#define INLINED_LAMBDA __attribute__((always_inline))

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// split_pow2 splits a normal number a = m 2^n with m from sqrt(1/2) to sqrt(2). These are the bits of sqrt(1/2).
constexpr int32_t SQRT_HALF_BITS = 0x3f3504f3;

#if defined(__AVX512F__)

constexpr int W = 16;
using F = __m512;
using Keep = __mmask16;

inline F all(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max_ignoring_nan(F a, F best) { return _mm512_max_ps(a, best); }
inline F magnitude(F a) { return _mm512_abs_ps(a); }
inline F with_sign_of(F a, F sign) {
    return _mm512_or_ps(a, _mm512_and_ps(sign, _mm512_castsi512_ps(_mm512_set1_epi32(INT32_MIN))));
}
inline Keep not_below(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }  // true for NaN
inline Keep is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Keep first_lanes(int n) { return Keep((1u << n) - 1); }
inline F choose(Keep k, F yes, F no) { return _mm512_mask_blend_ps(k, no, yes); }
inline F add_where(Keep k, F sum, F a) { return _mm512_mask_add_ps(sum, k, sum, a); }
inline F fma_where(Keep k, F a, F b, F c) { return _mm512_mask3_fmadd_ps(a, b, c, k); }
inline F mul_where(Keep k, F a, F b) { return _mm512_maskz_mul_ps(k, a, b); }
inline bool any_above(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline F split_pow2(F a, F& n) {
    const __m512i bits = _mm512_castps_si512(a), half = _mm512_set1_epi32(SQRT_HALF_BITS);
    const __m512i k = _mm512_srai_epi32(_mm512_sub_epi32(bits, half), 23);
    n = _mm512_cvtepi32_ps(k);
    return _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(k, 23)));
}

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void load_pair(const bf16* p, F& even, F& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
}
inline F load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
#if defined(__AVX512BF16__)
inline void store(bf16* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }
inline void store_pair(bf16* p, F even, F odd) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                                 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(interleaved, halves));
}
#else
inline __m512i rounded_to_bf16(F a) {  // in the high half
    const __m512i u = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
}
inline void store(bf16* p, F a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(a), 16)));
}
inline void store_pair(bf16* p, F even, F odd) {
    const __m512i low = _mm512_srli_epi32(rounded_to_bf16(even), 16);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, rounded_to_bf16(odd)));
}
#endif
inline void store(fp16* p, F a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

constexpr int W = 8;
using F = __m256;
using Keep = __m256;

inline F all(float x) { return _mm256_set1_ps(x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max_ignoring_nan(F a, F best) { return _mm256_max_ps(a, best); }
inline F magnitude(F a) { return _mm256_andnot_ps(all(-0.0f), a); }
inline F with_sign_of(F a, F sign) { return _mm256_or_ps(a, _mm256_and_ps(sign, all(-0.0f))); }
inline Keep not_below(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }  // true for NaN
inline Keep is_nan(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline Keep first_lanes(int n) {
    return _mm256_cmp_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), all(float(n)), _CMP_LT_OQ);
}
inline F choose(Keep k, F yes, F no) { return _mm256_blendv_ps(no, yes, k); }
inline F add_where(Keep k, F sum, F a) { return add(sum, _mm256_and_ps(k, a)); }
inline F fma_where(Keep k, F a, F b, F c) { return fma(_mm256_and_ps(k, a), _mm256_and_ps(k, b), c); }
inline F mul_where(Keep k, F a, F b) { return _mm256_and_ps(k, mul(a, b)); }
inline F fraction(F t) { return sub(t, _mm256_floor_ps(t)); }
inline F times_pow2_floor_where(Keep k, F a, F t) {  // NaN converts to INT_MIN, whose shift is 0: a stays NaN
    const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(t));
    return _mm256_and_ps(k, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(n, 23))));
}
inline bool any_above(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
inline F split_pow2(F a, F& n) {
    const __m256i bits = _mm256_castps_si256(a), half = _mm256_set1_epi32(SQRT_HALF_BITS);
    const __m256i k = _mm256_srai_epi32(_mm256_sub_epi32(bits, half), 23);
    n = _mm256_cvtepi32_ps(k);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(k, 23)));
}

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void load_pair(const bf16* p, F& even, F& odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
}
inline F load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline __m256i rounded_to_bf16(F a) {  // in the high half
    const __m256i u = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
}
inline void store(bf16* p, F a) {
    const __m256i high = _mm256_srli_epi32(rounded_to_bf16(a), 16);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
inline void store_pair(bf16* p, F even, F odd) {
    const __m256i low = _mm256_srli_epi32(rounded_to_bf16(even), 16);
    _mm256_storeu_si256((__m256i*)p, _mm256_blend_epi16(low, rounded_to_bf16(odd), 0xaa));
}
inline void store(fp16* p, F a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else  // SSE2, NEON and any other target of the compiler's vector extension

constexpr int W = 4;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));  // overflow wraps around; for I it is undefined
using Keep = I;

inline F all(float x) { return F{x, x, x, x}; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F choose(Keep k, F yes, F no) { return (F)((k & (I)yes) | (~k & (I)no)); }
inline F max_ignoring_nan(F a, F best) { return choose(a > best, a, best); }
inline F magnitude(F a) { return (F)((I)a & 0x7fffffff); }
inline F with_sign_of(F a, F sign) { return (F)((I)a | ((I)sign & INT32_MIN)); }
inline Keep not_below(F a, F b) { return ~(Keep)(a < b); }  // true for NaN
inline Keep is_nan(F a) { return a != a; }
inline Keep first_lanes(int n) { return I{0, 1, 2, 3} < I{n, n, n, n}; }
inline F add_where(Keep k, F sum, F a) { return sum + (F)(k & (I)a); }
inline F fma_where(Keep k, F a, F b, F c) { return (F)(k & (I)a) * (F)(k & (I)b) + c; }
inline F mul_where(Keep k, F a, F b) { return (F)(k & (I)(a * b)); }
inline F near_floor(F t) {  // floor(t) for |t| < 2^22, or floor(t) - 1 if t is an integer
    const F magic = all(12582912.0f);
    return ((t - 0.5f) + magic) - magic;
}
inline F fraction(F t) { return t - near_floor(t); }
inline F times_pow2_floor_where(Keep k, F a, F t) {
    return (F)(k & (I)((U)a + ((U)__builtin_convertvector(near_floor(t), I) << 23)));
}
inline bool any_above(F a, F b) {
    const I k = a > b;
    return (k[0] | k[1] | k[2] | k[3]) != 0;
}
inline F split_pow2(F a, F& n) {
    const I k = (I)((U)a - uint32_t(SQRT_HALF_BITS)) >> 23;
    n = __builtin_convertvector(k, F);
    return (F)((U)a - ((U)k << 23));
}

inline float widen(fp16 h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
    uint32_t u;
    float f;
    if (rest >= 0x7c00) {
        u = 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        u = (rest << 13) + (112u << 23);
    } else {  // subnormal: an integer multiple of 2^-24
        f = float(rest) * 5.9604645e-8f;
        memcpy(&u, &f, 4);
    }
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}
inline fp16 narrow(float f) {  // to nearest even
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint16_t sign = uint16_t(u >> 16 & 0x8000);
    u &= 0x7fffffff;
    uint32_t h;
    if (u > 0x7f800000) {
        h = 0x7e00;
    } else if (u >= 0x477ff000) {  // rounds to 2^16 or beyond
        h = 0x7c00;
    } else if (u >= 0x38800000) {
        h = (u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13;
    } else {  // adding 1/2 puts the unit of a subnormal half, 2^-24, into the last bit
        float a;
        memcpy(&a, &u, 4);
        a += 0.5f;
        memcpy(&h, &a, 4);
        h -= 0x3f000000;
    }
    return fp16{uint16_t(sign | h)};
}

inline F load(const float* p) {
    F a;
    memcpy(&a, p, sizeof a);
    return a;
}
inline F load(const bf16* p) {
    const U wide = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
    return (F)(wide << 16);
}
inline F load(const fp16* p) { return F{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
inline void store(float* p, F a) { memcpy(p, &a, sizeof a); }
inline void store(bf16* p, F a) {
    const U u = (U)a;
    const U high = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    for (int k = 0; k < W; k++) p[k].bits = uint16_t(high[k]);
}
inline void store(fp16* p, F a) {
    for (int k = 0; k < W; k++) p[k] = narrow(a[k]);
}

#endif

// Loads 2 W neighbouring elements as two vectors, in the order that is fastest for the type; store_pair reverses that order.
template <class T> inline void load_pair(const T* p, F& a, F& b) { a = load(p), b = load(p + W); }
template <class T> inline void store_pair(T* p, F a, F b) { store(p, a), store(p + W, b); }

// A store that keeps NaN. The bf16 stores above may round by integer arithmetic, which can turn a NaN into an infinity.
template <class T> inline void store_any(T* p, F a) { store(p, a); }
inline void store_any(bf16* p, F a) { store(p, choose(is_nan(a), all(__builtin_nanf("")), a)); }

template <class T> inline F load_some(const T* p, int n) {
    T padded[W] = {};
    for (int k = 0; k < n; k++) padded[k] = p[k];
    return load(padded);
}
template <class T> inline void store_some(T* p, F a, int n) {
    T lanes[W];
    store(lanes, a);
    for (int k = 0; k < n; k++) p[k] = lanes[k];
}
inline float lane0(F a) {
    float lanes[W];
    memcpy(lanes, &a, sizeof a);
    return lanes[0];
}
#if defined(__AVX512F__)
inline double sum_lanes(F a) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}
inline float max_lanes(F a) { return _mm512_reduce_max_ps(a); }
#else
inline double sum_lanes(F a) {
    float lanes[W];
    memcpy(lanes, &a, sizeof a);
    double total = 0;
    for (int k = 0; k < W; k++) total += lanes[k];
    return total;
}
inline float max_lanes(F a) {
    float lanes[W];
    memcpy(lanes, &a, sizeof a);
    float best = lanes[0];
    for (int k = 1; k < W; k++) best = lanes[k] > best ? lanes[k] : best;
    return best;
}
#endif

}  // namespace
