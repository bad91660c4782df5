// The binding of the selection of columns. rows/backends/cpu_select.py checks the tensors; this file refuses arguments that
// cannot be right for any tensors.
#include <nanobind/nanobind.h>

#include <string>

#include "binding.h"
#include "parallel.h"
#include "select.h"

namespace nb = nanobind;

namespace grpo {

#ifdef GRPO_X86
extern const SelectKernels select_avx512bf16, select_avx512, select_avx2;
#endif
extern const SelectKernels select_baseline;

namespace {

const SelectKernels* selection = &select_baseline;

void select(uintptr_t logits, int dtype, int64_t stride, int64_t vocab, int64_t count, uintptr_t targets, float scale, float softcap,
            float inv_temperature, uintptr_t inv_temperatures, uintptr_t max, uintptr_t sum, float per_unit, uintptr_t starts,
            int64_t capacity, uintptr_t ids, uintptr_t taken, uintptr_t masses, int threads) {
    const SelectJob job{{at<char>(logits), dtype, count > 0 ? count : 1, 0, stride},
                        vocab,
                        {scale, softcap, inv_temperature, at<float>(inv_temperatures)},
                        at<int64_t>(targets),
                        at<float>(max),
                        at<float>(sum),
                        per_unit,
                        at<int64_t>(starts),
                        capacity,
                        at<int32_t>(ids),
                        at<float>(taken),
                        at<int64_t>(masses)};
    check_threads(threads);
    check_rows("logits", job.logits, vocab, 0, count);
    check_size("capacity", capacity, 0);
    if (count > 0) {
        check_address("targets", targets, 8);
        check_address("inv_temperatures", inv_temperatures, 4, true);
        check_address("max", max, 4);
        check_address("sum", sum, 4);
        check_address("ids", ids, 4, true);
        check_address("starts", starts, 8, !ids);
        check_address("taken", taken, 4, !ids);
        check_address("masses", masses, 8, true);
    }
    nb::gil_scoped_release release;
    each_range(count, rows_at_once(job), threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) selection->select(job, i);
    });
}

}  // namespace

void use_select_kernels(const std::string& isa) {
#ifdef GRPO_X86
    for (const SelectKernels* one : {&select_avx512bf16, &select_avx512, &select_avx2}) {
        if (isa == one->name) selection = one;
    }
#endif
    if (isa == select_baseline.name) selection = &select_baseline;
}

void bind_select(nb::module_& m) { m.def("select", &select); }

}  // namespace grpo
