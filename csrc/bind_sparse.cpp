// The binding of the sparse products: takes addresses as integers and sizes and strides in elements, and divides the work among
// threads. rows/backends/cpu_sparse.py checks the tensors; this file refuses arguments that cannot be right for any tensors.
// The contents of ids and rows are not checked.
#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "kernels.h"
#include "parallel.h"
#include "sparse.h"

namespace nb = nanobind;

namespace grpo {

#ifdef GRPO_X86
extern const SparseKernels sparse_avx512bf16, sparse_avx512, sparse_avx2;
#endif
extern const SparseKernels sparse_baseline;

namespace {

const SparseKernels* sparse = &sparse_baseline;

// Ragged in a range: few enough that each thread gets several ranges, and enough that waiting for the first rows costs little.
int64_t slots_at_once(int64_t count, int threads) {
    const int64_t even = count / (int64_t(threads) * 16);
    return even < 32 ? 32 : even > 512 ? 512 : even;
}

Table table(const char* name, uintptr_t base, int dtype, int64_t stride, int64_t rows) {
    check_size("rows", rows, 0);
    check_address(name, base, element_size("dtype", dtype), rows == 0);
    check_stride("stride", stride, rows);
    return {at<char>(base), dtype, stride};
}

void check_slots(int64_t count, int64_t width, uintptr_t ids, uintptr_t rows, uintptr_t values, int threads) {
    check_threads(threads);
    check_size("count", count, 0);
    check_size("width", width, 0);
    check_address("ids", ids, 8, count == 0);
    check_address("rows", rows, 8, count == 0);
    check_address("values", values, 4, count == 0);
}

void slot_logits(uintptr_t hidden, int hidden_dtype, int64_t hidden_stride, int64_t rows, uintptr_t weight, int weight_dtype,
                 int64_t weight_stride, int64_t vocab, int64_t width, uintptr_t ids, uintptr_t slot_rows, uintptr_t logits,
                 int64_t count, int threads) {
    check_slots(count, width, ids, slot_rows, logits, threads);
    const SlotLogits job{table("hidden", hidden, hidden_dtype, hidden_stride, rows),
                         table("weight", weight, weight_dtype, weight_stride, vocab),
                         width,
                         at<int64_t>(ids),
                         at<int64_t>(slot_rows),
                         at<float>(logits)};
    nb::gil_scoped_release release;
    each_range(count, slots_at_once(count, threads), threads, [&](int64_t begin, int64_t end) { sparse->logits(job, begin, end); });
}

void add_rows(const SlotSums& job, int threads) {
    const int64_t columns = ceil_div(job.width, SUM_COLUMNS);  // so that several threads share a key with many slots
    const int64_t slots = slots_at_once(job.count, threads);
    each_range(ceil_div(job.count, slots) * columns, 1, threads, [&](int64_t i, int64_t) {
        const int64_t begin = i / columns * slots, first = i % columns * SUM_COLUMNS;
        const int64_t end = begin + slots, last = first + SUM_COLUMNS;
        sparse->sums(job, begin, end < job.count ? end : job.count, first, last < job.width ? last : job.width);
    });
}

void add_weight_rows(uintptr_t values, uintptr_t ids, uintptr_t slot_rows, int64_t count, uintptr_t weight, int weight_dtype,
                     int64_t weight_stride, int64_t vocab, uintptr_t out, int out_dtype, int64_t out_stride, int64_t rows,
                     int64_t width, int threads) {
    check_slots(count, width, ids, slot_rows, values, threads);
    const SlotSums job{table("weight", weight, weight_dtype, weight_stride, vocab),
                       table("out", out, out_dtype, out_stride, rows),
                       width,
                       at<float>(values),
                       at<int64_t>(ids),
                       at<int64_t>(slot_rows),
                       nullptr,
                       count,
                       false};
    nb::gil_scoped_release release;
    add_rows(job, threads);
}

// The used slots whose value is not 0, sorted by id. Ragged with equal ids keep their order. Each thread sorts one chunk of slots at
// a time, and the result does not depend on the number of chunks.
class SortedSlots {
public:
    std::unique_ptr<KeyedSlot[]> slots;
    int64_t count = 0;

