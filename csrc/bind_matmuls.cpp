// The Python functions of the matmuls: which ways to multiply this processor supports, and the
// division of the work among threads.
#include <cpuid.h>
#include <errno.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "arguments.h"
#include "parallel.h"
#include "processor.h"

namespace nb = nanobind;

namespace grpo {

extern const Matmuls matmuls_avx512bf16, matmuls_fp32, matmuls_amx;

namespace {

// ---- engines: sets of instructions that compute the matmuls

struct Engine {
    const char* name;
    const Matmuls* matmuls;
};

const std::vector<Engine> ENGINES = {
#ifdef GRPO_AMX
    {"amx", &matmuls_amx},
#endif
    {"avx512bf16", &matmuls_avx512bf16},
    {"fp32", &matmuls_fp32},
};

const bool supports_matmuls = best_isa() >= AVX512_BF16;

// Returns the matmuls of an engine. Whether the processor has AMX is not checked here: the caller,
// core/backends/cpu_matmuls.py, chooses the engine.
const Matmuls& matmuls_of(const char* name) {
    for (const Engine& engine : ENGINES) {
        if (supports_matmuls && std::string_view(name) == engine.name) return *engine.matmuls;
    }
    throw std::invalid_argument(
        std::string("engine=") + name +
        ": it was not compiled, or this processor lacks it. Pass one of matmul_engines() where "
        "has_matmuls() is true.");
}

std::vector<std::string> engine_names() {
    std::vector<std::string> names;
    for (const Engine& engine : ENGINES) names.emplace_back(engine.name);
    return names;
}

// Returns what the choice of an engine depends on: the vendor, EDX of CPUID leaf 7, and XCR0, the
// registers that the system saves.
std::tuple<std::string, uint32_t, uint64_t> processor() {
    constexpr unsigned VENDOR_LEAF = 0, FEATURE_LEAF = 1, EXTENDED_FEATURE_LEAF = 7;
    constexpr unsigned OSXSAVE = 1u << 27;  // in ECX of the feature leaf: XGETBV may be used
    std::string vendor;
    uint64_t saved_registers = 0;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(VENDOR_LEAF, &eax, &ebx, &ecx, &edx)) {
        for (unsigned part : {ebx, edx, ecx}) {
            vendor.append(reinterpret_cast<const char*>(&part), sizeof part);
        }
    }
    if (__get_cpuid(FEATURE_LEAF, &eax, &ebx, &ecx, &edx) && (ecx & OSXSAVE)) {
        unsigned low, high;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        saved_registers = uint64_t(high) << 32 | low;
    }
    if (!__get_cpuid_count(EXTENDED_FEATURE_LEAF, 0, &eax, &ebx, &ecx, &edx)) edx = 0;
    return {vendor, edx, saved_registers};
}

// Requests permission to use AMX for the process: for all of its threads, and for processes that it
// forks. Returns 0 if it is granted, else the errno of the refusal. Linux before 5.16 knows neither
// request (EINVAL), a sandbox may forbid both (EPERM), and Linux refuses if the alternate signal
// stack of a thread is too small for the AMX registers (ENOSPC). Permission cannot be given back,
// so call this only if AMX will be used. The caller has checked CPUID and XCR0.
int request_amx_permission() {
    // From asm/prctl.h, which old systems lack.
    constexpr int GET_PERMISSION = 0x1022, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    uint64_t permitted = 0;
    if (syscall(SYS_arch_prctl, GET_PERMISSION, &permitted) != 0) return errno;
    if (permitted >> TILE_DATA & 1) return 0;
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return errno;
    // A sandbox may answer 0 to a call that it did not forward.
    if (syscall(SYS_arch_prctl, GET_PERMISSION, &permitted) != 0) return errno;
    return permitted >> TILE_DATA & 1 ? 0 : EPERM;
}

// ---- arguments and memory

void check_operand_dtypes(
    const CheckedMatrix& left, const char* left_name, const CheckedMatrix& right) {
    require(right.dtype != FP16, "dtype", right.dtype, "pass fp32 or bf16 operands.");
    const bool matches = left.dtype == FP32 || left.dtype == right.dtype;
    require(matches, left_name, left.dtype, "pass fp32, or the dtype of the other operand.");
}

void check_fp32(const char* name, const CheckedMatrix& matrix) {
    require(matrix.dtype == FP32, name, matrix.dtype, "pass fp32.");
}

// Memory for a packed operand, aligned to cache lines, so that a register is never loaded from two
// of them.
struct PackedMemory {
    std::unique_ptr<char[]> memory;

