// Formulas as programs, see kernels.h: how they are checked, and run.
#include <math.h>

#include "arguments.h"

namespace grpo {
namespace {

// In the order of Operation.
const char* const operation_names[OPERATIONS] = {
    "neg", "abs", "exp", "log", "sqrt", "reciprocal", "not", "add", "sub", "mul",
    "div", "min", "max", "lt",  "le",   "eq",         "ne",  "and", "or",  "where",
};

// The number of operands: registers a, b, c in this order.
int operands(int operation) { return operation <= NOT ? 1 : operation < SELECT ? 2 : 3; }

// Both return NaN if an argument is NaN, as in torch.
float smaller(float a, float b) { return a < b || a != a ? a : b; }
float larger(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace

void evaluate(const Program& program, const float* numbers, const float* inputs, float* outputs) {
    float r[MOST_REGISTERS];
    float* next = r;
    for (int k = 0; k < program.numbers; k++) *next++ = numbers[k];
    for (int k = 0; k < program.inputs; k++) *next++ = inputs[k];
    for (int i = 0; i < program.count; i++) {
        const Instruction& of = program.instructions[i];
        const float a = r[of.a], b = r[of.b];
        switch (of.operation) {
            case NEGATE: *next++ = -a; break;
            case ABSOLUTE: *next++ = fabsf(a); break;
            case EXPONENTIAL: *next++ = float(exp(double(a))); break;
            case LOGARITHM: *next++ = float(log(double(a))); break;
            case SQUARE_ROOT: *next++ = sqrtf(a); break;
            case RECIPROCAL: *next++ = 1.0f / a; break;
            case NOT: *next++ = a == 0; break;
            case ADD: *next++ = a + b; break;
            case SUBTRACT: *next++ = a - b; break;
            case MULTIPLY: *next++ = a * b; break;
            case DIVIDE: *next++ = a / b; break;
            case MINIMUM: *next++ = smaller(a, b); break;
            case MAXIMUM: *next++ = larger(a, b); break;
            case LESS: *next++ = a < b; break;
            case LESS_EQUAL: *next++ = a <= b; break;
            case EQUAL: *next++ = a == b; break;
            case NOT_EQUAL: *next++ = a != b; break;
            case AND: *next++ = a != 0 && b != 0; break;
            case OR: *next++ = a != 0 || b != 0; break;
            default: *next++ = a != 0 ? b : r[of.c]; break;  // SELECT
        }
    }
    for (int k = 0; k < program.outputs; k++) outputs[k] = r[program.output[k]];
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
    std::vector<float> row(from.size()), found(outputs.size());
    for (int64_t i = 0; i < count; i++) {
        for (size_t k = 0; k < row.size(); k++) row[k] = from[k][i];
        evaluate(program, numbers.data(), row.data(), found.data());
        for (size_t k = 0; k < found.size(); k++) at<float>(outputs[k])[i] = found[k];
    }
}

}  // namespace grpo
