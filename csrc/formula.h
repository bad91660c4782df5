// A formula for the bindings of row kernels: a checked program that owns its memory.
#pragma once
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "kernels.h"
#include "program.h"

namespace grpo {

using Step = std::tuple<std::string, int, int, int>;  // the operation and the registers of its operands; unused ones are 0

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

// Checks a call and returns the addresses of its inputs other than log-prob and entropy.
inline std::vector<const float*> token_inputs(const Formula& formula, const std::vector<float>& numbers,
                                              const std::vector<uintptr_t>& inputs, int64_t count) {
    formula.check_call(numbers, inputs.size() + 2);
    formula.check(formula.program.outputs == TOKEN_OUTPUTS, "it does not give a loss and two slopes.");
    std::vector<const float*> vectors;
    for (uintptr_t address : inputs) {
        check_address("inputs", address, 4, count == 0);
        vectors.push_back(at<float>(address));
    }
    return vectors;
}

// Memory that a thread keeps from row to row and from call to call, because new pages cost more time than a row. It is aligned to 64
// bytes. Null if none is available.
inline char* memory_of_thread(size_t bytes) {
    constexpr size_t ALIGNED = 64;
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t size = 0;
    const size_t needed = bytes + ALIGNED;
    if (size < needed) {
        size = 0;
        memory.reset();
        memory.reset(new (std::nothrow) char[needed]);
        if (!memory) return nullptr;
        size = needed;
    }
    return memory.get() + (ALIGNED - reinterpret_cast<uintptr_t>(memory.get()) % ALIGNED);
}

// The bytes of `count` numbers, rounded up to a multiple of 64.
inline size_t bytes_of_floats(int64_t count) { return (size_t(count) * sizeof(float) + 63) / 64 * 64; }

}  // namespace grpo
