// Checked arguments. Python passes addresses as integers and shapes and strides in elements
// (grpo_kernels/core/backends/cpu.py makes them from tensors). The classes below check them when
// they are constructed: arguments that cannot be right raise ValueError in Python instead of
// crashing the process. The caller is responsible for the memory being as large as the shape says.
#pragma once
#include <stdint.h>

#include <array>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace grpo {

extern const Kernels* kernels;  // the table in use, see module.cpp

// More elements than an address space holds. Sizes up to it, and offsets computed from them, fit
// into 64 bits.
constexpr int64_t MAX_ELEMENTS = int64_t(1) << 47;

template <class T> T* pointer_at(uintptr_t address) { return reinterpret_cast<T*>(address); }

// Throws "name=value: remedy" unless `ok`.
inline void require(bool ok, const char* name, int64_t value, const char* remedy) {
    if (ok) return;
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + ": " + remedy);
}

// Throws unless minimum <= value <= MAX_ELEMENTS.
inline void check_size(const char* name, int64_t value, int64_t minimum) {
    const char* remedy = minimum ? "pass a size of at least 1." : "pass a size of at least 0.";
    require(value >= minimum && value <= MAX_ELEMENTS, name, value, remedy);
}

inline void check_threads(int threads) {
    require(threads >= 1, "threads", threads, "pass at least 1.");
}

inline void check_dtype(int dtype) {
    const bool known = dtype >= FP32 && dtype <= FP16;
    require(known, "dtype", dtype, "pass 0 for fp32, 1 for bf16 or 2 for fp16.");
}

// Throws unless the address is a multiple of element_size, and not null unless it may be.
inline void check_address(
    const char* name, uintptr_t address, int element_size, bool may_be_null = false) {
    require(address || may_be_null, name, int64_t(address), "pass a nonzero address.");
    const bool aligned = address % uintptr_t(element_size) == 0;
    require(aligned, name, int64_t(address), "pass an address aligned to the element size.");
}

// Checks that the last of `count` rows lies inside an address space.
inline void check_stride(int64_t stride, int64_t count) {
    if (count < 2) return;
    const int64_t limit = MAX_ELEMENTS / (count - 1);
    const bool fits = stride >= -limit && stride <= limit;
    require(fits, "stride", stride, "the last row would lie outside the address space.");
}

// Throws unless the shape fits an address space and the last dimension has stride 1.
template <size_t N>
void check_shape(const std::array<int64_t, N>& shape, const std::array<int64_t, N>& strides) {
    int64_t num_elements = 1;
    for (int64_t size : shape) {
        check_size("shape", size, 0);
        if (size == 0) continue;
        require(num_elements <= MAX_ELEMENTS / size, "shape", size, "no memory is that large.");
        num_elements *= size;
    }
    const bool unit_stride = shape[N - 1] < 2 || strides[N - 1] == 1;
    require(unit_stride, "stride", strides[N - 1], "pass a last dimension of stride 1.");
}

// The pointer to a vector [count].
template <class T>
T* vector_at(const char* name, uintptr_t address, int64_t count, bool may_be_null = false) {
    check_address(name, address, sizeof(T), may_be_null || count == 0);
    return pointer_at<T>(address);
}

// ---- rows of logits

using Sizes2 = std::array<int64_t, 2>;
using Sizes3 = std::array<int64_t, 3>;

// Rows first .. first + count - 1 of a tensor [A, T, V].
struct CheckedRows : Rows {
    CheckedRows(
        uintptr_t address, int dtype, const Sizes3& shape, const Sizes3& strides, int64_t first,
        int64_t count)
        : Rows{pointer_at<char>(address),
               dtype,
               shape[1],
               strides[0],
               strides[1],
               shape[2],
               first,
               count} {
        check_dtype(dtype);
        check_shape(shape, strides);
        check_size("vocab", vocab, 1);
        check_size("first", first, 0);
        check_size("count", count, 0);
        const int64_t end = first + count;
        require(end <= shape[0] * shape[1], "count", count, "the tensor has fewer rows.");
        if (count == 0) return;
        check_address("address", address, size_of(dtype));
        check_stride(outer_stride, (end - 1) / inner_count + 1);
        check_stride(inner_stride, end < inner_count ? end : inner_count);
    }
};

// Rows of logits and their transform. `inverse_temperatures` [count] may be null.
struct CheckedLogitRows : LogitRows {
    CheckedLogitRows(
        uintptr_t address, int dtype, const Sizes3& shape, const Sizes3& strides, int64_t first,
        int64_t count, float scale, float softcap, float inverse_temperature,
        uintptr_t inverse_temperatures)
        : LogitRows{
              CheckedRows(address, dtype, shape, strides, first, count),
              {scale, softcap, inverse_temperature,
               vector_at<float>("inverse_temperatures", inverse_temperatures, count, true)}} {}
};

// The vectors [N] may be null where the kernel does not need them.
struct CheckedReferenceRows : ReferenceRows {
    CheckedReferenceRows(
        const CheckedLogitRows& logits, int direction, double mixture, uintptr_t divergence_weight,
        uintptr_t log_sum_ratio, uintptr_t center)
        : ReferenceRows{
              logits,
              direction,
              mixture,
              vector_at<float>("divergence_weight", divergence_weight, 0),
              vector_at<float>("log_sum_ratio", log_sum_ratio, 0),
              vector_at<float>("center", center, 0)} {
        const bool known = direction >= REVERSE && direction <= TV;
        require(
            known, "direction", direction,
            "pass 0 for reverse, 1 for forward, 2 for jsd or 3 for tv.");
    }
};

