// Kernels over two rows of logits with one vocabulary: the policy's row, which gets a gradient, and
// the reference's. core/softmax.py defines the sums, core/divergence.py forms the divergences from
// them. Compiled once per instruction set, like simd.h.
//
// In comments, p and q are the probabilities of the policy and the reference in one column, z and w
// their transformed logits. Both rows are read block by block through BlockReader, which deals with
// dtypes and transforms; those may differ between the rows.
#pragma once
#include "softmax_rows.h"

namespace grpo {
namespace {

// Columns that are summed in fp32 before the sums are added to fp64 sums, as FP32_SUM_COLUMNS.
constexpr int64_t FP32_PAIR_SUM_COLUMNS =
    32 * GROUP_COLUMNS < BLOCK_COLUMNS ? 32 * GROUP_COLUMNS : BLOCK_COLUMNS;

inline Vec negate(Vec a) { return sub(broadcast(0.0f), a); }

// ---- both rows

// Memory for a block of both rows. (A "pair" in this file is a policy row and its reference row.)
struct PairBuffers {
    alignas(CACHE_LINE) float policy[BLOCK_COLUMNS], reference[BLOCK_COLUMNS];
    alignas(CACHE_LINE) float dtanh[BLOCK_COLUMNS];  // of the policy, for SOFTCAP
};

// Maxima up to this far apart count as nearly equal.
constexpr float MAX_NEAR_DIFFERENCE = 4.0f;

// The maxima that are subtracted from the logits of both rows. A maximum of -inf becomes 0, so that
// all exponentials are 0.
struct RowMaxima {
    Vec policy, reference;
    Vec difference;
    bool nearly_equal;

    RowMaxima(float policy_max, float reference_max) {
        const float finite_policy_max = policy_max > -INFINITY ? policy_max : 0.0f;
        const float finite_reference_max = reference_max > -INFINITY ? reference_max : 0.0f;
        policy = broadcast(finite_policy_max);
        reference = broadcast(finite_reference_max);
        difference = broadcast(finite_policy_max - finite_reference_max);
        nearly_equal = fabsf(finite_policy_max - finite_reference_max) <= MAX_NEAR_DIFFERENCE;
    }
    // Returns (z - policy) - (w - reference), given x = z - policy and y = w - reference. If the
    // maxima are nearly equal, it is computed from z - w, which is exact for nearly equal logits,
    // so that small differences are accurate. If the maxima are far apart, z - w would be rounded
    // to the precision of their difference.
    template <bool NEARLY_EQUAL> INLINED Vec log_ratio(Vec z, Vec w, Vec x, Vec y) const {
        return NEARLY_EQUAL ? sub(sub(z, w), difference) : sub(x, y);
    }
};

// A KL divergence of a row, and log(reference_sum_exp / sum_exp).
struct KlDivergence {
    double log_sum_ratio;
    double value;
};

// The sums of both rows after the first pass, see enum Sum.
struct PairSums {
    float max_logit, sum_exp;
    float reference_max_logit, reference_sum_exp;
    float sum_log_ratio, sum_log_ratio_excess;

    // KL(p || q), or with `forward` KL(q || p), whose terms the reference's probabilities weigh.
    KlDivergence kl_divergence(bool forward) const {
        const double weighting_sum = forward ? reference_sum_exp : sum_exp;
        const double other_sum = forward ? sum_exp : reference_sum_exp;
        const double mean_log_ratio = sum_log_ratio / weighting_sum;
        const double excess = sum_log_ratio_excess / weighting_sum;
        // other_sum / weighting_sum - 1, NaN where both are infinite.
        const double sum_ratio_minus_1 = excess - mean_log_ratio;
        const bool near = fabs(mean_log_ratio) <= NEAR_ZERO && excess <= NEAR_ZERO;
        const double log1p_ratio = near ? log1p(sum_ratio_minus_1) : 0.0;
        const double log_ratio = near ? log1p_ratio : log(other_sum) - log(weighting_sum);
        // Near each other the difference of the two terms would cancel.
        const double value =
            near ? excess - (sum_ratio_minus_1 - log1p_ratio) : mean_log_ratio + log_ratio;
        return {forward ? -log_ratio : log_ratio, value < 0 ? 0.0 : value};
    }
};

// ---- a column of both rows, once the sums of both are known: JSD and TV

// The smaller of p and q divided by the larger, from D = log p - log q.
struct ProbRatio {
    Mask policy_is_larger;
    Mask ratio_is_nonzero;
    Vec abs_log_ratio;
    Vec ratio;          // exp(-abs_log_ratio)
    Vec ratio_minus_1;  // without cancellation

    INLINED explicit ProbRatio(Vec D) {
        policy_is_larger = not_less(D, broadcast(0.0f));
        abs_log_ratio = absolute(D);
        const Vec log_ratio = negate(abs_log_ratio);
        ratio_is_nonzero = not_less(log_ratio, broadcast(EXP_CUTOFF));
        ratio = exp_where(ratio_is_nonzero, log_ratio);
        const Vec near = sub(expm1_minus_x_near_0(log_ratio), abs_log_ratio);
        const Mask is_far = not_less(abs_log_ratio, broadcast(NEAR_ZERO));
        ratio_minus_1 = select(is_far, sub(ratio, broadcast(1.0f)), near);
    }
};

// x_minus_log1p is accurate for arguments up to this.
constexpr float MAX_LOG1P_POLYNOMIAL = 0.41f;

// A column of JSD, whose mixture is m = (1 - b) p + b q. With M the larger of p and q:
//   x = m / M - 1, at most 0
//   y = m / (M * ratio) - 1, at least 0
struct JsdColumn : ProbRatio {
    Mask y_is_large;  // for x_minus_log1p
    Vec one_minus_share;
    Log1p log1p_x;
    Vec y, y_minus_log1p;

