// The table of row kernels of one instruction set, which GRPO_ISA names. module.cpp picks a table
// at run time. No C++ library header is included here: its inline functions, compiled for AVX-512,
// could replace those of other files at link time and crash on processors without AVX-512.
#include "divergence_rows.h"
#include "pairs.h"

namespace grpo {
namespace {

// Stores constants as the sums of masked row i, so that its log-prob, entropy and divergence are 0.
// They are MASKED_VALUES of core/softmax.py.
void set_sums_of_masked_row(const NamedRows<NUM_SUMS>& sums, int64_t i) {
    for (int name = 0; name < NUM_SUMS; name++) {
        if (name == ARGMAX || !sums[name]) continue;
        const bool is_sum_exp = name == SUM_EXP || name == REFERENCE_SUM_EXP;
        sums[name][i] = is_sum_exp ? 1.0f : 0.0f;
    }
    if (sums[ARGMAX]) set_argmax(sums, i, -1);
}

// Computes the softmax sums of row i, with or without a reference.
void softmax_sums(const SoftmaxSumsJob& job, int64_t i) {
    const bool is_masked = job.mask && !job.mask[i];
    if (is_masked) return set_sums_of_masked_row(job.sums, i);
    if (job.reference) return softmax_sums_of_pair(job, i);
    softmax_sums_of_row(job, i);
}

// Writes the gradient of row i. The reference is read only if the row's divergence coefficient is
// not 0.
void softmax_gradient(const SoftmaxGradientJob& job, int64_t i) {
    const RowCoefficients coefficients(job.coefficients, i);
    const bool has_divergence = job.reference && job.coefficients[DIVERGENCE][i] != 0;
    if (has_divergence) return divergence_gradient_row(job, i, coefficients);
    softmax_gradient_row(job, i, coefficients);
}

// Writes log-prob, entropy, loss, divergence and gradient 0. Nothing of the row is read, which may
// hold NaN.
void fused_loss_of_masked_row(const FusedLossJob& job, int64_t i) {
    job.outputs[LOGPS][i] = 0;
    job.outputs[ENTROPIES][i] = 0;
    job.outputs[LOSSES][i] = 0;
    if (job.reference) job.outputs[DIVERGENCES][i] = 0;
    if (job.grad_logits.base) GradientRow(job.grad_logits, i).fill_zero();
}

// Computes log-prob, entropy, loss and gradient of row i, with or without a reference.
void fused_loss(const FusedLossJob& job, int64_t i, const SavedTermsBuffer& buffer) {
    const bool is_masked = job.mask && !job.mask[i];
    if (is_masked) return fused_loss_of_masked_row(job, i);
    if (job.reference) return fused_loss_of_pair(job, i, buffer);
    fused_loss_of_row(job, i, buffer);
}

}  // namespace

#define STRING_OF(isa) #isa
#define QUOTED(isa) STRING_OF(isa)
#define CONCATENATED(a, b) a##b
#define TABLE_OF(isa) CONCATENATED(kernels_, isa)

extern const Kernels TABLE_OF(GRPO_ISA);
const Kernels TABLE_OF(GRPO_ISA) = {
    QUOTED(GRPO_ISA), softmax_sums, mixture_sums, softmax_gradient,
    fused_loss,       scale,        pair_logits,  segmented_sum,
};

}  // namespace grpo