    explicit PackedMemory(int64_t bytes) : memory(new char[size_t(bytes) + CACHE_LINE]) {}
    uint32_t* data() const {
        const int64_t address = int64_t(reinterpret_cast<uintptr_t>(memory.get()));
        return reinterpret_cast<uint32_t*>(ceil_div(address, CACHE_LINE) * CACHE_LINE);
    }
};

// ---- division of the work

// Rows of hidden states that one thread packs at a time.
constexpr int64_t ROWS_PER_PACKING_RANGE = 32;

// Divides n elements into num_parts nearly equal parts, whose sizes are multiples of `unit` except
// for the last one. Returns the first element of part number `part`.
int64_t split_begin(int64_t n, int64_t unit, int64_t num_parts, int64_t part) {
    const int64_t begin = ceil_div(n, unit) * part / num_parts * unit;
    return std::min(begin, n);
}

// Returns the ids in a range of the vocabulary. Each thread gets several ranges: if one thread is
// delayed, the others take over its remaining ranges.
int64_t vocab_range_size(int64_t vocab, int threads) {
    constexpr int64_t UNIT = 192;  // whole groups of every engine
    constexpr int64_t RANGES_PER_THREAD = 8;
    return ceil_div(vocab, threads * RANGES_PER_THREAD * UNIT) * UNIT;
}

struct Grid {
    int64_t row_parts, column_parts;
};

// Returns a grid of at most num_rectangles rectangles of grad_hidden [rows, width], the one with
// the smallest estimated time. Each rectangle is computed by one thread, which packs the rows of
// the gradient and the columns of the weight that it needs, and waits for no other thread.
Grid choose_grid(int64_t rows, int64_t width, int64_t num_rectangles, int64_t row_unit) {
    // Packing an element costs about as much as multiplying it with 6 others.
    constexpr double PACKING_COST = 6;
    const int64_t row_units = ceil_div(rows, row_unit);
    const int64_t column_panels = ceil_div(width, PANEL_COLUMNS);
    Grid best{1, 1};
    double least_time = INFINITY;
    for (int64_t row_parts = 1; row_parts <= std::min(row_units, num_rectangles); row_parts++) {
        const int64_t column_parts = num_rectangles / row_parts;
        const double part_rows = double(ceil_div(row_units, row_parts) * row_unit);
        const double part_columns = double(ceil_div(column_panels, column_parts) * PANEL_COLUMNS);
        const double time = part_rows * part_columns + PACKING_COST * (part_rows + part_columns);
        if (time >= least_time) continue;
        least_time = time;
        best = {row_parts, column_parts};
    }
    return best;
}

// The ids in one vocabulary split of grad_hidden, see Matmuls::vocab_split.
int64_t vocab_split_size(const Matmuls& matmuls, int64_t width) {
    return matmuls.vocab_split * ceil_div(width, SPLIT_WIDTH);
}

// Returns how many vocabulary splits grad_hidden computes; 1 if it does not split the vocabulary.
int64_t num_vocab_splits(const Matmuls& matmuls, int64_t width, int64_t vocab) {
    if (!matmuls.vocab_split || !width || !vocab) return 1;
    return ceil_div(vocab, vocab_split_size(matmuls, width));
}

// out [rows, width] = sum of partial_sums [num_splits, rows, width] over the splits, in their
// order.
void add_vocab_splits(
    const float* partial_sums, int64_t num_splits, const GradHiddenMatmul& job, int threads) {
    constexpr int64_t ROWS_PER_RANGE = 16;
    const int64_t width = job.width;
    const int64_t split_elements = job.rows * width;
    parallel_for(job.rows, ROWS_PER_RANGE, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float* out = job.out.at<float>(i, 0);
            const float* first = partial_sums + i * width;
            const float* second = first + split_elements;
            for (int64_t j = 0; j < width; j++) out[j] = first[j] + second[j];
            for (int64_t split = 2; split < num_splits; split++) {
                const float* next = first + split * split_elements;
                for (int64_t j = 0; j < width; j++) out[j] += next[j];
            }
        }
    });
}