    INLINED JsdColumn(Vec D, Vec b, Vec one_minus_b) : ProbRatio(D) {
        // The share of the smaller probability in the mixture.
        const Vec share = select(policy_is_larger, b, one_minus_b);
        one_minus_share = select(policy_is_larger, one_minus_b, b);
        const Vec one_plus_x = fma(share, ratio, one_minus_share);
        log1p_x = log1p_of(mul(share, ratio_minus_1), one_plus_x);
        y = div(mul(one_minus_share, negate(ratio_minus_1)), ratio);
        y_is_large = not_less(y, broadcast(MAX_LOG1P_POLYNOMIAL));
        y_minus_log1p = x_minus_log1p(y);
    }
    // The factor of p in the gradient: log p - log m.
    INLINED Vec gradient_factor() const {
        const Vec far = add(log1p_x.log1p, abs_log_ratio);
        const Vec log1p_y = select(y_is_large, far, sub(y, y_minus_log1p));
        return negate(select(policy_is_larger, log1p_x.log1p, log1p_y));
    }
    // The terms of KL(p || m) and KL(q || m), divided by M. The terms m - p and m - q, which sum to
    // 0 over a row, are added, so that every term is at least 0 and nothing cancels.
    INLINED void terms(Vec& policy_term, Vec& reference_term) const {
        const Vec log1p_y = add(log1p_x.log1p, abs_log_ratio);
        const Vec m_minus_smaller = negate(mul(one_minus_share, ratio_minus_1));
        const Vec far = sub(m_minus_smaller, mul_where(ratio_is_nonzero, ratio, log1p_y));
        const Vec term_of_smaller = select(y_is_large, far, mul(ratio, y_minus_log1p));
        policy_term = select(policy_is_larger, log1p_x.x_minus_log1p, term_of_smaller);
        reference_term = select(policy_is_larger, term_of_smaller, log1p_x.x_minus_log1p);
    }
};

// sign(p - q) / 2, 0 where p and q are equal.
INLINED Vec half_sign(Vec D) {
    const Mask is_zero = not_less(broadcast(0.0f), absolute(D));
    return select(is_zero, broadcast(0.0f), copy_sign(broadcast(0.5f), D));
}

// A column of the total variation.
struct TvColumn : ProbRatio {
    Vec half;

    INLINED TvColumn(Vec D, Vec, Vec) : ProbRatio(D), half(half_sign(D)) {}

