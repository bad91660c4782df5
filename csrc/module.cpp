// The Python module: rows of logits, programs, columns, and products over slots; matrix products are bind_products.cpp's. Work is
// divided among threads here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "arguments.h"
#include "parallel.h"
#include "processor.h"

namespace nb = nanobind;

namespace grpo {

extern const Kernels kernels_avx512bf16, kernels_avx512, kernels_avx2;

// grpo_kernels/rows/backends/native.py reads this from the file before it loads the module, to recognise one from an older build.
extern const char built_from[];
const char built_from[] = "grpo_kernels built from sha256:" GRPO_SOURCES;

void bind_products(nb::module_& m);  // bind_products.cpp

namespace {

std::vector<const Kernels*> supported() {  // best first
    std::vector<const Kernels*> tables;
    const Isa best = best_isa();
    if (best >= AVX512_BF16) tables.push_back(&kernels_avx512bf16);
    if (best >= AVX512) tables.push_back(&kernels_avx512);
    if (best >= AVX2) tables.push_back(&kernels_avx2);
    return tables;
}

const Kernels* best() {
    const std::vector<const Kernels*> tables = supported();
    return tables.empty() ? nullptr : tables.front();
}

}  // namespace

const Kernels* kernels = best();

namespace {

void check_processor() {
    if (!kernels) throw std::runtime_error("this processor has no AVX2, which the kernels need.");
}

// Calls body for ranges of rows: of about 64 KiB of logits, so that the cost of starting a range is shared by many short rows.
template <class Body> void each_rows(const Rows& rows, int threads, const Body& body) {
    check_processor();
    nb::gil_scoped_release release;
    each_range(rows.count, 65536 / (rows.vocab * size_of(rows.dtype)) + 1, threads, body);
}

template <class Job> void each_row(const Job& job, int threads, void (*Kernels::*kernel)(const Job&, int64_t)) {
    each_rows(job.own.rows, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) (kernels->*kernel)(job, i);
    });
}

// ---- rows

void stats(const LogitRows& own, const Beside* second, uintptr_t targets, uintptr_t read, const Named& to, int threads) {
    const int64_t n = own.rows.count;
    check_streams(own, second, threads);
    const uint32_t needed = (second ? OF_BOTH | bits(TARGET, CROSS, EXCESS) : OF_OWN) | (to.names & bits(SQUARES) ? bits(WEIGHTED) : 0);
    const StatsJob job{own, second, vector<int64_t>("targets", targets, n), at<uint8_t>(read), to.vectors<PARTIALS>(n, needed)};
    each_row(job, threads, &Kernels::stats);
}

void mixed(const LogitRows& own, const Beside& second, uintptr_t read, const Named& of, const Named& to, int threads) {
    const int64_t n = own.rows.count;
    check_streams(own, &second, threads);
    check_address("log_sums", uintptr_t(second.log_sums), 4, n == 0);
    const MixedJob job{own, &second, at<uint8_t>(read), of.vectors<PARTIALS>(n, OF_BOTH), to.vectors<MIXED>(n, bits(MIXED_STUDENT, MIXED_TEACHER))};
    each_row(job, threads, &Kernels::mixed);
}

void pull(const LogitRows& own, const Beside* second, uintptr_t targets, const Named& of, const Named& slopes, const Memory& out,
          int threads) {
    const int64_t n = own.rows.count;
    check_streams(own, second, threads);
    check_out(own.rows, out);
    if (second) {
        check_address("log_sums", uintptr_t(second->log_sums), 4, n == 0);
        check_address("center", uintptr_t(second->center), 4, n == 0);
    }
    const uint32_t partials = OF_OWN | (second ? OF_BOTH : 0), needed = bits(OF_TARGET) | (second ? bits(DIVERGENCE) : 0);
    const PullJob job{own, second, out, vector<int64_t>("targets", targets, n), of.vectors<PARTIALS>(n, partials),
                      slopes.vectors<SLOPES>(n, needed)};
    each_row(job, threads, &Kernels::pull);
}

