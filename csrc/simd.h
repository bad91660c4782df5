// `Vec`, a vector of LANES floats, `Mask`, a bool for each lane, and the functions of them that the
// row kernels use. The compiler's flags choose the instruction set. Everything is in an unnamed
// namespace, so that the linker does not merge the copies of an inline function compiled for
// different instruction sets.
//
// Contraction is off (-ffp-contract=off): a product is fused with a sum only by fma().
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

// For functions that run at each step of a row. Left to the compiler's size limits, some were not
// inlined, and a row took twice as long.
#define INLINED inline __attribute__((always_inline))
#define INLINED_LAMBDA __attribute__((always_inline))
// Keeps the code of the other case out of a loop.
#define LIKELY(condition) __builtin_expect(condition, 1)

namespace {

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// The layout of fp32 numbers.
constexpr int MANTISSA_BITS = 23;
constexpr int32_t SQRT_HALF_BITS = 0x3f3504f3;      // of sqrt(1/2)
constexpr int32_t HIGH_HALF = int32_t(0xffff0000);  // the bits of a bf16 number in an fp32 one
// Added before the low 16 bits are cut off: rounds to the nearest bf16 number, ties to even.
constexpr int32_t BF16_ROUNDING = 0x7fff;

// ---- arithmetic, loads and stores, once for AVX-512 and once for AVX2. Where the name of a
// function does not say it all:
//   max_ignoring_nan(a, best)     best where a is NaN
//   copy_sign(a, sign)            for a >= 0
//   not_less(a, b)                true where a or b is NaN
//   fma_where(mask, a, b, c)      c where the mask is false
//   mul_where(mask, a, b)         0 where the mask is false
//   split_pow2(a, n)              returns m of a normal number a = m 2^n, sqrt(1/2) <= m < sqrt(2)
//   rounded_to_bf16(a)            the rounded numbers are in the high halves
//   load_two, store_two           see below

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Vec = __m512;
using Mask = __mmask16;

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max_ignoring_nan(Vec a, Vec best) { return _mm512_max_ps(a, best); }
inline Vec absolute(Vec a) { return _mm512_abs_ps(a); }
inline Vec copy_sign(Vec a, Vec sign) {
    return _mm512_or_ps(a, _mm512_and_ps(sign, _mm512_castsi512_ps(_mm512_set1_epi32(INT32_MIN))));
}
inline Mask not_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Mask is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Mask first_lanes(int n) { return Mask((1u << n) - 1); }
inline Vec select(Mask mask, Vec if_true, Vec if_false) {
    return _mm512_mask_blend_ps(mask, if_false, if_true);
}
inline Vec fma_where(Mask mask, Vec a, Vec b, Vec c) {
    return _mm512_mask3_fmadd_ps(a, b, c, mask);
}
inline Vec mul_where(Mask mask, Vec a, Vec b) { return _mm512_maskz_mul_ps(mask, a, b); }
inline bool any_above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline Vec split_pow2(Vec a, Vec& n) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i sqrt_half = _mm512_set1_epi32(SQRT_HALF_BITS);
    const __m512i exponent = _mm512_srai_epi32(_mm512_sub_epi32(bits, sqrt_half), MANTISSA_BITS);
    n = _mm512_cvtepi32_ps(exponent);
    const __m512i shifted = _mm512_slli_epi32(exponent, MANTISSA_BITS);
    return _mm512_castsi512_ps(_mm512_sub_epi32(bits, shifted));
}

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void load_two(const bf16* p, Vec& even, Vec& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(HIGH_HALF)));
}
inline Vec load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
#if defined(__AVX512BF16__)
inline void store(bf16* p, Vec a) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a));
}
inline void store_two(bf16* p, Vec even, Vec odd) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    const __m512i interleaved = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(interleaved, halves));
}
#else
inline __m512i rounded_to_bf16(Vec a) {
    const __m512i u = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(BF16_ROUNDING)), odd);
}
inline void store(bf16* p, Vec a) {
    _mm256_storeu_si256(
        (__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(a), 16)));
}
inline void store_two(bf16* p, Vec even, Vec odd) {
    const __m512i low = _mm512_srli_epi32(rounded_to_bf16(even), 16);
    constexpr __mmask32 ODD = 0xaaaaaaaau;
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(ODD, low, rounded_to_bf16(odd)));
}
#endif
inline void store(fp16* p, Vec a) {
    _mm256_storeu_si256(
        (__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else  // AVX2, FMA and F16C

constexpr int LANES = 8;
using Vec = __m256;
using Mask = __m256;

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max_ignoring_nan(Vec a, Vec best) { return _mm256_max_ps(a, best); }
inline Vec absolute(Vec a) { return _mm256_andnot_ps(broadcast(-0.0f), a); }
inline Vec copy_sign(Vec a, Vec sign) {
    return _mm256_or_ps(a, _mm256_and_ps(sign, broadcast(-0.0f)));
}
inline Mask not_less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
inline Mask is_nan(Vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline Mask first_lanes(int n) {
    return _mm256_cmp_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), broadcast(float(n)), _CMP_LT_OQ);
}
inline Vec select(Mask mask, Vec if_true, Vec if_false) {
    return _mm256_blendv_ps(if_false, if_true, mask);
}
inline Vec fma_where(Mask mask, Vec a, Vec b, Vec c) {
    return fma(_mm256_and_ps(mask, a), _mm256_and_ps(mask, b), c);
}
inline Vec mul_where(Mask mask, Vec a, Vec b) { return _mm256_and_ps(mask, mul(a, b)); }
inline Vec fraction(Vec t) { return sub(t, _mm256_floor_ps(t)); }
// a * 2^floor(t), 0 where the mask is false. A NaN in t converts to INT_MIN, whose shift is 0, so
// that a NaN in a stays one.
inline Vec scale_by_pow2_floor_where(Mask mask, Vec a, Vec t) {
    const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(t));
    const __m256i scaled =
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(n, MANTISSA_BITS));
    return _mm256_and_ps(mask, _mm256_castsi256_ps(scaled));
}
inline bool any_above(Vec a, Vec b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
inline Vec split_pow2(Vec a, Vec& n) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i sqrt_half = _mm256_set1_epi32(SQRT_HALF_BITS);
    const __m256i exponent = _mm256_srai_epi32(_mm256_sub_epi32(bits, sqrt_half), MANTISSA_BITS);
    n = _mm256_cvtepi32_ps(exponent);
    const __m256i shifted = _mm256_slli_epi32(exponent, MANTISSA_BITS);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, shifted));
}

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void load_two(const bf16* p, Vec& even, Vec& odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(HIGH_HALF)));
}
inline Vec load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline __m256i rounded_to_bf16(Vec a) {
    const __m256i u = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(BF16_ROUNDING)), odd);
}
inline void store(bf16* p, Vec a) {
    const __m256i high = _mm256_srli_epi32(rounded_to_bf16(a), 16);
    _mm_storeu_si128(
        (__m128i*)p,
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
inline void store_two(bf16* p, Vec even, Vec odd) {
    const __m256i low = _mm256_srli_epi32(rounded_to_bf16(even), 16);
    constexpr int ODD = 0xaa;
    _mm256_storeu_si256((__m256i*)p, _mm256_blend_epi16(low, rounded_to_bf16(odd), ODD));
}
inline void store(fp16* p, Vec a) {
    _mm_storeu_si128(
        (__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#endif

// Loads 2 LANES neighbouring elements as two vectors, in the order that is fastest for the type:
// bf16 elements as the even and the odd ones, others in order. store_two restores the order.
template <class T> inline void load_two(const T* p, Vec& a, Vec& b) {
    a = load(p);
    b = load(p + LANES);
}
template <class T> inline void store_two(T* p, Vec a, Vec b) {
    store(p, a);
    store(p + LANES, b);
}

// A store that keeps NaN: the bf16 stores above may round by integer arithmetic, which can turn a
// NaN into an infinity.
template <class T> inline void store_keeping_nan(T* p, Vec a) { store(p, a); }
inline void store_keeping_nan(bf16* p, Vec a) {
    store(p, select(is_nan(a), broadcast(__builtin_nanf("")), a));
}

// The first n of LANES elements; the other lanes are 0.
template <class T> inline Vec load_first(const T* p, int n) {
    T padded[LANES] = {};
    for (int k = 0; k < n; k++) padded[k] = p[k];
    return load(padded);
}
// The element *p in all lanes.
inline Vec load_broadcast(const float* p) { return broadcast(*p); }
inline Vec load_broadcast(const bf16* p) {
    const uint32_t bits = uint32_t(p->bits) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return broadcast(x);
}
inline Vec load_broadcast(const fp16* p) { return broadcast(_cvtsh_ss(p->bits)); }

template <class T> inline void store_first(T* p, Vec a, int n) {
    T lanes[LANES];
    store(lanes, a);
    for (int k = 0; k < n; k++) p[k] = lanes[k];
}
inline float first_lane(Vec a) {
    float lanes[LANES];
    memcpy(lanes, &a, sizeof a);
    return lanes[0];
}
#if defined(__AVX512F__)
inline double sum_lanes(Vec a) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}
inline float max_lanes(Vec a) { return _mm512_reduce_max_ps(a); }
#else
inline double sum_lanes(Vec a) {
    float lanes[LANES];
    memcpy(lanes, &a, sizeof a);
    double total = 0;
    for (int k = 0; k < LANES; k++) total += lanes[k];
    return total;
}
inline float max_lanes(Vec a) {
    float lanes[LANES];
    memcpy(lanes, &a, sizeof a);
    float best = lanes[0];
    for (int k = 1; k < LANES; k++) best = lanes[k] > best ? lanes[k] : best;
    return best;
}
#endif

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- exp, tanh and the functions of divergences
//
// Polynomials are fitted to their interval. Each step of exp is done for several vectors before the
// next step: the instructions of one vector depend on each other, and the processor reorders only a
// limited number of instructions.

// Below this exp(x) is taken as 0: its result would leave the normal range of fp32.
constexpr float EXP_CUTOFF = -87.0f;

constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147181f;
constexpr float SQRT_HALF = 0.70710678f;

// exp of N vectors x, for EXP_CUTOFF <= x <= 1 or NaN, exactly 1 at 0. Lanes whose mask is false
// become 0.
#if defined(__AVX512F__)

constexpr int POWER_BITS = 5;  // the table has 2^(j / 32) for j = 0 .. 31
constexpr int POWER_SHIFT = MANTISSA_BITS - POWER_BITS;
// Adding 1.5 * 2^18 to a small fp32 number rounds it to 1/32, the value of the last bit of the sum.
constexpr float ROUND_TO_32NDS = 393216.0f;

// The bits of 2^(j / 32), minus j * 2^POWER_SHIFT. The exponent is added as a whole number of 32nds
// shifted left by POWER_SHIFT, whose low bits j add this j * 2^POWER_SHIFT back.
alignas(64) const uint32_t POWERS[1 << POWER_BITS] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3,
};

// exp(x) = 2^m 2^r with m = x log2(e) rounded to 1/32 and the remainder r = x log2(e) - m. 2^m is a
// power from the table with the whole part of m added to its exponent, 2^r a polynomial with a
// relative error of 5.4e-8.
template <int N> INLINED void exp_where(const Mask (&masks)[N], const Vec (&x)[N], Vec (&e)[N]) {
    const __m512i low_powers = _mm512_load_si512(POWERS);
    const __m512i high_powers = _mm512_load_si512(POWERS + 16);
    const Vec round = broadcast(ROUND_TO_32NDS);
    const Vec log2_e = broadcast(LOG2_E);
    __m512i m[N];  // as bits of m + ROUND_TO_32NDS
    Vec r[N], power[N];
    for (int i = 0; i < N; i++) m[i] = _mm512_castps_si512(fma(x[i], log2_e, round));
    for (int i = 0; i < N; i++) r[i] = sub(_mm512_castsi512_ps(m[i]), round);
    for (int i = 0; i < N; i++) r[i] = _mm512_fmsub_ps(x[i], log2_e, r[i]);
    for (int i = 0; i < N; i++) {
        const __m512i from_table = _mm512_permutex2var_epi32(low_powers, m[i], high_powers);
        const __m512i exponent = _mm512_slli_epi32(m[i], POWER_SHIFT);
        power[i] = _mm512_castsi512_ps(_mm512_maskz_add_epi32(masks[i], from_table, exponent));
    }
    for (int i = 0; i < N; i++) e[i] = fma(broadcast(0.240231815f), r[i], broadcast(0.693157399f));
    for (int i = 0; i < N; i++) r[i] = mul(r[i], power[i]);
    for (int i = 0; i < N; i++) e[i] = _mm512_maskz_fmadd_ps(masks[i], e[i], r[i], power[i]);
}

#else

// exp(x) = 2^floor(t) 2^fraction(t) with t = x log2(e). The second factor is a polynomial with a
// relative error of 8.3e-8, exactly 1 if t is an integer. Rounding t adds a relative error of
// |x| 6e-8, as much as rounding x does; it is small where exp(x) is large.
template <int N> INLINED void exp_where(const Mask (&masks)[N], const Vec (&x)[N], Vec (&e)[N]) {
    for (int i = 0; i < N; i++) {
        const Vec t = mul(x[i], broadcast(LOG2_E));
        const Vec f = fraction(t);
        Vec p = fma(broadcast(0.0018671304f), f, broadcast(0.00901702978f));
        p = fma(p, f, broadcast(0.0557999127f));
        p = fma(p, f, broadcast(0.240164444f));
        p = fma(p, f, broadcast(0.693151295f));
        e[i] = scale_by_pow2_floor_where(masks[i], fma(p, f, broadcast(1.0f)), t);
    }
}

#endif

INLINED Vec exp_where(Mask mask, Vec x) {
    const Mask masks[1] = {mask};
    const Vec arguments[1] = {x};
    Vec results[1];
    exp_where(masks, arguments, results);
    return results[0];
}

struct Tanh {
    Vec value, derivative;
};

// tanh uses a polynomial below this |u|.
constexpr float TANH_POLYNOMIAL_RANGE = 0.625f;

// tanh(u) and 1 - tanh(u)^2, both to a few ulp: near 0 tanh is a polynomial, elsewhere
// (1 - e) / (1 + e) with e = exp(-2 |u|).
INLINED Tanh tanh_and_derivative(Vec u) {
    const Vec one = broadcast(1.0f);
    const Vec a = absolute(u);
    const Vec minus_2a = mul(a, broadcast(-2.0f));
    const Vec e = exp_where(not_less(minus_2a, broadcast(EXP_CUTOFF)), minus_2a);
    const Vec inverse = div(one, add(one, e));
    const Vec s = mul(a, a);
    Vec p = fma(broadcast(-0.00566693628f), s, broadcast(0.0206061415f));
    p = fma(p, s, broadcast(-0.0537299961f));
    p = fma(p, s, broadcast(0.133313313f));
    p = fma(p, s, broadcast(-0.333332777f));
    const Vec near = fma(mul(p, s), a, a);
    const Vec far = mul(sub(one, e), inverse);
    const Vec value = select(not_less(a, broadcast(TANH_POLYNOMIAL_RANGE)), far, near);
    const Vec derivative = mul(mul(broadcast(4.0f), e), mul(inverse, inverse));
    return {copy_sign(value, u), derivative};
}

// Up to this |x|, e^x - 1 - x is computed by a polynomial.
constexpr float NEAR_ZERO = 0.5f;

// e^x - 1 - x for |x| <= NEAR_ZERO, without cancellation: a relative error of 2.4e-8 and a few
// roundings.
INLINED Vec expm1_minus_x_near_0(Vec x) {
    Vec p = fma(broadcast(0.00019875608f), x, broadcast(0.0013981997f));
    p = fma(p, x, broadcast(0.008333452f));
    p = fma(p, x, broadcast(0.041665796f));
    p = fma(p, x, broadcast(0.16666666f));
    p = fma(p, x, broadcast(0.5f));
    return mul(mul(x, x), p);
}

// x - log(1 + x) for 1 + x from sqrt(1/2) to sqrt(2), without cancellation: to a few ulp.
INLINED Vec x_minus_log1p(Vec x) {
    Vec p = fma(broadcast(0.08700264f), x, broadcast(-0.14267462f));
    p = fma(p, x, broadcast(0.1491481f));
    p = fma(p, x, broadcast(-0.16577588f));
    p = fma(p, x, broadcast(0.1996306f));
    p = fma(p, x, broadcast(-0.25001338f));
    p = fma(p, x, broadcast(0.3333391f));
    return mul(mul(x, x), fma(sub(broadcast(0.0f), x), p, broadcast(0.5f)));
}

struct Log1p {
    Vec log1p, x_minus_log1p;
};

// log(1 + x) and x - log(1 + x), both to a few ulp, for -1 < x <= 0. The caller passes 1 + x too:
// near x = -1 the sum of the rounded x and 1 would have lost digits.
INLINED Log1p log1p_of(Vec x, Vec one_plus_x) {
    Vec n;
    const Vec m = split_pow2(one_plus_x, n);
    // Here n is 0 and m is 1 + x, and x is more exact than m - 1.
    const Mask near = not_less(one_plus_x, broadcast(SQRT_HALF));
    const Vec t = select(near, x, sub(m, broadcast(1.0f)));
    const Vec t_minus_log1p = x_minus_log1p(t);
    const Vec far = fma(n, broadcast(LN_2), sub(t, t_minus_log1p));
    return {select(near, sub(x, t_minus_log1p), far), select(near, t_minus_log1p, sub(x, far))};
}

}  // namespace