    // The factor of p in the gradient.
    INLINED Vec gradient_factor() const { return half; }
    // p times that factor, and |p - q| / 2, divided by the larger of p and q.
    INLINED void terms(Vec& policy_term, Vec& reference_term) const {
        policy_term = mul(half, select(policy_is_larger, broadcast(1.0f), ratio));
        reference_term = mul(broadcast(-0.5f), ratio_minus_1);
    }
};

// The saved terms of one column of JSD or TV.
struct GradientTerms {
    Vec prob, prob_times_factor;
};

// Computes the terms of JSD or TV (`Column`) from the logits of one vector of columns.
template <class Column> struct MixtureTerms {
    const RowMaxima& maxima;
    Vec log_sum_ratio;
    Vec b, one_minus_b;
    Vec inverse_sum_exp, inverse_reference_sum_exp;

    // Adds the terms of both sums to policy_sum and reference_sum.
    INLINED GradientTerms add_terms(Vec z, Vec w, Vec& policy_sum, Vec& reference_sum) const {
        const Vec x = sub(z, maxima.policy);
        const Vec y = sub(w, maxima.reference);
        const Vec log_ratio = maxima.nearly_equal ? maxima.log_ratio<true>(z, w, x, y)
                                                  : maxima.log_ratio<false>(z, w, x, y);
        const Column column(add(log_ratio, log_sum_ratio), b, one_minus_b);
        const Mask policy_is_larger = column.policy_is_larger;
        const Vec exponent = select(policy_is_larger, x, y);
        const Vec inverse_sum =
            select(policy_is_larger, inverse_sum_exp, inverse_reference_sum_exp);
        const Mask above_cutoff = not_less(exponent, broadcast(EXP_CUTOFF));
        const Vec larger_prob = mul(exp_where(above_cutoff, exponent), inverse_sum);
        Vec policy_term, reference_term;
        column.terms(policy_term, reference_term);
        policy_sum = add(policy_sum, mul_where(above_cutoff, larger_prob, policy_term));
        reference_sum = add(reference_sum, mul_where(above_cutoff, larger_prob, reference_term));
        const Vec p = select(policy_is_larger, larger_prob, mul(larger_prob, column.ratio));
        const Mask is_normal = not_less(p, broadcast(MIN_NORMAL));
        return {
            mul_where(is_normal, p, broadcast(1.0f)),
            mul_where(is_normal, p, column.gradient_factor())};
    }
};

// ---- the first pass over both rows, which computes all sums that need no other sum

// Sums over both rows, see enum Sum.
struct PairTotals {
    double sum_exp, sum_exp_shifted, sum_exp_squared;  // of the policy, see ExpSums
    double reference_sum_exp;
    double sum_log_ratio, sum_log_ratio_excess;
};

// Updates log_ratio (SUM_LOG_RATIO) and excess (SUM_LOG_RATIO_EXCESS) if the maxima that they are
// relative to change. The exponentials of the row whose probabilities weight the terms (the policy,
// for FORWARD the reference) are multiplied by `factor`, those of the other row by `other_factor`,
// which is factor * exp(-shift). With `sum` the weighting row's sum of exponentials:
//   log_ratio' = factor * (log_ratio + shift * sum)
//   excess'    = other_factor * excess - (other_factor - factor) * log_ratio
//              + (other_factor - factor + factor * shift) * sum
// The two differences are formed without cancellation; see merge_log_ratio_sums in
// core/divergence.py.
void rescale_log_ratio_sums(
    double factor, double other_factor, double shift, double sum, double other_sum,
    double& log_ratio, double& excess) {
    if (factor == 0) {
        log_ratio = 0;
        excess = other_factor * other_sum;
        return;
    }
    const bool near = fabs(shift) <= NEAR_ZERO;
    const double ratio_minus_1 = expm1(-shift);
    const double of_log_ratio = near ? factor * ratio_minus_1 : other_factor - factor;
    const double of_sum =
        near ? factor * (ratio_minus_1 + shift) : (other_factor - factor) + factor * shift;
    excess = other_factor * excess - of_log_ratio * log_ratio + of_sum * sum;
    log_ratio = factor * (log_ratio + shift * sum);
    if (log_ratio == INFINITY) excess = INFINITY;
}

// Saves the two terms of the gradient of up to LANES columns from j on, for SOFTCAP times `dtanh`
// (else null). With e = exp(z - max_logit), e_ref = exp(w - reference_max_logit) and d the log of
// e / e_ref:
//   REVERSE  e and e * d
//   FORWARD  e and e - e_ref where they are near each other; elsewhere -e and -e_ref, where the
//            sign of the first marks this case
//   JSD      p and p * (log p - log m)
//   TV       p and p * sign(p - q) / 2
INLINED void save_terms(
    const SavedTerms& saved, int64_t j, Vec first, Vec second, const float* dtanh, int count) {
    if (dtanh) {
        first = mul(first, load(dtanh));
        second = mul(second, load(dtanh));
    }
    if (count >= LANES) {
        store(saved.terms[0] + j, first);
        store(saved.terms[1] + j, second);
    } else {
        store_first(saved.terms[0] + j, first, count);
        store_first(saved.terms[1] + j, second, count);
    }
}

// Returns values + offset, or null if values is null.
inline const float* offset_or_null(const float* values, int64_t offset) {
    return values ? values + offset : nullptr;
}

// The sums over both rows, relative to the maxima so far.
template <bool FORWARD_KL, SumKind KIND, bool SAVES> struct RunningPairSums {
    const BlockReader& policy;
    const BlockReader& reference;
    SavedTerms* saved;  // null unless SAVES

    float max_logit = -INFINITY, reference_max_logit = -INFINITY;
    int64_t argmax_block = 0;  // the first column of the block with max_logit
    PairTotals total = {};

    RunningPairSums(
        const BlockReader& policy, const BlockReader& reference, SavedTerms* saved = nullptr)
        : policy(policy), reference(reference), saved(saved) {}

    // The fp32 sums of a few vectors.
    struct VecSums {
        Vec sum_exp, reference_sum_exp;
        Vec sum_log_ratio, sum_log_ratio_excess;
        Vec sum_exp_shifted, sum_exp_squared;
    };

    // Makes all sums relative to new maxima. Both are raised together, so that the differences of
    // nearly equal rows stay small.
    void rescale_to(float new_max, float new_reference_max) {
        const bool empty = max_logit == -INFINITY;
        const bool reference_empty = reference_max_logit == -INFINITY;
        const double change = double(max_logit) - new_max;
        const double reference_change = double(reference_max_logit) - new_reference_max;
        const double factor = empty ? 0.0 : exp(change);
        const double reference_factor = reference_empty ? 0.0 : exp(reference_change);
        const double shift = empty || reference_empty ? 0.0 : change - reference_change;
        if (FORWARD_KL) {
            rescale_log_ratio_sums(
                reference_factor, factor, -shift, total.reference_sum_exp, total.sum_exp,
                total.sum_log_ratio, total.sum_log_ratio_excess);
        } else {
            rescale_log_ratio_sums(
                factor, reference_factor, shift, total.sum_exp, total.reference_sum_exp,
                total.sum_log_ratio, total.sum_log_ratio_excess);
        }
        if (KIND >= WITH_SHIFTED) {
            total.sum_exp_shifted =
                factor > 0 ? factor * (total.sum_exp_shifted + change * total.sum_exp) : 0.0;
        }
        total.sum_exp *= factor;
        total.sum_exp_squared *= factor * factor;
        total.reference_sum_exp *= reference_factor;
        max_logit = new_max;
        reference_max_logit = new_reference_max;
    }

    // Adds n columns from j on.
    void add_block(
        const LogitBlock& block, const LogitBlock& reference_block, int64_t j, int64_t n,
        const float* dtanh) {
        const bool larger = block.max > max_logit;
        const bool reference_larger = reference_block.max > reference_max_logit;
        if (larger) argmax_block = j;
        if (larger || reference_larger) {
            rescale_to(
                larger ? block.max : max_logit,
                reference_larger ? reference_block.max : reference_max_logit);
        }
        if (SAVES && (larger || reference_larger || j == 0)) {
            saved->begin_segment(j, max_logit, reference_max_logit);
        }
        const RowMaxima maxima(max_logit, reference_max_logit);
        for (int64_t k = 0; k < n; k += FP32_PAIR_SUM_COLUMNS) {
            const float* z = block.z + k;
            const float* w = reference_block.z + k;
            const int64_t count = min(FP32_PAIR_SUM_COLUMNS, n - k);
            if (maxima.nearly_equal) {
                accumulate<true>(z, w, j + k, count, maxima, offset_or_null(dtanh, k));
            } else {
                accumulate<false>(z, w, j + k, count, maxima, offset_or_null(dtanh, k));
            }
        }
    }

    // Adds n columns from j on to the totals, relative to `maxima`.
    template <bool NEARLY_EQUAL>
    void accumulate(
        const float* z, const float* w, int64_t j, int64_t n, const RowMaxima& maxima,
        const float* dtanh) {
        const Vec zero = broadcast(0.0f);
        VecSums sums = {zero, zero, zero, zero, zero, zero};
        int64_t k = 0;
        for (; k + GROUP_COLUMNS <= n; k += GROUP_COLUMNS) {
            policy.prefetch_next_block(j + k);
            reference.prefetch_next_block(j + k);
            accumulate_vectors<VECTORS_PER_GROUP, NEARLY_EQUAL>(
                z + k, w + k, maxima, sums, offset_or_null(dtanh, k), j + k, GROUP_COLUMNS);
        }
        for (; k < n; k += LANES) {
            const int count = int(min(LANES, n - k));
            accumulate_vectors<1, NEARLY_EQUAL>(
                z + k, w + k, maxima, sums, offset_or_null(dtanh, k), j + k, count);
        }
        total.sum_exp += sum_lanes(sums.sum_exp);
        total.reference_sum_exp += sum_lanes(sums.reference_sum_exp);
        total.sum_log_ratio += sum_lanes(sums.sum_log_ratio);
        total.sum_log_ratio_excess += sum_lanes(sums.sum_log_ratio_excess);
        if (KIND >= WITH_SHIFTED) total.sum_exp_shifted += sum_lanes(sums.sum_exp_shifted);
        if (KIND >= WITH_SQUARED) total.sum_exp_squared += sum_lanes(sums.sum_exp_squared);
    }

    // Adds N vectors. Each step is done for all of them before the next, because the instructions
    // of one vector depend on each other.
    template <int N, bool NEARLY_EQUAL>
    INLINED void accumulate_vectors(
        const float* z, const float* w, const RowMaxima& maxima, VecSums& sums, const float* dtanh,
        int64_t j, int count) const {
        Vec x[N], y[N], d[N], e[N], e_ref[N], log_ratio[N], excess[N];
        Mask above_cutoff[N], reference_above_cutoff[N], is_far[N];
        for (int k = 0; k < N; k++) {
            const Vec z_k = load(z + k * LANES);
            const Vec w_k = load(w + k * LANES);
            x[k] = sub(z_k, maxima.policy);
            y[k] = sub(w_k, maxima.reference);
            d[k] = maxima.log_ratio<NEARLY_EQUAL>(z_k, w_k, x[k], y[k]);
            above_cutoff[k] = not_less(x[k], broadcast(EXP_CUTOFF));
            reference_above_cutoff[k] = not_less(y[k], broadcast(EXP_CUTOFF));
        }
        exp_where(above_cutoff, x, e);
        exp_where(reference_above_cutoff, y, e_ref);
        for (int k = 0; k < N; k++) {
            // The row whose probabilities weigh the terms, and the other one.
            const Mask weight_is_nonzero = FORWARD_KL ? reference_above_cutoff[k] : above_cutoff[k];
            const Vec weight = FORWARD_KL ? e_ref[k] : e[k];
            const Vec other = FORWARD_KL ? e[k] : e_ref[k];
            const Vec log_weight_ratio = FORWARD_KL ? negate(d[k]) : d[k];
            log_ratio[k] = mul_where(weight_is_nonzero, weight, log_weight_ratio);
            const Vec near = mul(weight, expm1_minus_x_near_0(negate(log_weight_ratio)));
            const Vec far = add(sub(other, weight), log_ratio[k]);
            is_far[k] = not_less(absolute(log_weight_ratio), broadcast(NEAR_ZERO));
            excess[k] = select(is_far[k], far, near);
        }
        sums.sum_exp = add(sums.sum_exp, sum_of(e));
        sums.reference_sum_exp = add(sums.reference_sum_exp, sum_of(e_ref));
        if (KIND >= WITH_SHIFTED) {
            Vec shifted = mul_where(above_cutoff[0], e[0], x[0]);
            for (int k = 1; k < N; k++) shifted = fma_where(above_cutoff[k], e[k], x[k], shifted);
            sums.sum_exp_shifted = add(sums.sum_exp_shifted, shifted);
        }
        if (KIND >= WITH_SQUARED) {
            Vec squared = mul(e[0], e[0]);
            for (int k = 1; k < N; k++) squared = fma(e[k], e[k], squared);
            sums.sum_exp_squared = add(sums.sum_exp_squared, squared);
        }
        if (SAVES) {
            for (int k = 0; k < N; k++) {
                Vec first = e[k];
                Vec second = log_ratio[k];
                if (FORWARD_KL) {
                    const Vec e_minus_ref = sub(excess[k], log_ratio[k]);
                    first = select(is_far[k], negate(e[k]), e[k]);
                    second = select(is_far[k], negate(e_ref[k]), e_minus_ref);
                }
                const float* dtanh_k = offset_or_null(dtanh, k * LANES);
                save_terms(*saved, j + k * LANES, first, second, dtanh_k, count);
            }
        }
        sums.sum_log_ratio = add(sums.sum_log_ratio, sum_of(log_ratio));
        sums.sum_log_ratio_excess = add(sums.sum_log_ratio_excess, sum_of(excess));
    }
    static INLINED Vec sum_of(const Vec (&vectors)[1]) { return vectors[0]; }
    static INLINED Vec sum_of(const Vec (&vectors)[2]) { return add(vectors[0], vectors[1]); }

    // Adds all columns of both rows, block by block.
    void add_rows(int64_t vocab) {
        PairBuffers buffers;
        float* dtanh = SAVES && policy.transform.mode == SOFTCAP ? buffers.dtanh : nullptr;
        for (int64_t j = 0; j < vocab; j += BLOCK_COLUMNS) {
            const int64_t n = min(BLOCK_COLUMNS, vocab - j);
            const LogitBlock block = policy.read(j, n, buffers.policy, dtanh);
            const LogitBlock reference_block = reference.read(j, n, buffers.reference);
            add_block(block, reference_block, j, n, dtanh);
        }
        // As in RunningSums::finish.
        if (max_logit > -INFINITY && total.sum_exp < 1) total.sum_exp = 1;
        if (reference_max_logit > -INFINITY && total.reference_sum_exp < 1) {
            total.reference_sum_exp = 1;
        }
    }
    PairSums sums() const {
        return {
            max_logit,
            float(total.sum_exp),
            reference_max_logit,
            float(total.reference_sum_exp),
            float(total.sum_log_ratio),
            float(total.sum_log_ratio_excess)};
    }
};

// Computes the softmax sums of row i of policy and reference.
template <bool FORWARD_KL, SumKind KIND>
void softmax_sums_of_pair(const SoftmaxSumsJob& job, int64_t i) {
    const int64_t vocab = job.policy.rows.vocab;
    const BlockReader policy(job.policy, i);
    const BlockReader reference(job.reference->logits, i);
    RunningPairSums<FORWARD_KL, KIND, false> running(policy, reference);
    running.add_rows(vocab);
    const PairSums sums = running.sums();
    const TargetLogit target(policy, job.targets[i], vocab);
    job.sums[MAX_LOGIT][i] = sums.max_logit;
    job.sums[SUM_EXP][i] = sums.sum_exp;
    job.sums[TARGET_LOGIT][i] = float(target.z);
    if (KIND >= WITH_SHIFTED) job.sums[SUM_EXP_SHIFTED][i] = float(running.total.sum_exp_shifted);
    if (KIND >= WITH_SQUARED) job.sums[SUM_EXP_SQUARED][i] = float(running.total.sum_exp_squared);
    if (job.sums[ARGMAX]) {
        set_argmax(job.sums, i, find_logit(policy, running.argmax_block, vocab, sums.max_logit));
    }
    job.sums[REFERENCE_MAX_LOGIT][i] = sums.reference_max_logit;
    job.sums[REFERENCE_SUM_EXP][i] = sums.reference_sum_exp;
    job.sums[SUM_LOG_RATIO][i] = sums.sum_log_ratio;
    job.sums[SUM_LOG_RATIO_EXCESS][i] = sums.sum_log_ratio_excess;
}

template <bool FORWARD_KL> void softmax_sums_of_pair(const SoftmaxSumsJob& job, int64_t i) {
    switch (requested_sums(job.sums)) {
        case SUM_EXP_ONLY: return softmax_sums_of_pair<FORWARD_KL, SUM_EXP_ONLY>(job, i);
        case WITH_SHIFTED: return softmax_sums_of_pair<FORWARD_KL, WITH_SHIFTED>(job, i);
        default: return softmax_sums_of_pair<FORWARD_KL, WITH_SQUARED>(job, i);
    }
}

void softmax_sums_of_pair(const SoftmaxSumsJob& job, int64_t i) {
    if (job.reference->direction == FORWARD) return softmax_sums_of_pair<true>(job, i);
    softmax_sums_of_pair<false>(job, i);
}

// ---- the second pass, of JSD and TV

// Both sums of a row, see enum MixtureSum.
struct MixtureSums {
    float policy, reference;