// Memory that a thread keeps from row to row and from call to call, because new pages cost more time than a row. It is aligned to 64
// bytes. Null if none is available.
char* memory_of_thread(size_t bytes) {
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

// Memory of a thread, taken piece by piece, each aligned to 64 bytes. Without a base only its size is counted.
struct Pieces {
    char* base = nullptr;
    size_t size = 0;

    template <class T> T* take(int64_t count) {
        T* piece = base ? reinterpret_cast<T*>(base + size) : nullptr;
        size += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

// For what a row keeps. Nothing is kept if the gradient has to be formed from the logits.
TermMemory term_memory(const FusedJob& job, Pieces& pieces) {
    TermMemory memory = {{nullptr, nullptr}, nullptr};
    if (!job.out.base || job.with_entropy) return memory;
    const int64_t vocab = job.own.rows.vocab;
    if (job.out.dtype != FP32) memory.terms[0] = pieces.take<float>(vocab);
    if (job.second) memory.terms[1] = pieces.take<float>(vocab);
    memory.segments = pieces.take<Segment>(most_segments(vocab));
    return memory;
}

void fused(const Formula& formula, const std::vector<float>& numbers, const std::vector<uintptr_t>& inputs, bool with_entropy,
           const LogitRows& own, const Beside* second, uintptr_t targets, uintptr_t read, const Memory* out, const Named& to, int threads) {
    const int64_t n = own.rows.count;
    const std::vector<const float*> vectors = formula.inputs(numbers, inputs, n, 2);
    formula.check(formula.program.outputs == TOKEN_OUTPUTS, "it does not give a loss and its slopes.");
    check_streams(own, second, threads);
    if (out) check_out(own.rows, *out);
    const uint32_t needed = bits(LOGPS, ENTROPY, LOSSES) | (second ? bits(OF_DIVERGENCE) : 0);
    const FusedJob job{own, second, out ? Rows(*out) : Rows{}, vector<int64_t>("targets", targets, n), at<uint8_t>(read),
                       &formula.program, numbers.data(), vectors.data(), with_entropy, to.vectors<RESULTS>(n, needed)};
    Pieces sizes;
    term_memory(job, sizes);
    each_rows(own.rows, threads, [&](int64_t begin, int64_t end) {
        Pieces pieces{memory_of_thread(sizes.size)};
        const TermMemory scratch = pieces.base ? term_memory(job, pieces) : TermMemory{};
        for (int64_t i = begin; i < end; i++) kernels->fused(job, i, scratch);
    });
}

void scale(uintptr_t data, int dtype, int64_t count, float factor, int threads) {
    check_threads(threads);
    check_type(dtype);
    check_size("count", count, 0);
    check_address("data", data, size_of(dtype), count == 0);
    check_processor();
    const ScaleJob job{at<char>(data), dtype, count, factor};
    nb::gil_scoped_release release;
    each_range(count, 65536, threads, [&](int64_t begin, int64_t end) { kernels->scale(job, begin, end); });
}

// ---- products over slots. The contents of ids and rows are not checked.

// Slots in a range: few enough that each thread gets several ranges, and enough that waiting for the first rows costs little.
int64_t slots_at_once(int64_t count, int threads) {
    const int64_t even = count / (int64_t(threads) * 16);
    return even < 32 ? 32 : even > 512 ? 512 : even;
}

void slot_logits(const Operand& hidden, const Operand& weight, const Pairs& slots, uintptr_t logits, int threads) {
    check_threads(threads);
    weight.check("weight", weight.rows, hidden.columns);
    check_processor();
    const SlotLogits job{hidden, weight, slots, vector<float>("logits", logits, slots.count)};
    nb::gil_scoped_release release;
    each_range(slots.count, slots_at_once(slots.count, threads), threads,
               [&](int64_t begin, int64_t end) { kernels->slot_logits(job, begin, end); });
}

void add_rows(const SlotSums& job, int threads) {
    const int64_t width = job.out.columns, columns = ceil_div(width, SUM_COLUMNS);  // so that several threads share a key with many slots
    const int64_t slots = slots_at_once(job.count, threads);
    each_range(ceil_div(job.count, slots) * columns, 1, threads, [&](int64_t i, int64_t) {
        const int64_t begin = i / columns * slots, first = i % columns * SUM_COLUMNS;
        const int64_t end = begin + slots, last = first + SUM_COLUMNS;
        kernels->slot_sums(job, begin, end < job.count ? end : job.count, first, last < width ? last : width);
    });
}

SlotSums sums_of(uintptr_t values, const Pairs& slots, const Operand& source, const Operand& out, bool keep, int threads) {
    check_threads(threads);
    out.check("out", out.rows, source.columns);
    check_processor();
    return {source, out, vector<float>("values", values, slots.count), slots, nullptr, slots.count, keep};
}

void add_weight_rows(uintptr_t values, const Pairs& slots, const Operand& weight, const Operand& out, int threads) {
    const SlotSums job = sums_of(values, slots, weight, out, false, threads);
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

void add_hidden_rows(uintptr_t values, const Pairs& slots, const Operand& hidden, const Operand& out, int threads) {
    SlotSums job = sums_of(values, slots, hidden, out, true, threads);
    require(slots.count <= UINT32_MAX, "count", slots.count, "so many slots cannot be sorted: take fewer rows at a time.");
    require(out.rows <= int64_t(1) << 32, "out", out.rows, "ids of so many bits cannot be sorted.");
    nb::gil_scoped_release release;
    const SortedSlots sorted(job.values, slots.ids, slots.count, out.rows, threads);
    job.by_id = sorted.slots.get(), job.count = sorted.count;
    add_rows(job, threads);
}

// ---- instruction sets

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* table : supported()) names.emplace_back(table->name);
    return names;
}

void use_isa(const std::string& name) {
    for (const Kernels* table : supported()) {
        if (name != table->name) continue;
        kernels = table;
        return;
    }
    throw std::invalid_argument("instruction set " + name + " is not supported here: choose one of isas().");
}

}  // namespace

NB_MODULE(_cpu, m) {
    check_isa_setting();
    m.doc() = "CPU kernels of grpo_kernels; use them through grpo_kernels.rows.backends.cpu.";
    nb::class_<Memory>(m, "Memory").def(nb::init<uintptr_t, int, const Sizes3&, const Sizes3&, int64_t, int64_t>());
    nb::class_<LogitRows>(m, "LogitRows")
        .def(nb::init<uintptr_t, int, const Sizes3&, const Sizes3&, int64_t, int64_t, float, float, float, uintptr_t>());
    nb::class_<Beside>(m, "Second").def(nb::init<const LogitRows&, int, double, uintptr_t, uintptr_t, uintptr_t>());
    nb::class_<Named>(m, "Named").def(nb::init<uintptr_t, const Sizes2&, const Sizes2&, uint32_t>());
    nb::class_<Operand>(m, "Matrix").def(nb::init<uintptr_t, int, const Sizes2&, const Sizes2&>());
    nb::class_<Pairs>(m, "Slots").def(nb::init<uintptr_t, uintptr_t, int64_t>());
    nb::class_<Formula>(m, "Program")
        .def(nb::init<const std::string&, int, int, const std::vector<Step>&, const std::vector<int>&>())
        .def("run", &Formula::run);
    const auto second = nb::arg("second").none();
    m.def("stats", &stats, nb::arg("own"), second, nb::arg("targets"), nb::arg("read"), nb::arg("to"), nb::arg("threads"));
    m.def("mixed", &mixed);
    m.def("pull", &pull, nb::arg("own"), second, nb::arg("targets"), nb::arg("of"), nb::arg("slopes"), nb::arg("out"), nb::arg("threads"));
    m.def("fused", &fused, nb::arg("program"), nb::arg("numbers"), nb::arg("inputs"), nb::arg("with_entropy"), nb::arg("own"), second,
          nb::arg("targets"), nb::arg("read"), nb::arg("out").none(), nb::arg("to"), nb::arg("threads"));
    m.def("scale", &scale);
    m.def("slot_logits", &slot_logits);
    m.def("add_weight_rows", &add_weight_rows);
    m.def("add_hidden_rows", &add_hidden_rows);
    bind_products(m);
    m.attr("built_from") = built_from;
    m.def("compiler", [] { return std::string(GRPO_COMPILER); });
    m.def("isa", [] { return std::string(kernels ? kernels->name : ""); }, "The instruction set in use; none without AVX2.");
    m.def("isas", &isas, "Those this processor can run, best first.");
    m.def("use_isa", &use_isa, nb::arg("name"), "Force one of them, for tests.");
}

}  // namespace grpo
