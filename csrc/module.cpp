// The Python binding: addresses are integers, sizes and strides are in elements. rows/backends/cpu.py checks the tensors; this
// file refuses arguments that cannot be right for any tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "parallel.h"

namespace nb = nanobind;

namespace grpo {

#ifdef GRPO_X86
extern const Kernels kernels_avx512bf16, kernels_avx512, kernels_avx2;
#endif
extern const Kernels kernels_baseline;

// grpo_kernels/rows/native.py reads this from the file before it loads the module, to recognise one from an older build.
extern const char built_from[];
const char built_from[] = "grpo_kernels built from sha256:" GRPO_SOURCES;

void bind_divergence(nb::module_& m);  // bind_divergence.cpp
void bind_products(nb::module_& m);    // bind_products.cpp
void bind_program(nb::module_& m);     // bind_program.cpp
void bind_select(nb::module_& m);      // bind_select.cpp
void bind_sparse(nb::module_& m);      // bind_sparse.cpp
void use_divergence_kernels(const std::string& isa);
void use_select_kernels(const std::string& isa);
void use_sparse_kernels(const std::string& isa);

namespace {

std::vector<const Kernels*> supported() {  // best first
    std::vector<const Kernels*> tables;
#ifdef GRPO_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&kernels_avx512bf16);
        tables.push_back(&kernels_avx512);
    }
    // Every processor with AVX2 also has F16C, for which some compilers have no __builtin_cpu_supports.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&kernels_avx2);
#endif
    tables.push_back(&kernels_baseline);
    return tables;
}

}  // namespace

const Kernels* kernels = supported().front();

namespace {

void stats(uintptr_t logits, int dtype, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, int64_t vocab,
               int64_t first, int64_t count, uintptr_t targets, uintptr_t read, float scale, float softcap, float inv_temperature,
               uintptr_t inv_temperatures, uintptr_t max, uintptr_t sum, uintptr_t target, uintptr_t weighted,
               uintptr_t squares, uintptr_t top, int threads) {
    const StatsJob job{{at<char>(logits), dtype, inner_count, outer_stride, inner_stride},
                       vocab,
                       first,
                       {scale, softcap, inv_temperature, at<float>(inv_temperatures)},
                       at<int64_t>(targets),
                       at<uint8_t>(read),
                       at<float>(max),
                       at<float>(sum),
                       at<float>(target),
                       at<float>(weighted),
                       at<float>(squares),
                       at<int32_t>(top)};
    check_threads(threads);
    check_rows("logits", job.logits, vocab, first, count);
    if (count > 0) {
        check_address("targets", targets, 8);
        check_address("inv_temperatures", inv_temperatures, 4, true);
        check_address("max", max, 4);
        check_address("sum", sum, 4);
        check_address("target", target, 4);
        check_address("weighted", weighted, 4, !squares);
        check_address("squares", squares, 4, true);
        check_address("top", top, 4, true);
    }
    nb::gil_scoped_release release;
    each_range(count, rows_at_once(job), threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) kernels->stats(job, i);
    });
}

void pull(uintptr_t logits, int dtype, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, uintptr_t out,
               int out_dtype, int64_t out_outer_stride, int64_t out_inner_stride, int64_t vocab, int64_t first, int64_t count,
               uintptr_t targets, float scale, float softcap, float inv_temperature, uintptr_t inv_temperatures, uintptr_t max,
               uintptr_t sum, uintptr_t target, uintptr_t slope, uintptr_t constant, uintptr_t log, uintptr_t prob, int threads) {
    const PullJob job{{at<char>(logits), dtype, inner_count, outer_stride, inner_stride},
                       {at<char>(out), out_dtype, inner_count, out_outer_stride, out_inner_stride},
                       vocab,
                       first,
                       {scale, softcap, inv_temperature, at<float>(inv_temperatures)},
                       at<int64_t>(targets),
                       at<float>(max),
                       at<float>(sum),
                       at<float>(target),
                       at<float>(slope),
                       at<float>(constant),
                       at<float>(log),
                       at<float>(prob)};
    check_threads(threads);
    check_rows("logits", job.logits, vocab, first, count);
    check_rows("out", job.out, vocab, first, count);
    if (count > 0) {
        check_address("targets", targets, 8);
        check_address("inv_temperatures", inv_temperatures, 4, true);
        check_address("max", max, 4);
        check_address("sum", sum, 4);
        check_address("target", target, 4);
        check_address("slope", slope, 4);
        check_address("constant", constant, 4, true);
        check_address("log", log, 4, true);
        check_address("prob", prob, 4, true);
    }
    nb::gil_scoped_release release;
    each_range(count, rows_at_once(job), threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) kernels->pull(job, i);
    });
}

void scale(uintptr_t data, int dtype, int64_t count, float factor, int threads) {
    const ScaleJob job{at<char>(data), dtype, count, factor};
    check_threads(threads);
    check_size("count", count, 0);
    check_address("data", data, element_size("dtype", dtype), count == 0);
    nb::gil_scoped_release release;
    each_range(count, 65536, threads, [&](int64_t begin, int64_t end) { kernels->scale(job, begin, end); });
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* table : supported()) names.emplace_back(table->name);
    return names;
}

void use_isa(const std::string& name) {
    for (const Kernels* table : supported()) {
        if (name == table->name) {
            kernels = table;
            use_divergence_kernels(name);
            use_select_kernels(name);
            use_sparse_kernels(name);
            return;
        }
    }
    throw std::invalid_argument("instruction set " + name + " is not supported here: choose one of isas().");
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.doc() = "CPU kernels of grpo_kernels; use them through grpo_kernels.rows.backends.cpu.";
    m.def("stats", &stats);
    m.def("pull", &pull);
    m.def("scale", &scale);
    bind_divergence(m);
    bind_products(m);
    bind_program(m);
    bind_select(m);
    bind_sparse(m);
    use_divergence_kernels(kernels->name);
    use_select_kernels(kernels->name);
    use_sparse_kernels(kernels->name);
    m.attr("built_from") = built_from;
    m.def("compiler", [] { return std::string(GRPO_COMPILER); });
    m.def("isa", [] { return std::string(kernels->name); }, "The instruction set in use.");
    m.def("isas", &isas, "Those this processor can run, best first.");
    m.def("use_isa", &use_isa, nb::arg("name"), "Force one of them, for tests.");
}

}  // namespace grpo