    // Returns the divergence that follows from the sums: JSD or TV.
    float divergence(const ReferenceRows& rows) const {
        if (rows.direction == TV) return reference;
        return float(rows.mixture * reference + (1.0 - rows.mixture) * policy);
    }
};

// Computes both sums of a row in a second pass, for the terms of `Column` (JsdColumn or TvColumn).
// `sums` and log_sum_ratio, from the first pass, normalize p and q. SAVES: the terms of the
// gradient are saved.
template <class Column, bool SAVES>
MixtureSums sum_mixture_terms(
    const BlockReader& policy, const BlockReader& reference, int64_t vocab, const PairSums& sums,
    float log_sum_ratio, double mixture, SavedTerms* saved) {
    // NaN in either row, or nothing but -inf.
    if (!(fabsf(log_sum_ratio) < INFINITY)) return {NAN, NAN};
    const RowMaxima maxima(sums.max_logit, sums.reference_max_logit);
    const MixtureTerms<Column> mixture_terms = {
        maxima,
        broadcast(log_sum_ratio),
        broadcast(float(mixture)),
        broadcast(float(1.0 - mixture)),
        broadcast(float(1.0 / double(sums.sum_exp))),
        broadcast(float(1.0 / double(sums.reference_sum_exp)))};
    double policy_total = 0, reference_total = 0;
    PairBuffers buffers;
    float* dtanh = SAVES && policy.transform.mode == SOFTCAP ? buffers.dtanh : nullptr;
    if (SAVES) saved->begin_segment(0, sums.max_logit, sums.reference_max_logit);
    for (int64_t j = 0; j < vocab; j += BLOCK_COLUMNS) {
        const int64_t n = min(BLOCK_COLUMNS, vocab - j);
        const float* z = policy.read(j, n, buffers.policy, dtanh).z;
        const float* w = reference.read(j, n, buffers.reference).z;
        for (int64_t begin = 0; begin < n; begin += FP32_PAIR_SUM_COLUMNS) {
            const int64_t end = min(begin + FP32_PAIR_SUM_COLUMNS, n);
            Vec policy_sum = broadcast(0.0f);
            Vec reference_sum = broadcast(0.0f);
            for (int64_t k = begin; k < end; k += LANES) {
                if (k % GROUP_COLUMNS == 0) {
                    policy.prefetch_next_block(j + k);
                    reference.prefetch_next_block(j + k);
                }
                const GradientTerms terms =
                    mixture_terms.add_terms(load(z + k), load(w + k), policy_sum, reference_sum);
                if (!SAVES) continue;
                const int count = int(min(LANES, n - k));
                const float* dtanh_k = offset_or_null(dtanh, k);
                save_terms(*saved, j + k, terms.prob, terms.prob_times_factor, dtanh_k, count);
            }
            policy_total += sum_lanes(policy_sum);
            reference_total += sum_lanes(reference_sum);
        }
    }
    return {float(policy_total), float(reference_total)};
}

template <bool SAVES>
MixtureSums sum_mixture_terms(
    const BlockReader& policy, const BlockReader& reference, int64_t vocab, const PairSums& sums,
    float log_sum_ratio, const ReferenceRows& rows, SavedTerms* saved) {
    if (rows.direction == TV) {
        return sum_mixture_terms<TvColumn, SAVES>(
            policy, reference, vocab, sums, log_sum_ratio, rows.mixture, saved);
    }
    return sum_mixture_terms<JsdColumn, SAVES>(
        policy, reference, vocab, sums, log_sum_ratio, rows.mixture, saved);
}

// The maxima and sums of exponentials of row i; the other sums are not needed.
PairSums normalizers_of(const NamedRows<NUM_SUMS>& sums, int64_t i) {
    return {
        sums[MAX_LOGIT][i],
        sums[SUM_EXP][i],
        sums[REFERENCE_MAX_LOGIT][i],
        sums[REFERENCE_SUM_EXP][i],
        0,
        0};
}

// Computes both sums of enum MixtureSum of row i; masked rows get 0.
void mixture_sums(const MixtureSumsJob& job, int64_t i) {
    MixtureSums result = {0, 0};
    if (!job.mask || job.mask[i]) {
        const ReferenceRows& rows = *job.reference;
        const BlockReader policy(job.policy, i);
        const BlockReader reference(rows.logits, i);
        const PairSums sums = normalizers_of(job.sums, i);
        result = sum_mixture_terms<false>(
            policy, reference, job.policy.rows.vocab, sums, rows.log_sum_ratio[i], rows, nullptr);
    }
    job.mixture_sums[MIXTURE_POLICY][i] = result.policy;
    job.mixture_sums[MIXTURE_REFERENCE][i] = result.reference;
}

// ---- gradients

// d loss / d x_j, with x_j = z_j - max_logit, e_j = exp(x_j), e_ref_j likewise and D_j = log p_j -
// log q_j, for SOFTCAP times 1 - tanh^2:
//   e_j (per_exp + per_exp_shifted x_j + per_exp_squared e_j) + divergence term
// as in GradientPolynomial. The divergence term, with c = divergence_per_exp and
// c_ref = divergence_per_exp_ref, is
//   REVERSE  c e_j d_j           d_j: D_j without log_sum_ratio, which per_exp has
//   FORWARD  c e_j - c_ref e_ref_j
//   JSD      c e_j (log p_j - log m_j)
//   TV       c e_j sign(p_j - q_j) / 2
struct PairGradientFactors {
    Vec per_exp, per_exp_shifted, per_exp_squared;
    Vec divergence_per_exp, divergence_per_exp_ref;
    Vec log_sum_ratio;
    Vec b, one_minus_b;
};

// Computes d loss / d x of N vectors of columns, by the formula of PairGradientFactors, for SOFTCAP
// without the factor 1 - tanh^2.
template <int DIRECTION, bool NEARLY_EQUAL, int N>
INLINED void gradients_of_pair(
    const float* z, const float* w, const RowMaxima& maxima, const PairGradientFactors& factors,
    Vec (&gradients)[N]) {
    Vec x[N], y[N], d[N], e[N], e_ref[N];
    Mask above_cutoff[N], reference_above_cutoff[N];
    for (int k = 0; k < N; k++) {
        const Vec z_k = load(z + k * LANES);
        const Vec w_k = load(w + k * LANES);
        x[k] = sub(z_k, maxima.policy);
        y[k] = sub(w_k, maxima.reference);
        d[k] = maxima.log_ratio<NEARLY_EQUAL>(z_k, w_k, x[k], y[k]);
        above_cutoff[k] = not_less(x[k], broadcast(EXP_CUTOFF));
        reference_above_cutoff[k] = not_less(y[k], broadcast(EXP_CUTOFF));
    }
    exp_where(above_cutoff, x, e);
    if (DIRECTION == FORWARD) exp_where(reference_above_cutoff, y, e_ref);
    for (int k = 0; k < N; k++) {
        const Vec without_shifted = fma(factors.per_exp_squared, e[k], factors.per_exp);
        const Vec factor =
            fma_where(above_cutoff[k], factors.per_exp_shifted, x[k], without_shifted);
        const Vec D = add(d[k], factors.log_sum_ratio);
        if (DIRECTION == FORWARD) {
            const Vec prob_ratio_term = sub(D, expm1_minus_x_near_0(negate(D)));  // 1 - e^-D
            const Vec near = mul(mul(factors.divergence_per_exp, prob_ratio_term), e[k]);
            const Vec far = fma(
                factors.divergence_per_exp, e[k],
                negate(mul(factors.divergence_per_exp_ref, e_ref[k])));
            const Mask is_far = not_less(absolute(D), broadcast(NEAR_ZERO));
            const Vec policy_gradient = mul_where(above_cutoff[k], e[k], factor);
            gradients[k] = add(policy_gradient, select(is_far, far, near));
            continue;
        }
        Vec divergence_factor = d[k];
        if (DIRECTION == TV) divergence_factor = half_sign(D);
        if (DIRECTION == JSD) {
            divergence_factor = JsdColumn(D, factors.b, factors.one_minus_b).gradient_factor();
        }
        const Vec both = fma(factors.divergence_per_exp, divergence_factor, factor);
        gradients[k] = mul_where(above_cutoff[k], e[k], both);
    }
}

// The logits of both rows in the target's column.
struct TargetLogitPair : TargetLogit {
    double reference_z = NAN;

