// The binding of the kernels over two streams; see module.cpp. rows/backends/cpu_divergence.py checks the tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "binding.h"
#include "divergence.h"
#include "formula.h"
#include "parallel.h"

namespace nb = nanobind;

namespace grpo {

#ifdef GRPO_X86
extern const DivergenceKernels divergence_avx512bf16, divergence_avx512, divergence_avx2;
#endif
extern const DivergenceKernels divergence_baseline;

namespace {

const DivergenceKernels* divergence = &divergence_baseline;

// One stream of a call: its rows and their transform. Temperatures per row are given for the rows of the call only.
struct Stream {
    Rows rows;
    Transform transform;

    Stream(uintptr_t logits, int dtype, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, float scale, float softcap,
           float inv_temperature, uintptr_t inv_temperatures)
        : rows{at<char>(logits), dtype, inner_count, outer_stride, inner_stride},
          transform{scale, softcap, inv_temperature, at<float>(inv_temperatures)} {
        check_address("inv_temperatures", inv_temperatures, 4, true);
    }
};

Teacher teacher_of(const Stream& stream, int direction, double mixture) {
    require(direction >= REVERSE && direction <= JSD, "direction", direction, "it is 0 for reverse, 1 for forward, 2 for jsd.");
    return {stream.rows, stream.transform, direction, mixture};
}

void check_streams(const Stream& student, const Stream& teacher, int64_t vocab, int64_t first, int64_t count, int threads) {
    check_threads(threads);
    check_rows("logits", student.rows, vocab, first, count);
    check_rows("teacher", teacher.rows, vocab, first, count);
    require(student.rows.inner_count == teacher.rows.inner_count, "inner_count", teacher.rows.inner_count,
            "it must be that of the student.");
}

// Checks the addresses of a call's vectors. Numbers have 4 bytes, targets 8.
struct Vectors {
    int64_t count;

    float* needed(const char* name, uintptr_t address) const {
        check_address(name, address, 4, count == 0);
        return at<float>(address);
    }
    float* or_null(const char* name, uintptr_t address) const {
        check_address(name, address, 4, true);
        return at<float>(address);
    }
    const int64_t* targets(uintptr_t address) const {
        check_address("targets", address, 8, count == 0);
        return at<int64_t>(address);
    }
};

// The part of a job that rows_at_once reads.
struct Size {
    int64_t vocab;
    const Rows& logits;
};

template <class Job>
void each_row(const Job& job, const Rows& logits, int64_t vocab, int64_t count, int threads, void (*visit)(const Job&, int64_t)) {
    nb::gil_scoped_release release;
    each_range(count, rows_at_once(Size{vocab, logits}), threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) visit(job, i);
    });
}

void stats(const Stream& student, const Stream& teacher, int direction, int64_t vocab, int64_t first, int64_t count, uintptr_t targets,
           uintptr_t read, uintptr_t max, uintptr_t sum, uintptr_t target, uintptr_t weighted, uintptr_t squares, uintptr_t top,
           uintptr_t teacher_max, uintptr_t teacher_sum, uintptr_t cross, uintptr_t excess, int threads) {
    check_streams(student, teacher, vocab, first, count, threads);
    const Vectors of{count};
    const TwoStats job{{student.rows, vocab, first, student.transform, of.targets(targets), at<uint8_t>(read), of.needed("max", max),
                        of.needed("sum", sum), of.needed("target", target),
                        squares ? of.needed("weighted", weighted) : of.or_null("weighted", weighted), of.or_null("squares", squares),
                        reinterpret_cast<int32_t*>(of.or_null("top", top))},
                       teacher_of(teacher, direction, 0),
                       of.needed("teacher_max", teacher_max),
                       of.needed("teacher_sum", teacher_sum),
                       of.needed("cross", cross),
                       of.needed("excess", excess)};
    each_row(job, student.rows, vocab, count, threads, divergence->stats);
}

void mixed(const Stream& student, const Stream& teacher, double mixture, int64_t vocab, int64_t first, int64_t count, uintptr_t read,
           uintptr_t max, uintptr_t sum, uintptr_t teacher_max, uintptr_t teacher_sum, uintptr_t log_sums, uintptr_t student_kl,
           uintptr_t teacher_kl, int threads) {
    check_streams(student, teacher, vocab, first, count, threads);
    const Vectors of{count};
    const MixedJob job{student.rows,
                       vocab,
                       first,
                       student.transform,
                       at<uint8_t>(read),
                       teacher_of(teacher, JSD, mixture),
                       {of.needed("max", max), of.needed("sum", sum), of.needed("teacher_max", teacher_max),
                        of.needed("teacher_sum", teacher_sum), of.needed("log_sums", log_sums)},
                       of.needed("student_kl", student_kl),
                       of.needed("teacher_kl", teacher_kl)};
    each_row(job, student.rows, vocab, count, threads, divergence->mixed);
}

