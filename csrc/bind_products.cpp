// The binding of the matrix products: which of them this processor has, and the division of the work among threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <cpuid.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <string_view>

#include "arguments.h"
#include "parallel.h"
#include "processor.h"

namespace nb = nanobind;

namespace grpo {

extern const Products products_avx512bf16, products_fp32, products_amx;

namespace {

struct Engine {
    const char* name;
    const Products* products;
};

const std::vector<Engine> tables = {
#ifdef GRPO_AMX
    {"amx", &products_amx},
#endif
    {"avx512bf16", &products_avx512bf16},
    {"fp32", &products_fp32},
};

bool has_products() { return best_isa() >= AVX512_BF16; }

const bool supported = has_products();

// The table of this name. Whether the processor has AMX is not asked here: rows/backends/cpu_products.py chooses.
const Products* table(const char* name) {
    for (const Engine& one : tables) {
        if (supported && std::string_view(name) == one.name) return one.products;
    }
    throw std::invalid_argument(std::string("products=") + name + ": not compiled, or this processor lacks it; see has_products().");
}

std::vector<std::string> table_names() {
    std::vector<std::string> names;
    for (const Engine& one : tables) names.emplace_back(one.name);
    return names;
}

// What the choice of a table goes by: the vendor, EDX of CPUID leaf 7, and XCR0, the registers that the system saves.
std::tuple<std::string, uint32_t, uint64_t> processor() {
    std::string vendor;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    uint64_t saved = 0;
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
    return {vendor, edx, saved};
}

// Requests permission to use AMX for the process: for all of its threads, and for processes that it forks. Returns 0 if it is
// granted, else the errno of the refusal. Linux before 5.16 knows neither request (EINVAL), a sandbox may forbid both (EPERM), and
// Linux refuses if the alternate signal stack of a thread has no room for the AMX registers (ENOSPC). Permission cannot be given back,
// so call this only where AMX will be used. The caller has checked CPUID and XCR0.
int ask_for_tiles() {
    constexpr int GET_PERMISSION = 0x1022, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // asm/prctl.h, which old systems lack
    uint64_t permitted = 0;
    if (syscall(SYS_arch_prctl, GET_PERMISSION, &permitted) != 0) return errno;
    if (permitted >> TILE_DATA & 1) return 0;
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return errno;
    // A sandbox may answer 0 to a call that it did not forward.
    if (syscall(SYS_arch_prctl, GET_PERMISSION, &permitted) != 0) return errno;
    return permitted >> TILE_DATA & 1 ? 0 : EPERM;
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

void check_types(const Operand& left, const char* name, const Operand& right) {
    require(right.dtype != FP16, "dtype", right.dtype, "operands are fp32 or bf16.");
    require(left.dtype == FP32 || left.dtype == right.dtype, name, left.dtype, "it is of the type of the other operand, or fp32.");
}

void check_fp32(const char* name, const Operand& x) { require(x.dtype == FP32, name, x.dtype, "results are fp32."); }

// Panels are aligned to cache lines, so that a register is never loaded from two of them.
struct Packed {
    std::unique_ptr<char[]> memory;
    explicit Packed(int64_t bytes) : memory(new char[size_t(bytes) + 64]) {}
    uint32_t* data() const { return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64); }
};

void logits_product(const char* engine, const Operand& hidden, const Operand& weight, uintptr_t bias, const Operand& out, int threads) {
    const Products* products = table(engine);
    const int64_t rows = hidden.rows, width = hidden.columns, vocab = weight.rows;
    check_threads(threads);
    check_types(hidden, "hidden", weight);
    require(hidden.dtype == weight.dtype, "hidden", hidden.dtype, "hidden states and weight are of one type.");
    check_fp32("out", out);
    weight.check("weight", vocab, width);
    out.check("out", rows, vocab);
    if (rows == 0 || vocab == 0) return;
    const Packed packed(products->hidden_pack_bytes(rows, width, hidden.is_bf16()));
    const LogitsProduct job{hidden, weight, vector<float>("bias", bias, vocab, true), out, rows, width, vocab, packed.data()};
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
            float* out = job.out.at<float>(i, 0);
            const float* from = sums + i * job.width;
            for (int64_t j = 0; j < job.width; j++) out[j] = from[j] + from[size + j];
            for (int64_t k = 2; k < parts; k++) {
                for (int64_t j = 0; j < job.width; j++) out[j] += from[k * size + j];
            }
        }
    });
}

void d_hidden(const char* engine, const Operand& gradient, const Operand& weight, const Operand& out, int threads) {
    const Products* products = table(engine);
    const int64_t rows = gradient.rows, width = weight.columns, vocab = weight.rows;
    check_threads(threads);
    check_types(gradient, "gradient", weight);
    check_fp32("out", out);
    gradient.check("gradient", rows, vocab);
    out.check("out", rows, width);
    if (rows == 0 || width == 0) return;
    const HiddenGradProduct job{gradient, weight, out, rows, width, vocab};
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
        of.gradient.base += first * size_of(gradient.dtype), of.weight.base += first * weight.stride * size_of(weight.dtype);
        of.vocab = vocab - first < size ? vocab - first : size;
        if (parts > 1) of.out.base = reinterpret_cast<char*>(sums.get() + k * rows * width), of.out.stride = width;
        return products->d_hidden(of, part(rows, unit, grid.row_parts, r), part(rows, unit, grid.row_parts, r + 1),
                                  part(width, PANEL_COLUMNS, grid.column_parts, c),
                                  part(width, PANEL_COLUMNS, grid.column_parts, c + 1));
    });
    if (parts > 1) add_parts(sums.get(), parts, job, threads);
}

// Without `start` the sum begins at 0.
void d_weight(const char* engine, const Operand& gradient, const Operand& hidden, const Operand* start, const Operand& out, int threads) {
    const Products* products = table(engine);
    const int64_t rows = hidden.rows, width = hidden.columns, vocab = gradient.columns;
    check_threads(threads);
    check_types(gradient, "gradient", hidden);
    require(out.dtype != FP16, "out", out.dtype, "the result is fp32 or bf16.");
    gradient.check("gradient", rows, vocab);
    out.check("out", vocab, width);
    if (start) check_fp32("start", *start), start->check("start", vocab, width);
    if (vocab == 0 || width == 0) return;
    const Packed packed(products->hidden_panel_bytes(rows, width, hidden.is_bf16()));
    const WeightGradProduct job{gradient, hidden, start ? Matrix(*start) : Matrix{}, out, rows, width, vocab, packed.data()};
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
    m.def("ask_for_tiles", &ask_for_tiles, "Request permission to use AMX: 0 if granted, else an errno.");
    m.def("d_hidden_parts", [](const char* engine, int64_t width, int64_t vocab) { return parts_of(*table(engine), width, vocab); },
          "How many sums of d_hidden, each of its size, one product makes.");
    m.def("logits_product", &logits_product);
    m.def("d_hidden", &d_hidden);
    m.def("d_weight", &d_weight, nb::arg("engine"), nb::arg("gradient"), nb::arg("hidden"), nb::arg("start").none(), nb::arg("out"),
          nb::arg("threads"));
}

}  // namespace grpo