    TargetLogitPair(
        const LogitRow& policy, const LogitRow& reference, int64_t target, int64_t vocab)
        : TargetLogit(policy, target, vocab) {
        if (in_vocab) reference_z = reference.logit_at(column).z;
    }
};

// d divergence / d z of the target's column, in fp64.
double divergence_gradient_of_target(
    const ReferenceRows& rows, double x, double logp, double logq, double log_ratio,
    double center) {
    // A probability that the kernels' exponentials take for 0 is 0 here, too: log_ratio may then be
    // anything, and below -709 its exponential is infinite.
    if (x < EXP_CUTOFF) return rows.direction == FORWARD ? -exp(logq) : 0.0;
    const double p = exp(logp);
    const double b = rows.mixture;
    switch (rows.direction) {
        case REVERSE: return p * (log_ratio - center);
        case FORWARD: return -p * expm1(-log_ratio);
        case TV: return p * (0.5 * ((log_ratio > 0) - (log_ratio < 0)) - center);
        default: return (1 - b) * p * (-log1p(b * expm1(-log_ratio)) - center);  // JSD
    }
}

// What the gradient of a row is computed from.
struct PairGradient {
    const ReferenceRows& rows;
    const RowCoefficients coefficients;
    const PairSums& sums;
    const double divergence;  // d loss / d divergence
    const double log_sum_ratio, center;
    const double sum_exp;
    const GradientPolynomial policy;  // without the divergence
    const double divergence_per_exp, divergence_per_exp_ref;  // see PairGradientFactors

