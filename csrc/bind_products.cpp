// The binding of the products: takes addresses as integers and sizes and strides in elements, and divides the work among threads.
// rows/backends/cpu_products.py checks the tensors; this file refuses arguments that cannot be right for any tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <stdint.h>
#ifdef GRPO_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "products.h"

namespace nb = nanobind;

namespace grpo {

#ifdef GRPO_X86
extern const Products products_avx512bf16, products_fp32, products_amx;
#endif

namespace {

struct Named {
    const char* name;
    const Products* products;
};

const std::vector<Named> tables = {
#ifdef GRPO_X86
#ifdef GRPO_AMX
    {"amx", &products_amx},
#endif
    {"avx512bf16", &products_avx512bf16},
    {"fp32", &products_fp32},
#endif
};

bool has_products() {
#ifdef GRPO_X86
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

const bool supported = has_products();

// The table of this name. Whether the processor has AMX is not asked here: rows/backends/cpu_products.py chooses.
const Products* table(const char* name) {
    for (const Named& one : tables) {
        if (supported && std::string_view(name) == one.name) return one.products;
    }
    throw std::invalid_argument(std::string("products=") + name + ": not compiled, or this processor lacks it; see has_products().");
}

std::vector<std::string> table_names() {
    std::vector<std::string> names;
    for (const Named& one : tables) names.emplace_back(one.name);
    return names;
}

// What the choice of a table goes by: the vendor, EDX of CPUID leaf 7, and XCR0, the registers that the system saves.
std::tuple<std::string, uint32_t, uint64_t> processor() {
    std::string vendor;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    uint64_t saved = 0;
#ifdef GRPO_X86
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx)) {
        for (unsigned part : {ebx, edx, ecx}) vendor.append(reinterpret_cast<const char*>(&part), 4);
    }
    constexpr unsigned OSXSAVE = 1u << 27;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & OSXSAVE)) {
        unsigned low, high;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        saved = uint64_t(high) << 32 | low;
    }
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) edx = 0;
#endif
    return {vendor, edx, saved};
}

// Asks Linux to let this process use tiles, for good: its threads, those that are there already and those to come, and processes that
// it forks may. Refused by kernels before 5.16, by sandboxes, and where a thread has a signal stack too small for the larger frame.
bool ask_for_tiles() {
#ifdef GRPO_X86
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

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

void logits_product(const char* engine, bool is_bf16, uintptr_t hidden, int64_t hidden_stride, uintptr_t weight, int64_t weight_stride,
                    uintptr_t bias, uintptr_t out, int64_t out_stride, int64_t rows, int64_t width, int64_t vocab, int threads) {
    const Products* products = table(engine);
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
    each_range(rows, 32, threads, [&](int64_t begin, int64_t end) { products->pack_hidden(job, begin, end); });
    each_range_with_memory(vocab, range_size(vocab, threads), threads,
                           [&](int64_t begin, int64_t end) { return products->logits(job, begin, end); });
}

struct Grid {
    int64_t row_parts, column_parts;
};

// Each thread computes one rectangle of the output, and no thread waits for another. Each packs the rows of the gradient and the
// columns of the weight that it needs. The grid with the smallest estimated time is chosen.
Grid grid_for(int64_t rows, int64_t width, int64_t threads, int64_t row_unit) {
    Grid best{1, 1};
    double least = INFINITY;
    const int64_t most = ceil_div(rows, row_unit) < threads ? ceil_div(rows, row_unit) : threads;
    for (int64_t row_parts = 1; row_parts <= most; row_parts++) {
        const int64_t column_parts = threads / row_parts;
        const double largest_rows = double(ceil_div(ceil_div(rows, row_unit), row_parts) * row_unit);
        const double largest_columns = double(ceil_div(ceil_div(width, PANEL_COLUMNS), column_parts) * PANEL_COLUMNS);
        // Packing an element costs about as much as multiplying it with 6 others.
        const double time = largest_rows * largest_columns + 6 * (largest_rows + largest_columns);
        if (time < least) least = time, best = {row_parts, column_parts};
    }
    return best;
}

// How many ids d_hidden sums apart, and how many such parts there are.
int64_t part_size(const Products& products, int64_t width) { return products.part * ceil_div(width, PART_WIDTH); }

int64_t parts_of(const Products& products, int64_t width, int64_t vocab) {
    return products.part && width && vocab ? ceil_div(vocab, part_size(products, width)) : 1;
}

// Adds `parts` matrices [rows, width], one after the other in memory, in their order.
void add_parts(const float* sums, int64_t parts, const HiddenGradProduct& job, int threads) {
    const int64_t size = job.rows * job.width;
    each_range(job.rows, 16, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float* out = job.out.data + i * job.out.stride;
            const float* from = sums + i * job.width;
            for (int64_t j = 0; j < job.width; j++) out[j] = from[j] + from[size + j];
            for (int64_t k = 2; k < parts; k++) {
                for (int64_t j = 0; j < job.width; j++) out[j] += from[k * size + j];
            }
        }
    });
}

