// Programs of loss formulas (see kernels.h): how they are checked and evaluated.
#include <math.h>

#include <algorithm>

#include "arguments.h"

namespace grpo {
namespace {

// Python's names in the order of Operation.
const char* const OPERATION_NAMES[NUM_OPERATIONS] = {
    "neg", "abs", "exp", "log", "sqrt", "tanh", "reciprocal", "not", "add", "sub",   "mul",
    "div", "min", "max", "lt",  "le",   "eq",   "ne",         "and", "or",  "where",
};

// An operation reads the first so many of the registers a, b, c.
int num_operands(int operation) { return operation <= NOT ? 1 : operation < SELECT ? 2 : 3; }

// Rows that CheckedProgram::run evaluates at a time: 128 registers of them take 128 KiB, which
// stays in the L2 cache.
constexpr int64_t ROWS_PER_BLOCK = 256;

// Both return NaN if an operand is NaN, as torch.minimum and torch.maximum do.
float minimum(float a, float b) { return a < b || a != a ? a : b; }
float maximum(float a, float b) { return a > b || a != a ? a : b; }

// A number of rows that is 1 at compile time, so that the compiler removes the loops over rows.
struct OneRow {
    constexpr operator int64_t() const { return 1; }
};

// Sets result[i] = function(i) for each row.
template <class Count, class Function>
void for_each_row(Count num_rows, float* result, const Function& function) {
    for (int64_t i = 0; i < num_rows; i++) result[i] = function(i);
}

// Runs the instructions on registers [num_registers, num_rows]. The registers of the numbers and
// inputs are filled; instruction k writes the k-th register behind them.
template <class Count>
void run_instructions(const Program& program, Count num_rows, float* registers) {
    const int num_filled = program.num_numbers + program.num_inputs;
    float* result = registers + num_filled * num_rows;
    for (int k = 0; k < program.num_instructions; k++, result += num_rows) {
        const Instruction& instruction = program.instructions[k];
        const float* a = registers + instruction.a * num_rows;
        const float* b = registers + instruction.b * num_rows;
        const float* c = registers + instruction.c * num_rows;
        const auto set = [=](const auto& function) { for_each_row(num_rows, result, function); };
        switch (instruction.operation) {
            case NEGATE: set([=](int64_t i) { return -a[i]; }); break;
            case ABSOLUTE: set([=](int64_t i) { return fabsf(a[i]); }); break;
            case EXPONENTIAL: set([=](int64_t i) { return float(exp(double(a[i]))); }); break;
            case LOGARITHM: set([=](int64_t i) { return float(log(double(a[i]))); }); break;
            case SQUARE_ROOT: set([=](int64_t i) { return sqrtf(a[i]); }); break;
            case HYPERBOLIC_TANGENT:
                set([=](int64_t i) { return float(tanh(double(a[i]))); });
                break;
            case RECIPROCAL: set([=](int64_t i) { return 1.0f / a[i]; }); break;
            case NOT: set([=](int64_t i) { return float(a[i] == 0); }); break;
            case ADD: set([=](int64_t i) { return a[i] + b[i]; }); break;
            case SUBTRACT: set([=](int64_t i) { return a[i] - b[i]; }); break;
            case MULTIPLY: set([=](int64_t i) { return a[i] * b[i]; }); break;
            case DIVIDE: set([=](int64_t i) { return a[i] / b[i]; }); break;
            case MINIMUM: set([=](int64_t i) { return minimum(a[i], b[i]); }); break;
            case MAXIMUM: set([=](int64_t i) { return maximum(a[i], b[i]); }); break;
            case LESS: set([=](int64_t i) { return float(a[i] < b[i]); }); break;
            case LESS_EQUAL: set([=](int64_t i) { return float(a[i] <= b[i]); }); break;
            case EQUAL: set([=](int64_t i) { return float(a[i] == b[i]); }); break;
            case NOT_EQUAL: set([=](int64_t i) { return float(a[i] != b[i]); }); break;
            case AND: set([=](int64_t i) { return float(a[i] != 0 && b[i] != 0); }); break;
            case OR: set([=](int64_t i) { return float(a[i] != 0 || b[i] != 0); }); break;
            default: set([=](int64_t i) { return a[i] != 0 ? b[i] : c[i]; }); break;  // SELECT
        }
    }
}

}  // namespace

void evaluate(const Program& program, const float* numbers, const float* inputs, float* outputs) {
    float registers[MAX_REGISTERS];
    std::copy_n(numbers, program.num_numbers, registers);
    std::copy_n(inputs, program.num_inputs, registers + program.num_numbers);
    run_instructions(program, OneRow(), registers);
    for (int k = 0; k < program.num_outputs; k++) {
        outputs[k] = registers[program.output_registers[k]];
    }
}

void evaluate_rows(
    const Program& program, const float* numbers, int64_t num_rows, float* registers) {
    for (int k = 0; k < program.num_numbers; k++) {
        std::fill_n(registers + k * num_rows, num_rows, numbers[k]);
    }
    run_instructions(program, num_rows, registers);
}

CheckedProgram::CheckedProgram(
    const std::string& name, int num_numbers, int num_inputs, const std::vector<Step>& steps,
    const std::vector<int>& outputs)
    : name(name) {
    check(num_numbers >= 0 && num_inputs >= 0, "pass 0 or more numbers and inputs.");
    const size_t num_registers = size_t(num_numbers) + size_t(num_inputs) + steps.size();
    check(
        num_registers <= MAX_REGISTERS, "it takes " + std::to_string(num_registers) +
                                            " registers of " + std::to_string(MAX_REGISTERS) +
                                            ": make it shorter.");
    int num_set = num_numbers + num_inputs;  // registers that an instruction may read
    const auto is_set = [&](int number) { return number >= 0 && number < num_set; };
    for (const auto& [operation, a, b, c] : steps) {
        int code = 0;
        while (code < NUM_OPERATIONS && operation != OPERATION_NAMES[code]) code++;
        check(code < NUM_OPERATIONS, operation + " is not an operation.");
        const int count = num_operands(code);
        const int operands[3] = {a, count > 1 ? b : 0, count > 2 ? c : 0};
        for (int k = 0; k < count; k++) {
            const std::string number = std::to_string(operands[k]);
            check(
                is_set(operands[k]),
                operation + " reads register " + number + " before it is set.");
        }
        instructions.push_back(
            {uint16_t(code), uint16_t(operands[0]), uint16_t(operands[1]), uint16_t(operands[2])});
        num_set++;
    }
    for (int number : outputs) {
        check(is_set(number), "output " + std::to_string(number) + " is not a register.");
        output_registers.push_back(uint16_t(number));
    }
    program = {instructions.data(), int(instructions.size()), num_numbers,
               num_inputs,          int(outputs.size()),      this->output_registers.data()};
}

std::vector<const float*> CheckedProgram::check_call(
    const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, int64_t count,
    size_t num_computed) const {
    const size_t num_inputs = inputs.size() + num_computed;
    check(
        int(numbers.size()) == program.num_numbers, "pass " + std::to_string(program.num_numbers) +
                                                        " numbers, not " +
                                                        std::to_string(numbers.size()) + ".");
    check(
        int(num_inputs) == program.num_inputs, "pass " + std::to_string(program.num_inputs) +
                                                   " inputs, not " + std::to_string(num_inputs) +
                                                   ".");
    std::vector<const float*> vectors;
    for (uintptr_t address : inputs) vectors.push_back(vector_at<float>("inputs", address, count));
    return vectors;
}

void CheckedProgram::run(
    const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs,
    const std::vector<uintptr_t>& outputs, int64_t count) const {
    check_size("count", count, 0);
    const std::vector<const float*> input_vectors = check_call(numbers, inputs, count, 0);
    check(int(outputs.size()) == program.num_outputs, "pass an address for each of its outputs.");
    std::vector<float*> output_vectors;
    for (uintptr_t address : outputs) {
        output_vectors.push_back(vector_at<float>("outputs", address, count));
    }
    const int64_t block = std::min(count, ROWS_PER_BLOCK);
    std::vector<float> registers(size_t(program.num_registers()) * size_t(block));
    for (int64_t first = 0; first < count; first += block) {
        const int64_t num_rows = std::min(block, count - first);
        float* input_register = registers.data() + program.num_numbers * num_rows;
        for (const float* input : input_vectors) {
            std::copy_n(input + first, num_rows, input_register);
            input_register += num_rows;
        }
        evaluate_rows(program, numbers.data(), num_rows, registers.data());
        for (size_t k = 0; k < output_vectors.size(); k++) {
            const float* result = registers.data() + program.output_registers[k] * num_rows;
            std::copy_n(result, num_rows, output_vectors[k] + first);
        }
    }
}

}  // namespace grpo
