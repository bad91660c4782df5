// The binding of the products: takes addresses as integers and sizes and strides in elements, and divides the work among threads.
// vocabulary/backends/cpu_products.py checks the tensors; this file refuses arguments that cannot be right for any tensors.
#include <nanobind/nanobind.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "arguments.h"
#include "parallel.h"
#include "products.h"

namespace nb = nanobind;

namespace grpo {

#ifdef GRPO_X86
extern const Products products_avx512bf16;
#endif

namespace {

const Products* supported_products() {
#ifdef GRPO_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16")) {
        return &products_avx512bf16;
    }
#endif
    return nullptr;
}

const Products* const products = supported_products();

// For a body that returns false when it gets no memory. An exception must not leave a thread, so this raises after all are done.
template <class Body> void each_range_with_memory(int64_t n, int64_t grain, int threads, const Body& body) {
    std::atomic<bool> enough{true};
    each_range(n, grain, threads, [&](int64_t begin, int64_t end) {
        if (enough.load(std::memory_order_relaxed) && !body(begin, end)) enough.store(false, std::memory_order_relaxed);
    });
    if (!enough) throw std::bad_alloc();  // MemoryError in Python
}

// Divides n elements into `parts` nearly equal parts whose sizes are multiples of `unit`, and returns where part i begins.
int64_t part(int64_t n, int64_t unit, int64_t parts, int64_t i) {
    const int64_t at = ceil_div(n, unit) * i / parts * unit;
    return at < n ? at : n;
}

// Several ranges for each thread: if one thread is delayed, the others take over its remaining ranges.
int64_t range_size(int64_t n, int threads) {
    constexpr int64_t UNIT = 192;  // whole groups of either product
    return ceil_div(n, int64_t(threads) * 8 * UNIT) * UNIT;
}

void check_product(int64_t rows, int64_t width, int64_t vocab, int threads) {
    require(products, "avx512bf16", 0, "this processor lacks it; see has_products().");
    check_threads(threads);
    check_size("rows", rows, 0);
    check_size("width", width, 0);
    check_size("vocab", vocab, 0);
}

void check_matrix(const char* name, uintptr_t address, int element, int64_t rows, int64_t columns, int64_t stride) {
    if (rows == 0 || columns == 0) return;
    require(columns <= LARGEST / rows, name, rows, "so many rows would not fit into any address space.");
    check_address(name, address, element);
    check_stride("stride", stride, rows);
}

int bytes(bool is_bf16) { return is_bf16 ? 2 : 4; }

void check_types(bool gradient_is_bf16, bool operand_is_bf16) {
    require(operand_is_bf16 || !gradient_is_bf16, "gradient", 2, "a bf16 gradient is multiplied with bf16 operands only.");
}

// Panels are aligned to cache lines, so that a register is never loaded from two of them.
struct Packed {
    std::unique_ptr<char[]> memory;
    explicit Packed(int64_t bytes) : memory(new char[size_t(bytes) + 64]) {}
    uint32_t* data() const { return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64); }
};

void logits_product(bool is_bf16, uintptr_t hidden, int64_t hidden_stride, uintptr_t weight, int64_t weight_stride,
                    uintptr_t bias, uintptr_t out, int64_t out_stride, int64_t rows, int64_t width, int64_t vocab, int threads) {
    check_product(rows, width, vocab, threads);
    check_matrix("hidden", hidden, bytes(is_bf16), rows, width, hidden_stride);
    check_matrix("weight", weight, bytes(is_bf16), vocab, width, weight_stride);
    check_address("bias", bias, 4, true);
    check_matrix("out", out, 4, rows, vocab, out_stride);
    if (rows == 0 || vocab == 0) return;
    const Packed packed(products->hidden_pack_bytes(rows, width, is_bf16));
    const LogitsProduct job{{at<char>(hidden), is_bf16, hidden_stride},
                            {at<char>(weight), is_bf16, weight_stride},
                            at<float>(bias),
                            {at<float>(out), out_stride},
                            rows,
                            width,
                            vocab,
                            packed.data()};
    nb::gil_scoped_release release;
    each_range(rows, 16, threads, [&](int64_t begin, int64_t end) { products->pack_hidden(job, begin, end); });
    each_range_with_memory(vocab, range_size(vocab, threads), threads,
                           [&](int64_t begin, int64_t end) { return products->logits(job, begin, end); });
}

struct Grid {
    int64_t row_parts, column_parts;
};