void d_hidden(const char* engine, uintptr_t gradient, bool gradient_is_bf16, int64_t gradient_stride, uintptr_t weight,
              bool weight_is_bf16, int64_t weight_stride, uintptr_t out, int64_t out_stride, int64_t rows, int64_t width,
              int64_t vocab, int threads) {
    const Products* products = table(engine);
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
    const int64_t parts = parts_of(*products, width, vocab), size = parts > 1 ? part_size(*products, width) : vocab;
    const std::unique_ptr<float[]> sums(parts > 1 ? new float[size_t(parts * rows * width)] : nullptr);
    // Several rectangles for each thread where the parts make so many.
    const int64_t unit = products->row_unit, rectangles = parts > 1 ? ceil_div(4 * int64_t(threads), parts) : threads;
    const Grid grid = grid_for(rows, width, rectangles, unit);
    each_range_with_memory(parts * grid.row_parts * grid.column_parts, 1, threads, [&](int64_t i, int64_t) {
        const int64_t k = i / (grid.row_parts * grid.column_parts), r = i / grid.column_parts % grid.row_parts;
        const int64_t c = i % grid.column_parts, first = k * size;
        HiddenGradProduct of = job;
        of.gradient.data += first * bytes(gradient_is_bf16), of.weight.data += first * weight_stride * bytes(weight_is_bf16);
        of.vocab = vocab - first < size ? vocab - first : size;
        if (parts > 1) of.out = {sums.get() + k * rows * width, width};
        return products->d_hidden(of, part(rows, unit, grid.row_parts, r), part(rows, unit, grid.row_parts, r + 1),
                                  part(width, PANEL_COLUMNS, grid.column_parts, c),
                                  part(width, PANEL_COLUMNS, grid.column_parts, c + 1));
    });
    if (parts > 1) add_parts(sums.get(), parts, job, threads);
}

void d_weight(const char* engine, uintptr_t gradient, bool gradient_is_bf16, int64_t gradient_stride, uintptr_t hidden,
              bool hidden_is_bf16, int64_t hidden_stride, uintptr_t start, int64_t start_stride, uintptr_t out, bool out_is_bf16,
              int64_t out_stride, int64_t rows, int64_t width, int64_t vocab, int threads) {
    const Products* products = table(engine);
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
    m.def("has_products", [] { return supported; }, "Whether this processor has AVX512_BF16.");
    m.def("products", &table_names, "The names of the tables of products that were compiled.");
    m.def("processor", &processor, "Its vendor, CPUID 7.0 EDX, and XCR0.");
    m.def("ask_for_tiles", &ask_for_tiles, "Whether the system lets this process use AMX from now on.");
    m.def("d_hidden_parts", [](const char* engine, int64_t width, int64_t vocab) { return parts_of(*table(engine), width, vocab); },
          "How many sums of d_hidden, each of its size, one product makes.");
    m.def("logits_product", &logits_product);
    m.def("d_hidden", &d_hidden);
    m.def("d_weight", &d_weight);
}

}  // namespace grpo