    PairGradient(
        const ReferenceRows& rows, const RowCoefficients& coefficients, double divergence,
        const FusedTransform& t, const PairSums& sums, double log_sum_ratio, double center)
        : rows(rows),
          coefficients(coefficients),
          sums(sums),
          divergence(divergence),
          log_sum_ratio(log_sum_ratio),
          center(center),
          sum_exp(sums.sum_exp),
          policy(coefficients, t, sums.max_logit, sum_exp, log(sum_exp)),
          divergence_per_exp(
              divergence * (rows.direction == JSD ? 1.0 - rows.mixture : 1.0) * t.dz_dx / sum_exp),
          divergence_per_exp_ref(
              rows.direction == FORWARD ? divergence * t.dz_dx / sums.reference_sum_exp : 0.0) {}

    // The gradient is infinite wherever p is not 0.
    bool is_infinite() const { return rows.direction == REVERSE && center == INFINITY; }

    double per_exp() const {
        double constant = -center;
        if (rows.direction == REVERSE) constant = log_sum_ratio - center;
        if (rows.direction == FORWARD) constant = 0.0;
        return policy.per_exp + divergence_per_exp * constant;
    }
    // As GradientPolynomial::is_finite: false if either row has a NaN or +inf.
    bool is_finite() const {
        if (!policy.is_finite()) return false;
        if (divergence == 0) return true;
        const bool per_exp_is_valid = is_infinite() || fabs(per_exp()) < INFINITY;
        return per_exp_is_valid && fabs(divergence_per_exp) < INFINITY &&
               fabs(divergence_per_exp_ref) < INFINITY && fabs(log_sum_ratio) < INFINITY &&
               fabsf(sums.reference_max_logit) < INFINITY;
    }
    PairGradientFactors factors() const {
        return {broadcast(float(per_exp())),
                broadcast(float(policy.per_exp_shifted)),
                broadcast(float(policy.per_exp_squared)),
                broadcast(float(divergence_per_exp)),
                broadcast(float(divergence_per_exp_ref)),
                broadcast(float(log_sum_ratio)),
                broadcast(float(rows.mixture)),
                broadcast(float(1.0 - rows.mixture))};
    }
    // Returns d loss / d x of the target's column, in fp64, where the differences to the maxima are
    // exact whether the rows are close or not.
    float gradient_of_target(const TargetLogitPair& target) const {
        const double x = target.z - sums.max_logit;
        const double y = target.reference_z - sums.reference_max_logit;
        const double logp = x - log(sum_exp);
        const double logq = y - log(double(sums.reference_sum_exp));
        const double log_ratio = (x - y) + log_sum_ratio;
        double divergence_term = 0.0;
        if (divergence != 0) {
            divergence_term =
                divergence * divergence_gradient_of_target(rows, x, logp, logq, log_ratio, center) *
                target.dz_dx;
        }
        return float(target_gradient(coefficients, logp, target.dz_dx) + divergence_term);
    }
};

// Writes the gradient of a row from the logits of both rows, block by block, except that the value
// at the target lacks a term, which the caller overwrites.
template <int DIRECTION, bool NEARLY_EQUAL, class Out>
void write_pair_gradient(
    const BlockReader& policy, const BlockReader& reference, const PairGradient& gradient,
    const RowMaxima& maxima, Out* out, int64_t vocab) {
    const PairGradientFactors factors = gradient.factors();
    const bool has_softcap = policy.transform.mode == SOFTCAP;
    PairBuffers buffers;
    for (int64_t j = 0; j < vocab; j += BLOCK_COLUMNS) {
        const int64_t n = min(BLOCK_COLUMNS, vocab - j);
        // A block is read before it is written: the gradient, in the same or a narrower dtype, may
        // overwrite the logits.
        const float* z = policy.read(j, n, buffers.policy, buffers.dtanh).z;
        const float* w = reference.read(j, n, buffers.reference).z;
        int64_t k = 0;
        for (; k + GROUP_COLUMNS <= n; k += GROUP_COLUMNS) {
            policy.prefetch_next_block(j + k);
            reference.prefetch_next_block(j + k);
            Vec group[VECTORS_PER_GROUP];
            gradients_of_pair<DIRECTION, NEARLY_EQUAL, VECTORS_PER_GROUP>(
                z + k, w + k, maxima, factors, group);
            for (int v = 0; v < VECTORS_PER_GROUP; v++) {
                const int64_t column = k + v * LANES;
                if (has_softcap) group[v] = mul(group[v], load(buffers.dtanh + column));
                store(out + j + column, group[v]);
            }
        }
        for (; k < n; k += LANES) {
            Vec single[1];
            gradients_of_pair<DIRECTION, NEARLY_EQUAL, 1>(z + k, w + k, maxima, factors, single);
            if (has_softcap) single[0] = mul(single[0], load(buffers.dtanh + k));
            store_first(out + j + k, single[0], int(min(LANES, n - k)));
        }
    }
}

template <int DIRECTION>
void write_pair_gradient(
    const BlockReader& policy, const BlockReader& reference, const PairGradient& gradient,
    const GradientRow& row) {
    const RowMaxima maxima(gradient.sums.max_logit, gradient.sums.reference_max_logit);
    with_dtype(row.dtype, [&](auto element) {
        auto* out = reinterpret_cast<decltype(element)*>(row.base);
        if (maxima.nearly_equal) {
            write_pair_gradient<DIRECTION, true>(
                policy, reference, gradient, maxima, out, row.vocab);
        } else {
            write_pair_gradient<DIRECTION, false>(
                policy, reference, gradient, maxima, out, row.vocab);
        }
    });
}

void write_pair_gradient(
    const BlockReader& policy, const BlockReader& reference, const PairGradient& gradient,
    const GradientRow& row) {
    switch (gradient.rows.direction) {
        case REVERSE: return write_pair_gradient<REVERSE>(policy, reference, gradient, row);
        case FORWARD: return write_pair_gradient<FORWARD>(policy, reference, gradient, row);
        case JSD: return write_pair_gradient<JSD>(policy, reference, gradient, row);
        default: return write_pair_gradient<TV>(policy, reference, gradient, row);
    }
}

// Writes the gradient of row i, of a loss with a divergence from the reference. It is NaN if either
// row has a NaN or +inf.
void divergence_gradient_row(
    const SoftmaxGradientJob& job, int64_t i, const RowCoefficients& coefficients) {
    const BlockReader policy(job.policy, i);
    const BlockReader reference(job.reference->logits, i);
    const GradientRow row(job.grad_logits, i);
    const PairSums sums = normalizers_of(job.sums, i);
    const PairGradient gradient(
        *job.reference, coefficients, job.coefficients[DIVERGENCE][i], policy.transform, sums,
        job.reference->log_sum_ratio[i], job.reference->center[i]);
    if (!gradient.is_finite()) return row.fill_nan();
    const TargetLogitPair target(policy, reference, job.targets[i], row.vocab);
    write_pair_gradient(policy, reference, gradient, row);
    if (target.in_vocab) row.set(target.column, gradient.gradient_of_target(target));
}

// ---- the gradient from saved terms, see save_terms

// Returns the factors that turn the saved terms of a segment into the gradient. The terms are
// relative to the maxima of the segment (JSD and TV: they are probabilities).
SegmentFactors saved_term_factors(const PairGradient& g, const Segment& segment) {
    if (g.rows.direction >= JSD) {
        const Vec first = term_factor(g.sum_exp * g.per_exp());
        return {first, first, term_factor(g.sum_exp * g.divergence_per_exp)};
    }
    // As in RunningPairSums::rescale_to: while one of the rows had nothing but -inf, differences of
    // the maxima have no meaning.
    const bool empty = segment.shift == -INFINITY;
    const bool reference_empty = segment.reference_shift == -INFINITY;
    const double change = double(segment.shift) - g.sums.max_logit;
    const double reference_change = double(segment.reference_shift) - g.sums.reference_max_logit;
    const double rescaled = empty ? 0.0 : exp(change);
    const double shift = empty || reference_empty ? 0.0 : change - reference_change;
    const double log_ratio = shift + g.log_sum_ratio;
    if (g.rows.direction == REVERSE) {
        const double constant =
            g.divergence == 0 ? 0.0 : g.divergence_per_exp * (log_ratio - g.center);
        const Vec first = term_factor(rescaled * (g.policy.per_exp + constant));
        return {first, first, term_factor(rescaled * g.divergence_per_exp), rescaled < MIN_NORMAL};
    }
    if (g.divergence == 0) {
        return {term_factor(rescaled * g.policy.per_exp), broadcast(0.0f), broadcast(0.0f)};
    }
    const double reference_factor =
        reference_empty ? 0.0 : g.divergence_per_exp_ref * exp(reference_change);
    const bool near = !empty && !reference_empty && fabs(log_ratio) <= NEAR_ZERO;
    const double policy_minus_reference =
        near ? -rescaled * g.divergence_per_exp * expm1(-log_ratio)
             : rescaled * g.divergence_per_exp - reference_factor;
    return {
        term_factor(rescaled * g.policy.per_exp + policy_minus_reference),
        term_factor(-rescaled * (g.policy.per_exp + g.divergence_per_exp)),
        term_factor(reference_factor)};
}

// ---- the fused loss

// The sums of both rows, and the policy's sum for the entropy.
struct PairSumsPass {
    PairSums sums;
    double sum_exp_shifted;
};

// Computes the sums of both rows in one pass. SAVES: the terms of the gradient are saved.
template <bool FORWARD_KL, bool SAVES>
PairSumsPass sum_pair(
    const BlockReader& policy, const BlockReader& reference, int64_t vocab, SavedTerms* saved) {
    RunningPairSums<FORWARD_KL, WITH_SHIFTED, SAVES> running(policy, reference, saved);
    running.add_rows(vocab);
    return {running.sums(), float(running.total.sum_exp_shifted)};
}

PairSumsPass sum_pair(
    const BlockReader& policy, const BlockReader& reference, int64_t vocab, bool forward,
    bool saves, SavedTerms* saved) {
    if (forward && saves) return sum_pair<true, true>(policy, reference, vocab, saved);
    if (forward) return sum_pair<true, false>(policy, reference, vocab, saved);
    if (saves) return sum_pair<false, true>(policy, reference, vocab, saved);
    return sum_pair<false, false>(policy, reference, vocab, saved);
}

// Returns how the gradient follows from the saved terms of a row.
TermFormula saved_term_formula(const PairGradient& gradient) {
    if (gradient.divergence == 0) return FIRST;
    if (gradient.is_infinite()) return INFINITE;
    return gradient.rows.direction == FORWARD ? BY_SIGN : BOTH;
}

// Computes the sums of row i of policy and reference, then the divergence and the loss formula,
// then the gradient.
void fused_loss_of_pair(const FusedLossJob& job, int64_t i, const SavedTermsBuffer& buffer) {
    const ReferenceRows& rows = *job.reference;
    const int64_t vocab = job.policy.rows.vocab;
    const BlockReader policy(job.policy, i);
    const BlockReader reference(rows.logits, i);
    const GradientRow row(job.grad_logits, i);
    const TargetLogitPair target(policy, reference, job.targets[i], vocab);
    const float weight = rows.divergence_weight ? rows.divergence_weight[i] : 0.0f;

    // The gradient of the entropy needs the logits, so then nothing is saved. JSD and TV save their
    // terms in the second pass, and only if the divergence has a weight: without one that pass may
    // return early and save nothing.
    const bool needs_two_passes = rows.direction >= JSD;
    const bool may_save = row.base && !job.loss_has_entropy && buffer.segments;
    const bool saves = may_save && (!needs_two_passes || weight != 0);
    SavedTerms saved = saved_terms_for(policy, row, buffer);

    const bool forward = rows.direction == FORWARD;
    const PairSumsPass pass =
        sum_pair(policy, reference, vocab, forward, saves && !needs_two_passes, &saved);
    const PairSums& sums = pass.sums;
    const KlDivergence kl = sums.kl_divergence(forward);
    const float log_sum_ratio = float(kl.log_sum_ratio);
    float divergence = float(kl.value);
    float center = rows.direction == REVERSE ? divergence : 0.0f;
    if (needs_two_passes) {
        const auto sum_terms = saves ? sum_mixture_terms<true> : sum_mixture_terms<false>;
        const MixtureSums mixture_sums =
            sum_terms(policy, reference, vocab, sums, log_sum_ratio, rows, &saved);
        divergence = mixture_sums.divergence(rows);
        center = mixture_sums.policy;
    }

    const Softmax softmax(sums.max_logit, sums.sum_exp, target.z, pass.sum_exp_shifted);
    const TokenGradients token = run_loss_program(job, i, float(softmax.logp), softmax.entropy);
    job.outputs[DIVERGENCES][i] = divergence;
    if (weight != 0) job.outputs[LOSSES][i] += weight * divergence;
    if (!row.base) return;

    RowCoefficients coefficients = row_coefficients(token, softmax.entropy);
    if (coefficients.all_zero() && weight == 0) return row.fill_zero();
    if (weight == 0 && !saves) {
        // The reference's row is not used: it may hold anything, NaN included. The constant is
        // rounded as the coefficients of softmax_gradient_row are.
        coefficients.constant = float(coefficients.constant);
        const GradientPolynomial polynomial(
            coefficients, policy.transform, sums.max_logit, sums.sum_exp, softmax.log_sum_exp);
        if (!polynomial.is_finite()) return row.fill_nan();
        gradient_from_logits(policy, row, polynomial);
        if (!target.in_vocab) return;
        row.set(target.column, target_gradient(coefficients, softmax.logp, target.dz_dx));
        return;
    }
    const PairGradient gradient(
        rows, coefficients, weight, policy.transform, sums, log_sum_ratio, center);
    if (!gradient.is_finite()) return row.fill_nan();
    if (saves) {
        const auto factors_of = [&](const Segment& segment) {
            return saved_term_factors(gradient, segment);
        };
        gradient_from_saved(saved, row, saved_term_formula(gradient), false, factors_of);
    } else {
        write_pair_gradient(policy, reference, gradient, row);
    }
    if (target.in_vocab) row.set(target.column, gradient.gradient_of_target(target));
}

}  // namespace
}  // namespace grpo