inline bool same_shape(const Rows& a, const Rows& b) {
    return a.count == b.count && a.inner_count == b.inner_count && a.vocab == b.vocab &&
           a.first == b.first;
}

// `reference` may be null.
inline void check_reference(const CheckedLogitRows& policy, const CheckedReferenceRows* reference) {
    if (!reference) return;
    const Rows& rows = reference->logits.rows;
    require(
        same_shape(policy.rows, rows), "reference", rows.count,
        "pass reference logits of the shape of the policy's.");
}

inline void check_grad_logits(const Rows& logits, const CheckedRows& grad_logits) {
    require(
        same_shape(logits, grad_logits), "grad_logits", grad_logits.count,
        "pass memory of the shape of the logits.");
}

// A table fp32 [num_names, count]: one row for each name whose bit is set in `names`, in the order
// of the enum that the kernel uses (Sum, Coefficient, Output or MixtureSum).
struct CheckedNamedRows {
    float* base;
    int64_t stride, count;
    uint32_t names;

    CheckedNamedRows(uintptr_t address, const Sizes2& shape, const Sizes2& strides, uint32_t names)
        : base(pointer_at<float>(address)), stride(strides[0]), count(shape[1]), names(names) {
        check_shape(shape, strides);
        const bool one_row_each = shape[0] == __builtin_popcount(names);
        require(one_row_each, "names", names, "pass as many names as rows.");
        check_address("address", address, sizeof(float), shape[0] == 0 || shape[1] == 0);
        check_stride(stride, shape[0]);
    }

    // Returns the vectors [num_rows] by name. Throws if one of the `required` bits is not set.
    template <int NUM_NAMES>
    NamedRows<NUM_NAMES> named_rows(int64_t num_rows, uint32_t required) const {
        require(names >> NUM_NAMES == 0, "names", names, "pass bits of known names only.");
        require((names & required) == required, "names", names, "a required name is missing.");
        require(count == num_rows, "count", count, "pass one value per row.");
        NamedRows<NUM_NAMES> named;
        float* next = base;
        for (int name = 0; name < NUM_NAMES; name++) {
            const bool present = names >> name & 1;
            named.pointers[name] = present ? next : nullptr;
            if (present) next += stride;
        }
        return named;
    }
};

// Returns a number with the bits of these names.
template <class... Names> constexpr uint32_t bits(Names... names) {
    return ((1u << names) | ... | 0u);
}

constexpr uint32_t BASIC_SUMS = bits(MAX_LOGIT, SUM_EXP, TARGET_LOGIT);
constexpr uint32_t NORMALIZERS = bits(MAX_LOGIT, SUM_EXP, REFERENCE_MAX_LOGIT, REFERENCE_SUM_EXP);

// ---- the loss formula

// (name of the operation, registers of its operands a, b, c). Unused operands are 0.
using Step = std::tuple<std::string, int, int, int>;

// A program whose operations and registers have been checked. It owns the memory of `program`.
class CheckedProgram {
public:
    CheckedProgram(
        const std::string& name, int num_numbers, int num_inputs, const std::vector<Step>& steps,
        const std::vector<int>& outputs);
    CheckedProgram(const CheckedProgram&) = delete;

    // Throws "the program of NAME: remedy" unless `ok`.
    void check(bool ok, const std::string& remedy) const {
        if (!ok) throw std::invalid_argument("the program of " + name + ": " + remedy);
    }
    // Checks the numbers of a call and returns the pointers to its input vectors [count], of which
    // the caller computes the first `num_computed` itself.
    std::vector<const float*> check_call(
        const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, int64_t count,
        size_t num_computed) const;
    // Evaluates the program for vectors [count].
    void run(
        const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs,
        const std::vector<uintptr_t>& outputs, int64_t count) const;

    const std::string name;
    Program program;

private:
    std::vector<Instruction> instructions;
    std::vector<uint16_t> output_registers;
};

// ---- matrices and pairs

struct CheckedMatrix : Matrix {
    CheckedMatrix(uintptr_t address, int dtype, const Sizes2& shape, const Sizes2& strides)
        : Matrix{pointer_at<char>(address), dtype, shape[0], shape[1], strides[0]} {
        check_dtype(dtype);
        check_shape(shape, strides);
        if (rows == 0 || columns == 0) return;
        check_address("address", address, size_of(dtype));
        check_stride(stride, rows);
    }

    // Throws unless the matrix is [num_rows, num_columns].
    void check_size_is(const char* name, int64_t num_rows, int64_t num_columns) const {
        require(rows == num_rows, name, rows, "its rows do not fit the other operands.");
        require(
            columns == num_columns, name, columns, "its columns do not fit the other operands.");
    }
};

// The values of `ids` and `rows` are not checked.
struct CheckedRowIdPairs : RowIdPairs {
    CheckedRowIdPairs(uintptr_t ids, uintptr_t rows, int64_t count)
        : RowIdPairs{
              vector_at<int64_t>("ids", ids, count), vector_at<int64_t>("rows", rows, count),
              count} {
        check_size("count", count, 0);
    }
};

}  // namespace grpo
