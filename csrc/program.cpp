// Formulas as programs, see kernels.h: how they are checked, and run.
#include <math.h>

#include <algorithm>

#include "arguments.h"

namespace grpo {
namespace {

// In the order of Operation.
const char* const operation_names[OPERATIONS] = {
    "neg", "abs", "exp", "log", "sqrt", "tanh", "reciprocal", "not", "add", "sub", "mul",
    "div", "min", "max", "lt",  "le",   "eq",   "ne",         "and", "or",  "where",
};

// The number of operands: registers a, b, c in this order.
int operands(int operation) { return operation <= NOT ? 1 : operation < SELECT ? 2 : 3; }

// Rows that `Formula::run` computes at a time: 128 registers of them take 128 KiB.
constexpr int64_t ROWS_OF_BLOCK = 256;

// Both return NaN if an argument is NaN, as in torch.
float smaller(float a, float b) { return a < b || a != a ? a : b; }
float larger(float a, float b) { return a > b || a != a ? a : b; }

// One number at a time: a loop over it costs nothing.
struct One {
    constexpr operator int64_t() const { return 1; }
};

template <class Count, class Body> void each(Count count, float* to, const Body& body) {
    for (int64_t j = 0; j < count; j++) to[j] = body(j);
}

// Runs the instructions on registers of `count` numbers each.
template <class Count> void run(const Program& program, Count count, float* r) {
    float* to = r + (program.numbers + program.inputs) * count;
    for (int i = 0; i < program.count; i++, to += count) {
        const Instruction& of = program.instructions[i];
        const float *a = r + of.a * count, *b = r + of.b * count, *c = r + of.c * count;
        switch (of.operation) {
            case NEGATE: each(count, to, [=](int64_t j) { return -a[j]; }); break;
            case ABSOLUTE: each(count, to, [=](int64_t j) { return fabsf(a[j]); }); break;
            case EXPONENTIAL: each(count, to, [=](int64_t j) { return float(exp(double(a[j]))); }); break;
            case LOGARITHM: each(count, to, [=](int64_t j) { return float(log(double(a[j]))); }); break;
            case SQUARE_ROOT: each(count, to, [=](int64_t j) { return sqrtf(a[j]); }); break;
            case HYPERBOLIC_TANGENT: each(count, to, [=](int64_t j) { return float(tanh(double(a[j]))); }); break;
            case RECIPROCAL: each(count, to, [=](int64_t j) { return 1.0f / a[j]; }); break;
            case NOT: each(count, to, [=](int64_t j) { return float(a[j] == 0); }); break;
            case ADD: each(count, to, [=](int64_t j) { return a[j] + b[j]; }); break;
            case SUBTRACT: each(count, to, [=](int64_t j) { return a[j] - b[j]; }); break;
            case MULTIPLY: each(count, to, [=](int64_t j) { return a[j] * b[j]; }); break;
            case DIVIDE: each(count, to, [=](int64_t j) { return a[j] / b[j]; }); break;
            case MINIMUM: each(count, to, [=](int64_t j) { return smaller(a[j], b[j]); }); break;
            case MAXIMUM: each(count, to, [=](int64_t j) { return larger(a[j], b[j]); }); break;
            case LESS: each(count, to, [=](int64_t j) { return float(a[j] < b[j]); }); break;
            case LESS_EQUAL: each(count, to, [=](int64_t j) { return float(a[j] <= b[j]); }); break;
            case EQUAL: each(count, to, [=](int64_t j) { return float(a[j] == b[j]); }); break;
            case NOT_EQUAL: each(count, to, [=](int64_t j) { return float(a[j] != b[j]); }); break;
            case AND: each(count, to, [=](int64_t j) { return float(a[j] != 0 && b[j] != 0); }); break;
            case OR: each(count, to, [=](int64_t j) { return float(a[j] != 0 || b[j] != 0); }); break;
            default: each(count, to, [=](int64_t j) { return a[j] != 0 ? b[j] : c[j]; }); break;  // SELECT
        }
    }
}

}  // namespace

void evaluate(const Program& program, const float* numbers, const float* inputs, float* outputs) {
    float r[MOST_REGISTERS];
    for (int k = 0; k < program.numbers; k++) r[k] = numbers[k];
    for (int k = 0; k < program.inputs; k++) r[program.numbers + k] = inputs[k];
    run(program, One(), r);
    for (int k = 0; k < program.outputs; k++) outputs[k] = r[program.output[k]];
}

void evaluate(const Program& program, const float* numbers, int64_t rows, float* r) {
    for (int k = 0; k < program.numbers; k++) each(rows, r + k * rows, [=](int64_t) { return numbers[k]; });
    run(program, rows, r);
}

Formula::Formula(const std::string& name, int numbers, int inputs, const std::vector<Step>& steps, const std::vector<int>& outputs)
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
        const int used[3] = {a, b, c}, last = operands(code);
        for (int k = 0; k < last; k++) {
            check(used[k] >= 0 && used[k] < free, operation + " reads register " + std::to_string(used[k]) + " before it is set.");
        }
        instructions.push_back({uint16_t(code), uint16_t(a), uint16_t(last > 1 ? b : 0), uint16_t(last > 2 ? c : 0)});
        free++;
    }
    for (int k : outputs) {
        check(k >= 0 && k < free, "output " + std::to_string(k) + " is no register.");
        this->outputs.push_back(uint16_t(k));
    }
    program = {instructions.data(), int(instructions.size()), numbers, inputs, int(outputs.size()), this->outputs.data()};
}

std::vector<const float*> Formula::inputs(const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, int64_t count,
                                          size_t given) const {
    check(int(numbers.size()) == program.numbers, std::to_string(numbers.size()) + " numbers were given, and it takes " +
                                                      std::to_string(program.numbers) + ".");
    check(int(inputs.size() + given) == program.inputs, std::to_string(inputs.size() + given) + " inputs were given, and it takes " +
                                                            std::to_string(program.inputs) + ".");
    std::vector<const float*> found;
    for (uintptr_t address : inputs) found.push_back(vector<float>("inputs", address, count));
    return found;
}

void Formula::run(const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& outputs,
                  int64_t count) const {
    check_size("count", count, 0);
    const std::vector<const float*> from = this->inputs(numbers, inputs, count, 0);
    check(int(outputs.size()) == program.outputs, "each of its outputs needs an address.");
    for (uintptr_t address : outputs) vector<float>("outputs", address, count);
    const int64_t block = std::min(count, ROWS_OF_BLOCK);
    std::vector<float> r(size_t(program.registers()) * size_t(block));
    for (int64_t first = 0; first < count; first += block) {
        const int64_t rows = std::min(block, count - first);
        for (size_t k = 0; k < from.size(); k++) std::copy_n(from[k] + first, rows, r.data() + (program.numbers + int64_t(k)) * rows);
        evaluate(program, numbers.data(), rows, r.data());
        for (size_t k = 0; k < outputs.size(); k++) std::copy_n(r.data() + program.output[k] * rows, rows, at<float>(outputs[k]) + first);
    }
}

}  // namespace grpo
