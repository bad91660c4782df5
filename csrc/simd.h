// A vector type F of W floats; the compiler's flags choose the instruction set. Everything is in an unnamed namespace, so that the
// linker does not merge the copies of an inline function compiled for different instruction sets.
//
// Contraction is off (-ffp-contract=off): a product is fused with a sum only by fma().
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

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

#else  // AVX2, FMA and F16C

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
// One element in all lanes.
inline F load_one(const float* p) { return all(*p); }
inline F load_one(const bf16* p) {
    const uint32_t bits = uint32_t(p->bits) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return all(x);
}
inline F load_one(const fp16* p) { return all(_cvtsh_ss(p->bits)); }

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

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- exp, tanh and the functions of divergences

// Below this exp(d) is taken as 0: its result would leave the normal range of fp32.
constexpr float EXP_CUTOFF = -87.0f;

constexpr float LOG2_E = 1.44269504f;

// exp of several vectors d at once, for EXP_CUTOFF <= d <= 1 or NaN. It is exactly 1 at 0. Lanes whose bit in k is off become 0.
#if defined(__AVX512F__)

// The bits of 2^(j / 32), minus j 2^18. Shifting m, whose low bits hold j, to the left by 18 adds this j 2^18 back.
alignas(64) const uint32_t POWERS[32] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3,
};

// With m = d log2(e) rounded to 1/32, 2^m is a power from the table with the whole part of m added to its exponent, and
// 2^(d log2(e) - m) a polynomial fitted to a relative error of 5.4e-8. Each stage is done for all vectors before the next one:
// instructions of one vector depend on each other, and the processor reorders only a limited number of instructions.
template <int N> INLINED void exp_where(const Keep (&k)[N], const F (&d)[N], F (&e)[N]) {
    const __m512i low = _mm512_load_si512(POWERS), high = _mm512_load_si512(POWERS + 16);
    const F to_32nds = all(393216.0f), log2_e = all(LOG2_E);  // 1.5 2^18, whose last bit is worth 1/32
    __m512i m[N];
    F rest[N], power[N];
    for (int i = 0; i < N; i++) m[i] = _mm512_castps_si512(fma(d[i], log2_e, to_32nds));
    for (int i = 0; i < N; i++) rest[i] = sub(_mm512_castsi512_ps(m[i]), to_32nds);
    for (int i = 0; i < N; i++) rest[i] = _mm512_fmsub_ps(d[i], log2_e, rest[i]);
    for (int i = 0; i < N; i++) {
        const __m512i of = _mm512_permutex2var_epi32(low, m[i], high);
        power[i] = _mm512_castsi512_ps(_mm512_maskz_add_epi32(k[i], of, _mm512_slli_epi32(m[i], 18)));
    }
    for (int i = 0; i < N; i++) e[i] = fma(all(0.240231815f), rest[i], all(0.693157399f));
    for (int i = 0; i < N; i++) rest[i] = mul(rest[i], power[i]);
    for (int i = 0; i < N; i++) e[i] = _mm512_maskz_fmadd_ps(k[i], e[i], rest[i], power[i]);
}

#else

// 2^floor(t) 2^fraction(t) with t = d log2(e). The second factor is a polynomial fitted to a relative error of 8.3e-8, exactly 1 if
// t is an integer. Rounding t adds a relative error of |d| 6e-8, as much as rounding d does; it is small where exp(d) is large.
template <int N> INLINED void exp_where(const Keep (&k)[N], const F (&d)[N], F (&e)[N]) {
    for (int i = 0; i < N; i++) {
        const F t = mul(d[i], all(LOG2_E)), f = fraction(t);
        F p = fma(all(0.0018671304f), f, all(0.00901702978f));
        p = fma(p, f, all(0.0557999127f));
        p = fma(p, f, all(0.240164444f));
        p = fma(p, f, all(0.693151295f));
        e[i] = times_pow2_floor_where(k[i], fma(p, f, all(1.0f)), t);
    }
}

#endif

INLINED F exp_where(Keep k, F d) {
    const Keep keep[1] = {k};
    const F of[1] = {d};
    F e[1];
    exp_where(keep, of, e);
    return e[0];
}

struct Tanh {
    F value, slope;
};

// tanh(u) and 1 - tanh(u)^2, both to a few ulp: near 0 from a polynomial, elsewhere from exp(-2 |u|).
INLINED Tanh tanh_and_slope(F u) {
    const F a = magnitude(u), minus_2a = mul(a, all(-2.0f)), one = all(1.0f);
    const F e = exp_where(not_below(minus_2a, all(EXP_CUTOFF)), minus_2a);
    const F inverse = div(one, add(one, e));
    const F s = mul(a, a);
    F p = fma(all(-0.00566693628f), s, all(0.0206061415f));
    p = fma(p, s, all(-0.0537299961f));
    p = fma(p, s, all(0.133313313f));
    p = fma(p, s, all(-0.333332777f));
    const F near = fma(mul(p, s), a, a);
    const F far = mul(sub(one, e), inverse);
    return {with_sign_of(choose(not_below(a, all(0.625f)), far, near), u), mul(mul(all(4.0f), e), mul(inverse, inverse))};
}

// Below this |x| psi(x) is a polynomial.
constexpr float SMALL = 0.5f;

// psi(x) = e^x - 1 - x for |x| <= SMALL, without cancellation: a relative error of 2.4e-8 and a few roundings.
INLINED F psi_near_0(F x) {
    F p = fma(all(0.00019875608f), x, all(0.0013981997f));
    p = fma(p, x, all(0.008333452f));
    p = fma(p, x, all(0.041665796f));
    p = fma(p, x, all(0.16666666f));
    p = fma(p, x, all(0.5f));
    return mul(mul(x, x), p);
}

// t - log(1 + t) for 1 + t from sqrt(1/2) to sqrt(2), without cancellation: to a few ulp.
INLINED F rest_of_log1p(F t) {
    F p = fma(all(0.08700264f), t, all(-0.14267462f));
    p = fma(p, t, all(0.1491481f));
    p = fma(p, t, all(-0.16577588f));
    p = fma(p, t, all(0.1996306f));
    p = fma(p, t, all(-0.25001338f));
    p = fma(p, t, all(0.3333391f));
    return mul(mul(t, t), fma(sub(all(0.0f), t), p, all(0.5f)));
}

// log(u) and x - log(u), both to a few ulp, for u = 1 + x and -1 < x <= 0. Both x and u are needed: near x = -1, 1 + x would have lost
// digits of u.
struct Log1p {
    F value, rest;
};

INLINED Log1p log1p_and_rest(F x, F u) {
    F n;
    const F m = split_pow2(u, n);
    const Keep near = not_below(u, all(0.70710678f));  // here n is 0 and m is u, and x is more exact than u - 1
    const F t = choose(near, x, sub(m, all(1.0f)));
    const F rest = rest_of_log1p(t), far = fma(n, all(0.693147181f), sub(t, rest));
    return {choose(near, sub(x, rest), far), choose(near, rest, sub(x, far))};
}

}  // namespace
