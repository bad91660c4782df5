// The binding of formulas as programs, and of the row kernel that runs one between its two visits. See module.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "binding.h"
#include "formula.h"
#include "parallel.h"

namespace nb = nanobind;

namespace grpo {
namespace {

// Runs a program over rows, for its comparison with torch.
void run(const Formula& formula, const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs,
         const std::vector<uintptr_t>& outputs, int64_t count) {
    const Program& program = formula.program;
    formula.check_call(numbers, inputs.size());
    formula.check(int(outputs.size()) == program.outputs, "each of its outputs needs an address.");
    check_size("count", count, 0);
    for (uintptr_t address : inputs) check_address("inputs", address, 4, count == 0);
    for (uintptr_t address : outputs) check_address("outputs", address, 4, count == 0);
    std::vector<float> row(inputs.size()), found(outputs.size());
    for (int64_t i = 0; i < count; i++) {
        for (size_t k = 0; k < inputs.size(); k++) row[k] = at<float>(inputs[k])[i];
        evaluate(program, numbers.data(), row.data(), found.data());
        for (size_t k = 0; k < outputs.size(); k++) at<float>(outputs[k])[i] = found[k];
    }
}

void fused(const Formula& formula, const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, bool with_entropy,
           uintptr_t logits, int dtype, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, uintptr_t out,
           int out_dtype, int64_t out_outer_stride, int64_t out_inner_stride, int64_t vocab, int64_t count, uintptr_t targets,
           uintptr_t read, float scale, float softcap, float inv_temperature, uintptr_t inv_temperatures, uintptr_t logps,
           uintptr_t entropy, uintptr_t losses, int threads) {
    const std::vector<const float*> vectors = token_inputs(formula, numbers, inputs, count);
    const FusedJob job{{at<char>(logits), dtype, inner_count, outer_stride, inner_stride},
                       {at<char>(out), out_dtype, inner_count, out_outer_stride, out_inner_stride},
                       vocab,
                       {scale, softcap, inv_temperature, at<float>(inv_temperatures)},
                       at<int64_t>(targets),
                       at<uint8_t>(read),
                       &formula.program,
                       numbers.data(),
                       vectors.data(),
                       with_entropy,
                       at<float>(logps),
                       at<float>(entropy),
                       at<float>(losses)};
    check_threads(threads);
    check_rows("logits", job.logits, vocab, 0, count);
    element_size("out_dtype", out_dtype);
    if (out) check_rows("out", job.out, vocab, 0, count);
    if (count > 0) {
        check_address("targets", targets, 8);
        check_address("inv_temperatures", inv_temperatures, 4, true);
        check_address("logps", logps, 4);
        check_address("entropy", entropy, 4);
        check_address("losses", losses, 4);
    }
    nb::gil_scoped_release release;
    each_range(count, rows_at_once(job), threads, [&](int64_t begin, int64_t end) {
        Scratch scratch = {nullptr, nullptr};
        if (job.out.base && !job.with_entropy) {
            const size_t row = job.out.dtype == FP32 ? 0 : bytes_of_floats(job.vocab);
            if (char* memory = memory_of_thread(row + size_t(most_segments(job.vocab)) * sizeof(Segment))) {
                scratch = {reinterpret_cast<float*>(memory), reinterpret_cast<Segment*>(memory + row)};
            }
        }
        for (int64_t i = begin; i < end; i++) kernels->fused(job, i, scratch);
    });
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<Formula>(m, "Program")
        .def(nb::init<const std::string&, int, int, const std::vector<Step>&, const std::vector<int>&>())
        .def("run", &run);
    m.def("fused", &fused);
}

}  // namespace grpo