// ---- the matmuls

// out [N, V] = hidden [N, H] weight [V, H]^T + bias [V] (0: none).
void logits(
    const char* engine, const CheckedMatrix& hidden, const CheckedMatrix& weight, uintptr_t bias,
    const CheckedMatrix& out, int threads) {
    const Matmuls& matmuls = matmuls_of(engine);
    const int64_t rows = hidden.rows;
    const int64_t width = hidden.columns;
    const int64_t vocab = weight.rows;
    check_threads(threads);
    check_operand_dtypes(hidden, "hidden", weight);
    require(
        hidden.dtype == weight.dtype, "hidden", hidden.dtype,
        "pass hidden states of the dtype of the weight.");
    check_fp32("out", out);
    weight.check_size_is("weight", vocab, width);
    out.check_size_is("out", rows, vocab);
    if (rows == 0 || vocab == 0) return;

    const PackedMemory packed(matmuls.packed_hidden_bytes(rows, width, hidden.is_bf16()));
    const float* bias_values = vector_at<float>("bias", bias, vocab, true);
    const LogitsMatmul job{hidden, weight, bias_values, out, rows, width, vocab, packed.data()};
    nb::gil_scoped_release release;
    parallel_for(rows, ROWS_PER_PACKING_RANGE, threads, [&](int64_t begin, int64_t end) {
        matmuls.pack_hidden(job, begin, end);
    });
    const int64_t grain = vocab_range_size(vocab, threads);
    parallel_for_or_bad_alloc(vocab, grain, threads, [&](int64_t begin, int64_t end) {
        return matmuls.logits(job, begin, end);
    });
}

// out [N, H] = grad_logits [N, V] weight [V, H].
void grad_hidden(
    const char* engine, const CheckedMatrix& grad_logits, const CheckedMatrix& weight,
    const CheckedMatrix& out, int threads) {
    const Matmuls& matmuls = matmuls_of(engine);
    const int64_t rows = grad_logits.rows;
    const int64_t width = weight.columns;
    const int64_t vocab = weight.rows;
    check_threads(threads);
    check_operand_dtypes(grad_logits, "grad_logits", weight);
    check_fp32("out", out);
    grad_logits.check_size_is("grad_logits", rows, vocab);
    out.check_size_is("out", rows, width);
    if (rows == 0 || width == 0) return;

    const GradHiddenMatmul job{grad_logits, weight, out, rows, width, vocab};
    nb::gil_scoped_release release;
    const int64_t num_splits = num_vocab_splits(matmuls, width, vocab);
    const bool is_split = num_splits > 1;
    const int64_t split_size = is_split ? vocab_split_size(matmuls, width) : vocab;
    const int64_t split_elements = rows * width;
    std::unique_ptr<float[]> partial_sums;
    if (is_split) partial_sums.reset(new float[size_t(num_splits * split_elements)]);

    // If there are splits, each thread gets several rectangles of all of them together.
    constexpr int64_t RECTANGLES_PER_THREAD = 4;
    const int64_t rectangles_per_split =
        is_split ? ceil_div(RECTANGLES_PER_THREAD * threads, num_splits) : threads;
    const int64_t row_unit = matmuls.row_unit;
    const Grid grid = choose_grid(rows, width, rectangles_per_split, row_unit);
    const int64_t grid_size = grid.row_parts * grid.column_parts;
    parallel_for_or_bad_alloc(num_splits * grid_size, 1, threads, [&](int64_t index, int64_t) {
        const int64_t split = index / grid_size;
        const int64_t row_part = index / grid.column_parts % grid.row_parts;
        const int64_t column_part = index % grid.column_parts;
        const int64_t first_id = split * split_size;
        // The matmul over the ids of this split, whose result is one of the partial sums.
        GradHiddenMatmul split_job = job;
        split_job.vocab = std::min(split_size, vocab - first_id);
        split_job.grad_logits.base += first_id * size_of(grad_logits.dtype);
        split_job.weight.base += first_id * weight.stride * size_of(weight.dtype);
        if (is_split) {
            float* sums = partial_sums.get() + split * split_elements;
            split_job.out.base = reinterpret_cast<char*>(sums);
            split_job.out.stride = width;
        }
        return matmuls.grad_hidden(
            split_job, split_begin(rows, row_unit, grid.row_parts, row_part),
            split_begin(rows, row_unit, grid.row_parts, row_part + 1),
            split_begin(width, PANEL_COLUMNS, grid.column_parts, column_part),
            split_begin(width, PANEL_COLUMNS, grid.column_parts, column_part + 1));
    });
    if (is_split) add_vocab_splits(partial_sums.get(), num_splits, job, threads);
}

