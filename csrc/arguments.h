// What Python passes: addresses as integers, shapes and strides in elements, tensors as objects that are checked when they are made.
// Arguments that cannot be right raise ValueError in Python instead of crashing the process. rows/backends/cpu.py makes them of tensors;
// the caller is responsible for the memory being as large as they say.
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

extern const Kernels* kernels;  // the table in use

// More elements than an address space holds. Sizes up to it, and the offsets computed from them, fit easily into 64 bits.
constexpr int64_t LARGEST = int64_t(1) << 47;

template <class T> T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

inline void require(bool ok, const char* name, int64_t value, const char* remedy) {
    if (!ok) throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + ": " + remedy);
}

inline void check_size(const char* name, int64_t value, int64_t least) {
    require(value >= least && value <= LARGEST, name, value, least ? "a size of at least 1 is needed." : "a size is 0 or more.");
}

inline void check_threads(int threads) { require(threads >= 1, "threads", threads, "at least one has to do the work."); }

inline void check_type(int dtype) {
    require(dtype >= FP32 && dtype <= FP16, "dtype", dtype, "it is 0 for fp32, 1 for bf16, 2 for fp16.");
}

inline void check_address(const char* name, uintptr_t address, int element, bool may_be_null = false) {
    require(address || may_be_null, name, int64_t(address), "an address is needed.");
    require(address % uintptr_t(element) == 0, name, int64_t(address), "the address must be a multiple of the element size.");
}

// Checks that the offset from the first of `count` rows to the last fits into the address space.
inline void check_stride(int64_t stride, int64_t count) {
    const bool fits = count < 2 || (stride <= LARGEST / (count - 1) && stride >= -LARGEST / (count - 1));
    require(fits, "stride", stride, "the last row would lie outside any address space.");
}

template <size_t N> void check_shape(const std::array<int64_t, N>& shape, const std::array<int64_t, N>& strides) {
    int64_t all = 1;
    for (int64_t size : shape) {
        check_size("shape", size, 0);
        require(size == 0 || all <= LARGEST / size, "shape", size, "so many elements would not fit into any address space.");
        if (size) all *= size;
    }
    require(shape[N - 1] < 2 || strides[N - 1] == 1, "stride", strides[N - 1], "elements of a row must be neighbours.");
}

// One value a row of a call, or null where there may be none.
template <class T> T* vector(const char* name, uintptr_t address, int64_t count, bool may_be_null = false) {
    check_address(name, address, sizeof(T), may_be_null || count == 0);
    return at<T>(address);
}

// ---- rows of logits

using Sizes3 = std::array<int64_t, 3>;
using Sizes2 = std::array<int64_t, 2>;

// Rows `first` .. `first` + `count` of [A, T, V].
struct Memory : Rows {
    Memory(uintptr_t address, int dtype, const Sizes3& shape, const Sizes3& strides, int64_t first, int64_t count)
        : Rows{at<char>(address), dtype, shape[1], strides[0], strides[1], shape[2], first, count} {
        check_type(dtype);
        check_shape(shape, strides);
        check_size("vocab", vocab, 1);
        check_size("first", first, 0);
        check_size("count", count, 0);
        const int64_t end = first + count;
        require(end <= shape[0] * shape[1], "count", count, "there are not so many rows.");
        if (count == 0) return;
        check_address("address", address, size_of(dtype));
        check_stride(outer_stride, (end - 1) / inner_count + 1);
        check_stride(inner_stride, end < inner_count ? end : inner_count);
    }
};

// Rows of logits with their transform. Temperatures per row are given for the rows of the call only.
struct LogitRows : Stream {
    LogitRows(uintptr_t address, int dtype, const Sizes3& shape, const Sizes3& strides, int64_t first, int64_t count, float scale,
              float softcap, float inv_temperature, uintptr_t inv_temperatures)
        : Stream{Memory(address, dtype, shape, strides, first, count),
                 {scale, softcap, inv_temperature, vector<float>("inv_temperatures", inv_temperatures, count, true)}} {}
};

