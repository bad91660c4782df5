#include "program.h"

#include <math.h>

namespace grpo {

const char* const operation_names[OPERATIONS] = {
    "neg", "abs", "exp", "log", "sqrt", "reciprocal", "not", "add", "sub", "mul",
    "div", "min", "max", "lt",  "le",   "eq",         "ne",  "and", "or",  "where",
};

namespace {

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

}  // namespace grpo
