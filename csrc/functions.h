// exp, tanh and the functions of divergences, on vectors. Compiled once per instruction set, like simd.h.
#pragma once
#include "simd.h"

namespace {

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