    SortedSlots(const float* values, const int64_t* ids, int64_t all, int64_t vocab, int threads)
        : chunks(all < 65536 ? 1 : threads), threads(threads) {
        std::vector<int64_t> starts(size_t(chunks) + 1);
        const auto each_used = [&](int64_t c, const auto& visit) {
            for (int64_t s = all * c / chunks; s < all * (c + 1) / chunks; s++) {
                if (ids[s] >= 0 && values[s] != 0) visit(s);
            }
        };
        each_range(chunks, 1, threads, [&](int64_t c, int64_t) { each_used(c, [&](int64_t) { starts[size_t(c) + 1]++; }); });
        for (int64_t c = 0; c < chunks; c++) starts[size_t(c) + 1] += starts[size_t(c)];
        count = starts[size_t(chunks)];
        slots.reset(new KeyedSlot[size_t(count)]);
        each_range(chunks, 1, threads, [&](int64_t c, int64_t) {
            KeyedSlot* to = slots.get() + starts[size_t(c)];
            each_used(c, [&](int64_t s) { *to++ = {uint32_t(ids[s]), uint32_t(s)}; });
        });
        int bits = 0;
        while (bits < 32 && (vocab - 1) >> bits) bits++;
        const int digits = (bits + MOST_BITS - 1) / MOST_BITS;
        std::unique_ptr<KeyedSlot[]> other(new KeyedSlot[digits ? size_t(count) : 0]);
        for (int d = 0; d < digits; d++) {
            const int low = bits * d / digits, high = bits * (d + 1) / digits;
            sort_by(slots.get(), other.get(), low, high - low);
            slots.swap(other);
        }
    }

private:
    static constexpr int MOST_BITS = 11;  // of a digit, so that its counters fit into the L1 cache
    const int64_t chunks;
    const int threads;

    // A stable counting sort by the bits from `low` on.
    void sort_by(const KeyedSlot* from, KeyedSlot* to, int low, int bits) const {
        const size_t bins = size_t(1) << bits;
        std::vector<int64_t> places(size_t(chunks) * bins);  // first the count of each bin, then where its next slot goes
        const auto each = [&](int64_t c, const auto& visit) {
            int64_t* mine = places.data() + size_t(c) * bins;
            for (int64_t i = count * c / chunks; i < count * (c + 1) / chunks; i++) {
                visit(mine[from[i].key >> low & (bins - 1)], from[i]);
            }
        };
        each_range(chunks, 1, threads, [&](int64_t c, int64_t) { each(c, [](int64_t& n, KeyedSlot) { n++; }); });
        int64_t total = 0;
        for (size_t bin = 0; bin < bins; bin++) {
            for (size_t c = 0; c < size_t(chunks); c++) {
                const int64_t n = places[c * bins + bin];
                places[c * bins + bin] = total;
                total += n;
            }
        }
        each_range(chunks, 1, threads, [&](int64_t c, int64_t) { each(c, [to](int64_t& n, KeyedSlot x) { to[n++] = x; }); });
    }
};

void add_hidden_rows(uintptr_t values, uintptr_t ids, uintptr_t slot_rows, int64_t count, uintptr_t hidden, int hidden_dtype,
                     int64_t hidden_stride, int64_t rows, uintptr_t out, int out_dtype, int64_t out_stride, int64_t vocab,
                     int64_t width, int threads) {
    check_slots(count, width, ids, slot_rows, values, threads);
    require(count <= UINT32_MAX, "count", count, "so many slots cannot be sorted: take fewer rows at a time.");
    require(vocab <= int64_t(1) << 32, "vocab", vocab, "ids of so many bits cannot be sorted.");
    SlotSums job{table("hidden", hidden, hidden_dtype, hidden_stride, rows),
                 table("out", out, out_dtype, out_stride, vocab),
                 width,
                 at<float>(values),
                 at<int64_t>(ids),
                 at<int64_t>(slot_rows),
                 nullptr,
                 count,
                 true};
    nb::gil_scoped_release release;
    const SortedSlots sorted(job.values, job.ids, count, vocab, threads);
    job.by_id = sorted.slots.get(), job.count = sorted.count;
    add_rows(job, threads);
}

}  // namespace

void use_sparse_kernels(const std::string& isa) {
#ifdef GRPO_X86
    for (const SparseKernels* one : {&sparse_avx512bf16, &sparse_avx512, &sparse_avx2}) {
        if (isa == one->name) sparse = one;
    }
#endif
    if (isa == sparse_baseline.name) sparse = &sparse_baseline;
}

void bind_sparse(nb::module_& m) {
    m.def("slot_logits", &slot_logits);
    m.def("add_weight_rows", &add_weight_rows);
    m.def("add_hidden_rows", &add_hidden_rows);
}

}  // namespace grpo
