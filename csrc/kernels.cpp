// All kernels over rows, compiled once per instruction set, which GRPO_ISA names: each copy exports one table, and module.cpp picks
// one at run time. C++ library headers are not included: their inline functions, compiled here for AVX-512, could replace those of
// other files at link time and crash on processors without AVX-512.
#include "sparse.h"
#include "two_rows.h"

namespace grpo {
namespace {

void stats(const StatsJob& job, int64_t i) {
    if (!job.read || job.read[i]) return job.second ? stats_of_rows(job, i) : stats_of_row(job, i);
    for (int name = MAX; name <= EXCESS; name++) {
        if (name == TOP || !job.to[name]) continue;
        job.to[name][i] = name == SUM || name == TEACHER_SUM ? 1.0f : 0.0f;
    }
    if (job.to[TOP]) reinterpret_cast<int32_t*>(job.to[TOP])[i] = -1;
}

void pull(const PullJob& job, int64_t i) {
    const Slopes slopes(job.slopes, i);
    const bool beside = job.second && job.slopes[DIVERGENCE][i] != 0;
    if (beside) return pull_rows(job, i, slopes);
    pull_row(job, i, slopes);
}

void fused(const FusedJob& job, int64_t i, const TermMemory& scratch) {
    if (!job.read || job.read[i]) return job.second ? fused_rows(job, i, scratch) : fused_row(job, i, scratch);
    if (job.second) job.to[OF_DIVERGENCE][i] = 0;
    token_of(job, i, 0, 0);
    if (job.out.base) Gradient(job.out, i).zero();
}

}  // namespace

#define NAME_OF(isa) #isa
#define QUOTED(isa) NAME_OF(isa)
#define JOINED(a, b) a##b
#define TABLE(isa) JOINED(kernels_, isa)

extern const Kernels TABLE(GRPO_ISA);
const Kernels TABLE(GRPO_ISA) = {QUOTED(GRPO_ISA), stats, mixed, pull, fused, scale, slot_logits, slot_sums};

}  // namespace grpo
