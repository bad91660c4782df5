// A formula as a straight-line program on fp32 numbers, run for one row at a time. formulas/program.py generates it.
#pragma once
#include <stdint.h>

namespace grpo {

// Registers hold the numbers of a call, then the inputs of a row, then the result of each instruction.
constexpr int MOST_REGISTERS = 512;

// A condition is 1 if true, else 0. program.cpp has the names that Python uses, in this order.
enum Operation : uint16_t {
    NEGATE, ABSOLUTE, EXPONENTIAL, LOGARITHM, SQUARE_ROOT, RECIPROCAL, NOT,
    ADD, SUBTRACT, MULTIPLY, DIVIDE, MINIMUM, MAXIMUM, LESS, LESS_EQUAL, EQUAL, NOT_EQUAL, AND, OR,
    SELECT,  // a ? b : c
    OPERATIONS
};

struct Instruction {
    uint16_t operation, a, b, c;
};

struct Program {
    const Instruction* instructions;
    int count, numbers, inputs, outputs;
    const uint16_t* output;  // registers
};

extern const char* const operation_names[OPERATIONS];

// The number of operands: registers a, b, c in this order.
static inline int operands(int operation) { return operation <= NOT ? 1 : operation < SELECT ? 2 : 3; }

// Each operation rounds to fp32 as torch does; exp and log are those of fp64, rounded.
void evaluate(const Program& program, const float* numbers, const float* inputs, float* outputs);

}  // namespace grpo