// out [V, H] = start [V, H] + grad_logits [N, V]^T hidden [N, H]. Without `start` the sum begins at
// 0. `out` may be `start`.
void grad_weight(
    const char* engine, const CheckedMatrix& grad_logits, const CheckedMatrix& hidden,
    const CheckedMatrix* start, const CheckedMatrix& out, int threads) {
    const Matmuls& matmuls = matmuls_of(engine);
    const int64_t rows = hidden.rows;
    const int64_t width = hidden.columns;
    const int64_t vocab = grad_logits.columns;
    check_threads(threads);
    check_operand_dtypes(grad_logits, "grad_logits", hidden);
    require(out.dtype != FP16, "out", out.dtype, "pass fp32 or bf16.");
    grad_logits.check_size_is("grad_logits", rows, vocab);
    out.check_size_is("out", vocab, width);
    if (start) {
        check_fp32("start", *start);
        start->check_size_is("start", vocab, width);
    }
    if (vocab == 0 || width == 0) return;

    const PackedMemory packed(matmuls.packed_hidden_panels_bytes(rows, width, hidden.is_bf16()));
    const GradWeightMatmul job{grad_logits, hidden,       start ? Matrix(*start) : Matrix{},
                               out,         rows,         width,
                               vocab,       packed.data()};
    nb::gil_scoped_release release;
    const int64_t num_panels = ceil_div(width, PANEL_COLUMNS);
    parallel_for(num_panels, 1, threads, [&](int64_t begin, int64_t end) {
        matmuls.pack_hidden_panels(job, begin, end);
    });
    const int64_t grain = vocab_range_size(vocab, threads);
    parallel_for_or_bad_alloc(vocab, grain, threads, [&](int64_t begin, int64_t end) {
        return matmuls.grad_weight(job, begin, end);
    });
}

}  // namespace

void bind_matmuls(nb::module_& m) {
    m.def(
        "has_matmuls", [] { return supports_matmuls; },
        "Return whether this processor has AVX512_BF16.");
    m.def("matmul_engines", &engine_names, "Return the names of the engines that were compiled.");
    m.def("processor", &processor, "Return the vendor, EDX of CPUID leaf 7, and XCR0.");
    m.def(
        "request_amx_permission", &request_amx_permission,
        "Request permission to use AMX. Return 0 if it is granted, else an errno.");
    m.def(
        "num_vocab_splits",
        [](const char* engine, int64_t width, int64_t vocab) {
            return num_vocab_splits(matmuls_of(engine), width, vocab);
        },
        "Return how many partial sums of its size grad_hidden allocates; 1: none.");
    m.def("logits", &logits);
    m.def("grad_hidden", &grad_hidden);
    m.def(
        "grad_weight", &grad_weight, nb::arg("engine"), nb::arg("grad_logits"), nb::arg("hidden"),
        nb::arg("start").none(), nb::arg("out"), nb::arg("threads"));
}

}  // namespace grpo
