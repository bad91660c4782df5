// The binding of formulas as programs, and of the row kernel that runs one between its two visits. See module.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "binding.h"
#include "parallel.h"
#include "program.h"

namespace nb = nanobind;

namespace grpo {
namespace {

using Step = std::tuple<std::string, int, int, int>;  // operation, registers of its operands; those it has not are 0

// A program that was found to be right, with its memory.
class Formula {
public:
    Formula(const std::string& name, int numbers, int inputs, const std::vector<Step>& steps, const std::vector<int>& outputs)
        : name(name) {
        check(numbers >= 0 && inputs >= 0, "a number of registers is 0 or more.");
        const size_t registers = size_t(numbers) + size_t(inputs) + steps.size();
        check(registers <= MOST_REGISTERS, "it takes " + std::to_string(registers) + " registers, and there are " +
                                               std::to_string(MOST_REGISTERS) + ": make it shorter.");
        int free = numbers + inputs;
        for (const auto& [operation, a, b, c] : steps) {
            int code = 0;
            while (code < OPERATIONS && operation != operation_names[code]) code++;
            check(code < OPERATIONS, operation + " is no operation.");
            const int used[3] = {a, b, c};
            for (int k = 0; k < operands(code); k++) {
                check(used[k] >= 0 && used[k] < free, operation + " reads register " + std::to_string(used[k]) + " before it is set.");
            }
            const int last = operands(code);
            instructions.push_back({uint16_t(code), uint16_t(a), uint16_t(last > 1 ? b : 0), uint16_t(last > 2 ? c : 0)});
            free++;
        }
        for (int k : outputs) {
            check(k >= 0 && k < free, "output " + std::to_string(k) + " is no register.");
            this->outputs.push_back(uint16_t(k));
        }
        program = {instructions.data(), int(instructions.size()), numbers, inputs, int(outputs.size()), this->outputs.data()};
    }
    Formula(const Formula&) = delete;

    void check(bool ok, const std::string& remedy) const {
        if (!ok) throw std::invalid_argument("the program of " + name + ": " + remedy);
    }
    void check_call(const std::vector<float>& numbers, size_t inputs) const {
        check(int(numbers.size()) == program.numbers, std::to_string(numbers.size()) + " numbers were given, and it takes " +
                                                          std::to_string(program.numbers) + ".");
        check(int(inputs) == program.inputs,
              std::to_string(inputs) + " inputs were given, and it takes " + std::to_string(program.inputs) + ".");
    }

    const std::string name;
    Program program;

private:
    std::vector<Instruction> instructions;
    std::vector<uint16_t> outputs;
};

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

// Memory that a thread keeps from row to row and from call to call: new pages cost more than a row.
Scratch scratch_of_thread(size_t floats, size_t segments) {
    constexpr size_t ALIGNED = 64;
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t size = 0;
    const size_t row = (floats * sizeof(float) + ALIGNED - 1) / ALIGNED * ALIGNED;
    const size_t needed = row + segments * sizeof(Segment) + ALIGNED;
    if (size < needed) {
        size = 0;
        memory.reset();
        memory.reset(new (std::nothrow) char[needed]);
        if (!memory) return {nullptr, nullptr};
        size = needed;
    }
    char* start = memory.get() + (ALIGNED - reinterpret_cast<uintptr_t>(memory.get()) % ALIGNED);
    return {reinterpret_cast<float*>(start), reinterpret_cast<Segment*>(start + row)};
}

void fused(const Formula& formula, const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, bool with_entropy,
           uintptr_t logits, int dtype, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, uintptr_t out,
           int out_dtype, int64_t out_outer_stride, int64_t out_inner_stride, int64_t vocab, int64_t count, uintptr_t targets,
           uintptr_t read, float scale, float softcap, float inv_temperature, uintptr_t inv_temperatures, uintptr_t logps,
           uintptr_t entropy, uintptr_t losses, int threads) {
    formula.check_call(numbers, inputs.size() + 2);
    formula.check(formula.program.outputs == TOKEN_OUTPUTS, "it does not give a loss and two slopes.");
    std::vector<const float*> vectors;
    for (uintptr_t address : inputs) {
        check_address("inputs", address, 4, count == 0);
        vectors.push_back(at<float>(address));
    }
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
        const bool keeps = job.out.base && !job.with_entropy;
        const size_t row = keeps && job.out.dtype != FP32 ? size_t(job.vocab) : 0;
        const Scratch scratch = keeps ? scratch_of_thread(row, size_t(most_segments(job.vocab))) : Scratch{nullptr, nullptr};
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