// The other stream of a divergence; what is known of both rows may be null where a kernel does not ask for it.
struct Beside : Second {
    Beside(const LogitRows& rows, int direction, double mixture, uintptr_t weight, uintptr_t log_sums, uintptr_t center)
        : Second{rows, direction, mixture, vector<float>("weight", weight, 0), vector<float>("log_sums", log_sums, 0),
                 vector<float>("center", center, 0)} {
        require(direction >= REVERSE && direction <= TV, "direction", direction, "it is 0 for reverse, 1 for forward, 2 for jsd, 3 for tv.");
    }
};

// Checks two streams of a call; `second` may be null.
inline void check_streams(const LogitRows& own, const Beside* second, int threads) {
    check_threads(threads);
    if (!second) return;
    const Rows &a = own.rows, &b = second->stream.rows;
    require(a.count == b.count && a.inner_count == b.inner_count && a.vocab == b.vocab && a.first == b.first, "second", b.count,
            "the second stream must have the shape of the first.");
}

inline void check_out(const Rows& rows, const Memory& out) {
    require(out.count == rows.count && out.inner_count == rows.inner_count && out.vocab == rows.vocab && out.first == rows.first, "out",
            out.count, "the gradient must have the shape of the logits.");
}

// fp32 [q, count]: a row for each name whose bit is set in `names`, in the order of the names.
struct Named {
    float* base;
    int64_t stride, count;
    uint32_t names;

    Named(uintptr_t address, const Sizes2& shape, const Sizes2& strides, uint32_t names)
        : base(at<float>(address)), stride(strides[0]), count(shape[1]), names(names) {
        check_shape(shape, strides);
        require(shape[0] == __builtin_popcount(names), "names", names, "as many names as rows are needed.");
        check_address("address", address, 4, shape[0] == 0 || shape[1] == 0);
        check_stride(stride, shape[0]);
    }

    // The vectors, of which those of the bits `needed` must be there.
    template <int N> Vectors<N> vectors(int64_t rows, uint32_t needed) const {
        require(names >> N == 0, "names", names, "there are not so many names.");
        require((names & needed) == needed, "names", names, "one that is needed is missing.");
        require(count == rows, "count", count, "one value a row is needed.");
        Vectors<N> found;
        float* next = base;
        for (int k = 0; k < N; k++) {
            const bool there = names >> k & 1;
            found.of[k] = there ? next : nullptr;
            if (there) next += stride;
        }
        return found;
    }
};

template <class... Names> constexpr uint32_t bits(Names... names) { return ((1u << names) | ... | 0u); }

constexpr uint32_t OF_OWN = bits(MAX, SUM, TARGET), OF_BOTH = bits(MAX, SUM, TEACHER_MAX, TEACHER_SUM);

// ---- a formula: a checked program that owns its memory

using Step = std::tuple<std::string, int, int, int>;  // the operation and the registers of its operands; unused ones are 0

class Formula {
public:
    Formula(const std::string& name, int numbers, int inputs, const std::vector<Step>& steps, const std::vector<int>& outputs);
    Formula(const Formula&) = delete;

    void check(bool ok, const std::string& remedy) const {
        if (!ok) throw std::invalid_argument("the program of " + name + ": " + remedy);
    }
    // Checks a call, and returns the addresses of its inputs. `given`: how many more inputs there are.
    std::vector<const float*> inputs(const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, int64_t count, size_t given) const;
    // Runs it over vectors.
    void run(const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& outputs, int64_t count) const;

    const std::string name;
    Program program;

private:
    std::vector<Instruction> instructions;
    std::vector<uint16_t> outputs;
};

// ---- matrices and slots

struct Operand : Matrix {
    Operand(uintptr_t address, int dtype, const Sizes2& shape, const Sizes2& strides)
        : Matrix{grpo::at<char>(address), dtype, shape[0], shape[1], strides[0]} {
        check_type(dtype);
        check_shape(shape, strides);
        if (rows == 0 || columns == 0) return;
        check_address("address", address, size_of(dtype));
        check_stride(stride, rows);
    }

    void check(const char* name, int64_t of_rows, int64_t of_columns) const {
        require(rows == of_rows, name, rows, "its rows do not fit the other operands.");
        require(columns == of_columns, name, columns, "its columns do not fit the other operands.");
    }
};

struct Pairs : Slots {
    Pairs(uintptr_t ids, uintptr_t rows, int64_t count)
        : Slots{vector<int64_t>("ids", ids, count), vector<int64_t>("rows", rows, count), count} {
        check_size("count", count, 0);
    }
};

}  // namespace grpo
