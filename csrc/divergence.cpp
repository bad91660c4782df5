// The kernels of divergence.h. Compiled once per instruction set, and without C++ library headers: see kernels.cpp.
#include "divergence.h"

#include "two_visits.h"

namespace grpo {
namespace {

// ---- statistics

template <bool FORWARD_KL, Kind KIND> void stats_of_rows(const TwoStats& job, int64_t i) {
    const StatsJob& of = job.student;
    const int64_t row = of.first + i, target = of.targets[i];
    const Stream student(of.logits, row, of.transform, i), teacher(job.teacher.logits, row, job.teacher.transform, i);
    RunningPair<FORWARD_KL, KIND, false> sums;
    sums.visit(student, teacher, of.vocab);
    const TwoSums& total = sums.total;
    of.max[i] = sums.max, of.sum[i] = float(total.sum);
    if (KIND >= WEIGHTED) of.weighted[i] = float(total.weighted);
    if (KIND >= SQUARES) of.squares[i] = float(total.squares);
    of.target[i] = target >= 0 && target < of.vocab ? student.logit(target) : NAN;
    if (of.top) {
        of.top[i] = -1;
        for (int64_t j = sums.top_block; j >= 0 && j < of.vocab; j++) {
            if (student.logit(j) != sums.max) continue;
            of.top[i] = int32_t(j);
            break;
        }
    }
    job.max[i] = sums.teacher_max, job.sum[i] = float(total.teacher_sum);
    job.cross[i] = float(total.cross), job.excess[i] = float(total.excess);
}

template <bool FORWARD_KL> void stats_of_rows(const TwoStats& job, int64_t i) {
    if (job.student.squares) return stats_of_rows<FORWARD_KL, SQUARES>(job, i);
    job.student.weighted ? stats_of_rows<FORWARD_KL, WEIGHTED>(job, i) : stats_of_rows<FORWARD_KL, SUM>(job, i);
}

void stats(const TwoStats& job, int64_t i) {
    const StatsJob& of = job.student;
    if (!of.read || of.read[i]) {
        return job.teacher.direction == FORWARD ? stats_of_rows<true>(job, i) : stats_of_rows<false>(job, i);
    }
    of.max[i] = 0, of.sum[i] = 1, of.target[i] = 0;
    if (of.weighted) of.weighted[i] = 0;
    if (of.squares) of.squares[i] = 0;
    if (of.top) of.top[i] = -1;
    job.max[i] = 0, job.sum[i] = 1, job.cross[i] = 0, job.excess[i] = 0;
}

// ---- both rows and their mixture m = (1 - b) p + b q

struct MixedKl {
    float student, teacher;
};

template <bool KEEPS>
MixedKl mixed_kl(const Stream& student, const Stream& teacher, int64_t vocab, const Known& of, float log_sums, double mixture,
                 const KeptTerms* kept) {
    if (!(fabsf(log_sums) < INFINITY)) return {NAN, NAN};  // NaN in either row, or nothing but -inf
    const Shifts shifts(of.max, of.teacher_max);
    const MixtureOf mixture_of = {shifts, all(log_sums), all(float(mixture)), all(float(1.0 - mixture)), all(float(1.0 / double(of.sum))),
                                  all(float(1.0 / double(of.teacher_sum)))};
    double student_kl = 0, teacher_kl = 0;
    Block block;
    float* slopes = KEEPS && student.t.mode == CAPPED ? block.slopes : nullptr;
    for (int64_t j = 0; j < vocab; j += LOGITS) {
        const int64_t n = min(LOGITS, vocab - j);
        const float *z = student.logits(j, n, block.z, slopes).z, *w = teacher.logits(j, n, block.w).z;
        if (KEEPS) kept->maxima[j / LOGITS] = {of.max, of.teacher_max};
        for (int64_t k = 0; k < n; k += SUMMED) {
            F of_student = all(0.0f), of_teacher = all(0.0f);
            for (int64_t at = k; at < min(k + SUMMED, n); at += W) {
                if (at % GROUP == 0) student.prefetch(j + at), teacher.prefetch(j + at);
                const auto [p, of_p] = mixture_of.add_terms(load(z + at), load(w + at), of_student, of_teacher);
                if (KEEPS) kept->put(j + at, p, of_p, slopes ? slopes + at : nullptr, int(min(W, n - at)));
            }
            student_kl += sum_lanes(of_student), teacher_kl += sum_lanes(of_teacher);
        }
    }
    return {float(student_kl), float(teacher_kl)};
}

void mixed(const MixedJob& job, int64_t i) {
    if (job.read && !job.read[i]) {
        job.student_kl[i] = job.teacher_kl[i] = 0;
        return;
    }
    const int64_t row = job.first + i;
    const Stream student(job.logits, row, job.transform, i), teacher(job.teacher.logits, row, job.teacher.transform, i);
    const Known of = {job.of.max[i], job.of.sum[i], job.of.teacher_max[i], job.of.teacher_sum[i], 0, 0};
    const MixedKl found = mixed_kl<false>(student, teacher, job.vocab, of, job.of.log_sums[i], job.teacher.mixture, nullptr);
    job.student_kl[i] = found.student, job.teacher_kl[i] = found.teacher;
}

// ---- gradients

template <class O> void pull_rows(const TwoPull& job, int64_t i) {
    const PullJob& of = job.student;
    const int64_t row = of.first + i;
    O* out = reinterpret_cast<O*>(of.out.row(row));
    const Stream student(of.logits, row, of.transform, i), teacher(job.teacher.logits, row, job.teacher.transform, i);
    const Slopes slopes = {of.slope[i], of.constant ? of.constant[i] : 0.0, of.log ? of.log[i] : 0.0, of.prob ? of.prob[i] : 0.0};
    const Known known = {of.max[i], of.sum[i], job.of.teacher_max[i], job.of.teacher_sum[i], 0, 0};
    const PairGradient gradient(job.teacher, slopes, job.slope[i], student.t, known, job.of.log_sums[i], job.center[i]);
    if (!gradient.finite()) return fill_nan(out, of.vocab);
    const AtTarget target(student, teacher, of.targets[i], of.vocab);  // before its logit may be overwritten
    write_gradient(student, teacher, gradient, out, of.vocab);
    if (target.there) store_some(out + of.targets[i], all(gradient.at(target)), 1);
}

void pull(const TwoPull& job, int64_t i) {
    if (job.slope[i] == 0) return job.without(job.student, i);
    switch (job.student.out.dtype) {
        case FP32: return pull_rows<float>(job, i);
        case BF16: return pull_rows<bf16>(job, i);
        default: return pull_rows<fp16>(job, i);
    }
}

// ---- statistics, loss and gradient in one call

struct FirstVisit {
    Known known;
    double weighted;
};

template <bool FORWARD_KL, bool KEEPS>
FirstVisit first_visit(const Stream& student, const Stream& teacher, int64_t vocab, const KeptTerms* kept) {
    RunningPair<FORWARD_KL, WEIGHTED, KEEPS> sums;
    sums.kept = kept;
    sums.visit(student, teacher, vocab);
    return {sums.known(), float(sums.total.weighted)};
}

// The gradient of a row whose loss has no divergence. The teacher's row is not used: it may hold anything, NaN included.
void pull_alone(const TwoFused& job, int64_t i, const Slopes& slopes, const Known& known, float logit) {
    const FusedJob& of = job.student;
    const float target = float(slopes.target), constant = float(slopes.constant), log = float(slopes.log);
    const Transform transform = {of.transform.scale, of.transform.softcap, of.transform.inverse(i), nullptr};
    job.without({of.logits, of.out, of.vocab, i, transform, of.targets + i, &known.max, &known.sum, &logit, &target, &constant, &log,
                 nullptr}, 0);
}

template <class O> void fused_rows(const TwoFused& job, int64_t i, const TwoScratch& scratch) {
    const FusedJob& of = job.student;
    const int direction = job.teacher.direction;
    const Stream student(of.logits, i, of.transform, i), teacher(job.teacher.logits, i, job.teacher.transform, i);
    O* out = of.out.base ? reinterpret_cast<O*>(of.out.row(i)) : nullptr;
    const AtTarget target(student, teacher, of.targets[i], of.vocab);  // before its logit may be overwritten

    const float c = job.weight ? job.weight[i] : 0.0f;
    // Terms are not kept if the entropy has a slope, because its gradient needs the logits. The terms of the jsd need the sums of both
    // rows, so they are kept in its second visit, and only if the divergence has a weight: else that visit may keep nothing.
    KeptTerms kept = {scratch.p, scratch.k, scratch.maxima};
    if constexpr (SAME_TYPE<O, float>) kept.p = out;
    const bool keeps = out && !of.with_entropy && scratch.maxima && (direction != JSD || c != 0), at_once = keeps && direction != JSD;
    const auto visit = direction == FORWARD ? (at_once ? first_visit<true, true> : first_visit<true, false>)
                                            : (at_once ? first_visit<false, true> : first_visit<false, false>);
    const FirstVisit found = visit(student, teacher, of.vocab, &kept);
    const Known& known = found.known;
    const Divergences result = known.result(direction == FORWARD);
    const float log_sums = float(result.log_sums);
    float divergence = float(result.value), center = direction == REVERSE ? divergence : 0.0f;
    if (direction == JSD) {
        const auto visit_both = keeps ? mixed_kl<true> : mixed_kl<false>;
        const MixedKl kl = visit_both(student, teacher, of.vocab, known, log_sums, job.teacher.mixture, &kept);
        divergence = float(job.teacher.mixture * kl.teacher + (1.0 - job.teacher.mixture) * kl.student), center = kl.student;
    }
    const Softmax softmax(known.max, known.sum, target.z, found.weighted);
    const Slopes slopes = token_of(of, i, float(softmax.logp), softmax.entropy);
    job.divergence[i] = divergence;
    if (c != 0) of.losses[i] += c * divergence;
    if (!out) return;
    if (slopes.none() && c == 0) {
        memset(out, 0, size_t(of.vocab) * sizeof(O));
        return;
    }
    if (c == 0 && !keeps) return pull_alone(job, i, slopes, known, float(target.z));
    const PairGradient gradient(job.teacher, slopes, c, student.t, known, log_sums, center);
    if (!gradient.finite()) return fill_nan(out, of.vocab);
    if (keeps) {
        from_kept(kept, out, of.vocab, gradient);
    } else {
        write_gradient(student, teacher, gradient, out, of.vocab);
    }
    if (target.there) store_some(out + of.targets[i], all(gradient.at(target)), 1);
}

void fused(const TwoFused& job, int64_t i, const TwoScratch& scratch) {
    const FusedJob& of = job.student;
    if (of.read && !of.read[i]) {
        job.divergence[i] = 0;
        token_of(of, i, 0, 0);
        if (of.out.base) memset(of.out.row(i), 0, size_t(of.vocab) * (of.out.dtype == FP32 ? 4 : 2));
        return;
    }
    switch (of.out.dtype) {
        case FP32: return fused_rows<float>(job, i, scratch);
        case BF16: return fused_rows<bf16>(job, i, scratch);
        default: return fused_rows<fp16>(job, i, scratch);
    }
}

}  // namespace

#define NAME_OF(isa) #isa
#define QUOTED(isa) NAME_OF(isa)
#define JOINED(a, b) a##b
#define TABLE(isa) JOINED(divergence_, isa)

extern const DivergenceKernels TABLE(GRPO_ISA);
const DivergenceKernels TABLE(GRPO_ISA) = {QUOTED(GRPO_ISA), stats, mixed, pull, fused};

}  // namespace grpo