// Each thread computes one rectangle of the output, and no thread waits for another. Each packs the rows of the gradient and the
// columns of the weight that it needs. The grid with the smallest estimated time is chosen.
Grid grid_for(int64_t rows, int64_t width, int threads) {
    Grid best{1, 1};
    double least = INFINITY;
    const int64_t most = ceil_div(rows, 6) < threads ? ceil_div(rows, 6) : threads;
    for (int64_t row_parts = 1; row_parts <= most; row_parts++) {
        const int64_t column_parts = threads / row_parts;
        const double largest_rows = double(ceil_div(ceil_div(rows, 6), row_parts) * 6);
        const double largest_columns = double(ceil_div(ceil_div(width, PANEL_COLUMNS), column_parts) * PANEL_COLUMNS);
        // Packing an element costs about as much as multiplying it with 6 others.
        const double time = largest_rows * largest_columns + 6 * (largest_rows + largest_columns);
        if (time < least) least = time, best = {row_parts, column_parts};
    }
    return best;
}

void d_hidden(uintptr_t gradient, bool gradient_is_bf16, int64_t gradient_stride, uintptr_t weight, bool weight_is_bf16,
              int64_t weight_stride, uintptr_t out, int64_t out_stride, int64_t rows, int64_t width, int64_t vocab, int threads) {
    check_product(rows, width, vocab, threads);
    check_types(gradient_is_bf16, weight_is_bf16);
    check_matrix("gradient", gradient, bytes(gradient_is_bf16), rows, vocab, gradient_stride);
    check_matrix("weight", weight, bytes(weight_is_bf16), vocab, width, weight_stride);
    check_matrix("out", out, 4, rows, width, out_stride);
    if (rows == 0 || width == 0) return;
    const HiddenGradProduct job{{at<char>(gradient), gradient_is_bf16, gradient_stride},
                                {at<char>(weight), weight_is_bf16, weight_stride},
                                {at<float>(out), out_stride},
                                rows,
                                width,
                                vocab};
    nb::gil_scoped_release release;
    const Grid grid = grid_for(rows, width, threads);
    each_range_with_memory(grid.row_parts * grid.column_parts, 1, threads, [&](int64_t i, int64_t) {
        const int64_t r = i / grid.column_parts, c = i % grid.column_parts;
        return products->d_hidden(job, part(rows, 6, grid.row_parts, r), part(rows, 6, grid.row_parts, r + 1),
                                  part(width, PANEL_COLUMNS, grid.column_parts, c),
                                  part(width, PANEL_COLUMNS, grid.column_parts, c + 1));
    });
}

void d_weight(uintptr_t gradient, bool gradient_is_bf16, int64_t gradient_stride, uintptr_t hidden, bool hidden_is_bf16,
              int64_t hidden_stride, uintptr_t start, int64_t start_stride, uintptr_t out, bool out_is_bf16, int64_t out_stride,
              int64_t rows, int64_t width, int64_t vocab, int threads) {
    check_product(rows, width, vocab, threads);
    check_types(gradient_is_bf16, hidden_is_bf16);
    check_matrix("gradient", gradient, bytes(gradient_is_bf16), rows, vocab, gradient_stride);
    check_matrix("hidden", hidden, bytes(hidden_is_bf16), rows, width, hidden_stride);
    if (start) check_matrix("start", start, 4, vocab, width, start_stride);
    check_matrix("out", out, bytes(out_is_bf16), vocab, width, out_stride);
    if (vocab == 0 || width == 0) return;
    const Packed packed(products->hidden_panel_bytes(rows, width, hidden_is_bf16));
    const WeightGradProduct job{{at<char>(gradient), gradient_is_bf16, gradient_stride},
                                {at<char>(hidden), hidden_is_bf16, hidden_stride},
                                at<float>(start),
                                start_stride,
                                at<char>(out),
                                out_is_bf16,
                                out_stride,
                                rows,
                                width,
                                vocab,
                                packed.data()};
    nb::gil_scoped_release release;
    each_range(ceil_div(width, PANEL_COLUMNS), 1, threads,
               [&](int64_t begin, int64_t end) { products->pack_hidden_panels(job, begin, end); });
    each_range_with_memory(vocab, range_size(vocab, threads), threads,
                           [&](int64_t begin, int64_t end) { return products->d_weight(job, begin, end); });
}

}  // namespace

void bind_products(nb::module_& m) {
    m.def("has_products", [] { return products != nullptr; }, "Whether this processor has AVX512_BF16.");
    m.def("logits_product", &logits_product);
    m.def("d_hidden", &d_hidden);
    m.def("d_weight", &d_weight);
}

}  // namespace grpo