void pull(const Stream& student, const Stream& teacher, int direction, double mixture, uintptr_t out, int out_dtype,
          int64_t out_outer_stride, int64_t out_inner_stride, int64_t vocab, int64_t first, int64_t count, uintptr_t targets, uintptr_t max,
          uintptr_t sum, uintptr_t target, uintptr_t slope, uintptr_t constant, uintptr_t log, uintptr_t prob, uintptr_t teacher_max,
          uintptr_t teacher_sum, uintptr_t log_sums, uintptr_t center, uintptr_t teacher_slope, int threads) {
    check_streams(student, teacher, vocab, first, count, threads);
    const Vectors of{count};
    const TwoPull job{{student.rows, {at<char>(out), out_dtype, student.rows.inner_count, out_outer_stride, out_inner_stride}, vocab,
                       first, student.transform, of.targets(targets), of.needed("max", max), of.needed("sum", sum),
                       of.needed("target", target), of.needed("slope", slope), of.or_null("constant", constant), of.or_null("log", log),
                       of.or_null("prob", prob)},
                      teacher_of(teacher, direction, mixture),
                      {of.needed("max", max), of.needed("sum", sum), of.needed("teacher_max", teacher_max),
                       of.needed("teacher_sum", teacher_sum), of.needed("log_sums", log_sums)},
                      of.needed("teacher_slope", teacher_slope),
                      of.needed("center", center),
                      kernels->pull};
    check_rows("out", job.student.out, vocab, first, count);
    each_row(job, student.rows, vocab, count, threads, divergence->pull);
}

// Memory for the terms of one row. Terms are kept only if the gradient can be formed without reading the logits again.
TwoScratch scratch_of(const TwoFused& job) {
    const FusedJob& of = job.student;
    if (!of.out.base || of.with_entropy) return {nullptr, nullptr, nullptr};
    const size_t row = bytes_of_floats(of.vocab), of_p = of.out.dtype == FP32 ? 0 : row;
    char* memory = memory_of_thread(of_p + row + size_t(ceil_div(of.vocab, LOGITS)) * sizeof(KeptMaxima));
    if (!memory) return {nullptr, nullptr, nullptr};
    return {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + of_p),
            reinterpret_cast<KeptMaxima*>(memory + of_p + row)};
}

void fused(const Formula& formula, const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, bool with_entropy,
           const Stream& student, const Stream& teacher, int direction, double mixture, uintptr_t out, int out_dtype,
           int64_t out_outer_stride, int64_t out_inner_stride, int64_t vocab, int64_t count, uintptr_t targets, uintptr_t read,
           uintptr_t weight, uintptr_t logps, uintptr_t entropy, uintptr_t losses, uintptr_t divergence_at, int threads) {
    const std::vector<const float*> vectors = token_inputs(formula, numbers, inputs, count);
    check_streams(student, teacher, vocab, 0, count, threads);
    const Vectors of{count};
    const TwoFused job{{student.rows,
                        {at<char>(out), out_dtype, student.rows.inner_count, out_outer_stride, out_inner_stride},
                        vocab,
                        student.transform,
                        of.targets(targets),
                        at<uint8_t>(read),
                        &formula.program,
                        numbers.data(),
                        vectors.data(),
                        with_entropy,
                        of.needed("logps", logps),
                        of.needed("entropy", entropy),
                        of.needed("losses", losses)},
                       teacher_of(teacher, direction, mixture),
                       of.or_null("weight", weight),
                       of.needed("divergence", divergence_at),
                       kernels->pull};
    element_size("out_dtype", out_dtype);
    if (out) check_rows("out", job.student.out, vocab, 0, count);
    nb::gil_scoped_release release;
    each_range(count, rows_at_once(Size{vocab, student.rows}), threads, [&](int64_t begin, int64_t end) {
        const TwoScratch scratch = scratch_of(job);
        for (int64_t i = begin; i < end; i++) divergence->fused(job, i, scratch);
    });
}

}  // namespace

void use_divergence_kernels(const std::string& isa) {
#ifdef GRPO_X86
    for (const DivergenceKernels* one : {&divergence_avx512bf16, &divergence_avx512, &divergence_avx2}) {
        if (isa == one->name) divergence = one;
    }
#endif
    if (isa == divergence_baseline.name) divergence = &divergence_baseline;
}

void bind_divergence(nb::module_& m) {
    nb::class_<Stream>(m, "Stream").def(nb::init<uintptr_t, int, int64_t, int64_t, int64_t, float, float, float, uintptr_t>());
    m.def("divergence_stats", &stats);
    m.def("divergence_mixed", &mixed);
    m.def("divergence_pull", &pull);
    m.def("divergence_fused", &fused);
}

}  // namespace grpo
