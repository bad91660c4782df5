// The Python module `_cpu`: softmax sums, gradients and losses of rows of logits, programs, and
// (row, id) pairs. The functions here check a call and divide its work among threads.
// bind_matmuls.cpp does the same for the matmuls.
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

// grpo_kernels/core/backends/native.py reads this from the file before it loads the module, to
// recognise a module from an older build.
extern const char built_from[];
const char built_from[] = "grpo_kernels built from sha256:" GRPO_SOURCES;

void bind_matmuls(nb::module_& m);  // bind_matmuls.cpp

namespace {

// Returns the tables that this processor and the setting allow, the fastest first.
std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> tables;
    const Isa best = best_isa();
    if (best >= AVX512_BF16) tables.push_back(&kernels_avx512bf16);
    if (best >= AVX512) tables.push_back(&kernels_avx512);
    if (best >= AVX2) tables.push_back(&kernels_avx2);
    return tables;
}

const Kernels* fastest_kernels() {
    const std::vector<const Kernels*> tables = supported_kernels();
    return tables.empty() ? nullptr : tables.front();
}

}  // namespace

const Kernels* kernels = fastest_kernels();

namespace {

void check_processor() {
    if (!kernels) throw std::runtime_error("this processor has no AVX2, which the kernels need.");
}

// Logits in a range of rows, in bytes. The cost of starting a range is shared by many short rows.
constexpr int64_t BYTES_PER_RANGE = 64 << 10;
// Elements in a range of `scale`.
constexpr int64_t ELEMENTS_PER_RANGE = 64 << 10;

// Calls body(begin, end) for ranges of rows in parallel, without holding Python's lock (GIL).
template <class Body>
void parallel_for_rows(const LogitRows& logits, int threads, const Body& body) {
    const int64_t bytes_per_row = logits.rows.vocab * size_of(logits.rows.dtype);
    check_processor();
    nb::gil_scoped_release release;
    parallel_for(logits.rows.count, BYTES_PER_RANGE / bytes_per_row + 1, threads, body);
}

// Runs a kernel, a member of the table in use such as &Kernels::softmax_sums, for each row of a
// job.
template <class Job>
void run_for_each_row(const Job& job, int threads, void (*Kernels::*kernel)(const Job&, int64_t)) {
    parallel_for_rows(job.policy, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) (kernels->*kernel)(job, i);
    });
}

// ---- rows of logits. `mask` may be 0 (no mask), `reference` and `grad_logits` None.

// Computes the softmax sums of each row that `sums` has rows for.
void softmax_sums(
    const CheckedLogitRows& policy, const CheckedReferenceRows* reference, uintptr_t targets,
    uintptr_t mask, const CheckedNamedRows& sums, int threads) {
    const int64_t n = policy.rows.count;
    check_threads(threads);
    check_reference(policy, reference);
    uint32_t required = BASIC_SUMS;
    if (reference) required |= NORMALIZERS | bits(SUM_LOG_RATIO, SUM_LOG_RATIO_EXCESS);
    if (sums.names & bits(SUM_EXP_SQUARED)) required |= bits(SUM_EXP_SHIFTED);
    const SoftmaxSumsJob job{
        policy, reference, vector_at<int64_t>("targets", targets, n), pointer_at<uint8_t>(mask),
        sums.named_rows<NUM_SUMS>(n, required)};
    run_for_each_row(job, threads, &Kernels::softmax_sums);
}

// Computes both sums of enum MixtureSum of each row, in a second pass. `sums` are the sums of the
// first pass, NORMALIZERS at least.
void mixture_sums(
    const CheckedLogitRows& policy, const CheckedReferenceRows& reference, uintptr_t mask,
    const CheckedNamedRows& sums, const CheckedNamedRows& mixture_sums, int threads) {
    const int64_t n = policy.rows.count;
    check_threads(threads);
    check_reference(policy, &reference);
    check_address("log_sum_ratio", uintptr_t(reference.log_sum_ratio), sizeof(float), n == 0);
    const MixtureSumsJob job{
        policy, &reference, pointer_at<uint8_t>(mask), sums.named_rows<NUM_SUMS>(n, NORMALIZERS),
        mixture_sums.named_rows<NUM_MIXTURE_SUMS>(n, bits(MIXTURE_POLICY, MIXTURE_REFERENCE))};
    run_for_each_row(job, threads, &Kernels::mixture_sums);
}

// Writes d loss / d logits of each row to grad_logits, from the softmax sums and the coefficients
// of the row, see enum Coefficient.
void softmax_gradient(
    const CheckedLogitRows& policy, const CheckedReferenceRows* reference, uintptr_t targets,
    const CheckedNamedRows& sums, const CheckedNamedRows& coefficients,
    const CheckedRows& grad_logits, int threads) {
    const int64_t n = policy.rows.count;
    check_threads(threads);
    check_reference(policy, reference);
    check_grad_logits(policy.rows, grad_logits);
    uint32_t required_sums = BASIC_SUMS;
    uint32_t required_coefficients = bits(TARGET);
    if (reference) {
        check_address("log_sum_ratio", uintptr_t(reference->log_sum_ratio), sizeof(float), n == 0);
        check_address("center", uintptr_t(reference->center), sizeof(float), n == 0);
        required_sums |= NORMALIZERS;
        required_coefficients |= bits(DIVERGENCE);
    }
    const SoftmaxGradientJob job{
        policy,
        reference,
        grad_logits,
        vector_at<int64_t>("targets", targets, n),
        sums.named_rows<NUM_SUMS>(n, required_sums),
        coefficients.named_rows<NUM_COEFFICIENTS>(n, required_coefficients)};
    run_for_each_row(job, threads, &Kernels::softmax_gradient);
}

// Returns `bytes` of memory aligned to a cache line, which the thread keeps from row to row and
// from call to call, because new pages cost more time than a row. Null if none is available.
char* thread_scratch(size_t bytes) {
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t size = 0;
    const size_t required = bytes + CACHE_LINE;
    if (size < required) {
        size = 0;
        memory.reset();
        memory.reset(new (std::nothrow) char[required]);
        if (!memory) return nullptr;
        size = required;
    }
    return memory.get() + (CACHE_LINE - reinterpret_cast<uintptr_t>(memory.get()) % CACHE_LINE);
}

// Hands out pieces of one allocation, each aligned to a cache line. Without a base it only counts
// their size.
struct BumpAllocator {
    char* base = nullptr;
    size_t size = 0;

    template <class T> T* allocate(int64_t count) {
        T* piece = base ? reinterpret_cast<T*>(base + size) : nullptr;
        size += size_t(ceil_div(count * int64_t(sizeof(T)), CACHE_LINE)) * CACHE_LINE;
        return piece;
    }
};

// Memory for the saved terms of one row. Nothing is saved if the gradient has to be computed from
// the logits.
SavedTermsBuffer allocate_saved_terms(const FusedLossJob& job, BumpAllocator& allocator) {
    SavedTermsBuffer buffer = {{nullptr, nullptr}, nullptr};
    if (!job.grad_logits.base || job.loss_has_entropy) return buffer;
    const int64_t vocab = job.policy.rows.vocab;
    if (job.grad_logits.dtype != FP32) buffer.terms[0] = allocator.allocate<float>(vocab);
    if (job.reference) buffer.terms[1] = allocator.allocate<float>(vocab);
    buffer.segments = allocator.allocate<Segment>(max_segments(vocab));
    return buffer;
}

// Computes log-prob, entropy and loss of each row, and the gradient of the logits if `grad_logits`
// is not None.
//   program            the loss formula, from log-prob, entropy and the vectors `inputs` [N]
//   numbers            scalars of the formula, such as clip bounds
//   loss_has_entropy   whether d loss / d entropy may be nonzero
//   outputs            the results, see enum Output
void fused_loss(
    const CheckedProgram& program, const std::vector<float>& numbers,
    const std::vector<uintptr_t>& inputs, bool loss_has_entropy, const CheckedLogitRows& policy,
    const CheckedReferenceRows* reference, uintptr_t targets, uintptr_t mask,
    const CheckedRows* grad_logits, const CheckedNamedRows& outputs, int threads) {
    const int64_t n = policy.rows.count;
    const std::vector<const float*> input_vectors =
        program.check_call(numbers, inputs, n, INPUTS_FROM_SOFTMAX);
    program.check(
        program.program.num_outputs == LOSS_PROGRAM_OUTPUTS,
        "it must return the loss and its gradients of the log-prob and the entropy.");
    check_threads(threads);
    check_reference(policy, reference);
    if (grad_logits) check_grad_logits(policy.rows, *grad_logits);
    uint32_t required = bits(LOGPS, ENTROPIES, LOSSES);
    if (reference) required |= bits(DIVERGENCES);
    const FusedLossJob job{
        policy,
        reference,
        grad_logits ? Rows(*grad_logits) : Rows{},
        vector_at<int64_t>("targets", targets, n),
        pointer_at<uint8_t>(mask),
        &program.program,
        numbers.data(),
        input_vectors.data(),
        loss_has_entropy,
        outputs.named_rows<NUM_OUTPUTS>(n, required)};
    BumpAllocator sizes;
    allocate_saved_terms(job, sizes);
    parallel_for_rows(policy, threads, [&](int64_t begin, int64_t end) {
        BumpAllocator allocator{thread_scratch(sizes.size)};
        SavedTermsBuffer buffer = {};
        if (allocator.base) buffer = allocate_saved_terms(job, allocator);
        for (int64_t i = begin; i < end; i++) kernels->fused_loss(job, i, buffer);
    });
}

// data [count] *= factor.
void scale(uintptr_t data, int dtype, int64_t count, float factor, int threads) {
    check_threads(threads);
    check_dtype(dtype);
    check_size("count", count, 0);
    check_address("data", data, size_of(dtype), count == 0);
    check_processor();
    const ScaleJob job{pointer_at<char>(data), dtype, count, factor};
    nb::gil_scoped_release release;
    parallel_for(count, ELEMENTS_PER_RANGE, threads, [&](int64_t begin, int64_t end) {
        kernels->scale(job, begin, end);
    });
}

// ---- (row, id) pairs. The values of ids and rows are not checked.

// Returns the pairs in a range: few enough that each thread gets several ranges, and enough that
// waiting for the first rows costs little.
int64_t pairs_per_range(int64_t count, int threads) {
    constexpr int64_t RANGES_PER_THREAD = 16;
    constexpr int64_t MIN_PAIRS = 32;
    constexpr int64_t MAX_PAIRS = 512;
    const int64_t even = count / (threads * RANGES_PER_THREAD);
    return std::clamp(even, MIN_PAIRS, MAX_PAIRS);
}

// logits [count] = hidden[row] . weight[id] of each pair.
void pair_logits(
    const CheckedMatrix& hidden, const CheckedMatrix& weight, const CheckedRowIdPairs& pairs,
    uintptr_t logits, int threads) {
    check_threads(threads);
    weight.check_size_is("weight", weight.rows, hidden.columns);
    check_processor();
    const PairLogitsJob job{hidden, weight, pairs, vector_at<float>("logits", logits, pairs.count)};
    nb::gil_scoped_release release;
    const int64_t grain = pairs_per_range(pairs.count, threads);
    parallel_for(pairs.count, grain, threads, [&](int64_t begin, int64_t end) {
        kernels->pair_logits(job, begin, end);
    });
}

// Checks the arguments of a weighted sum over pairs. The result has no pairs sorted by id.
SegmentedSumJob segmented_sum_job(
    uintptr_t values, const CheckedRowIdPairs& pairs, const CheckedMatrix& source,
    const CheckedMatrix& out, bool accumulate, int threads) {
    check_threads(threads);
    out.check_size_is("out", out.rows, source.columns);
    check_processor();
    const float* factors = vector_at<float>("values", values, pairs.count);
    return {source, out, factors, pairs, nullptr, pairs.count, accumulate};
}

// Computes the sums of a job in parallel. The work is divided by pairs and by columns, so that
// several threads share a key with many pairs.
void run_segmented_sum(const SegmentedSumJob& job, int threads) {
    const int64_t width = job.out.columns;
    const int64_t column_ranges = ceil_div(width, SUM_COLUMNS);
    const int64_t num_pairs = pairs_per_range(job.count, threads);
    const int64_t num_ranges = ceil_div(job.count, num_pairs) * column_ranges;
    parallel_for(num_ranges, 1, threads, [&](int64_t range, int64_t) {
        const int64_t begin = range / column_ranges * num_pairs;
        const int64_t end = std::min(begin + num_pairs, job.count);
        const int64_t first_column = range % column_ranges * SUM_COLUMNS;
        const int64_t last_column = std::min(first_column + SUM_COLUMNS, width);
        kernels->segmented_sum(job, begin, end, first_column, last_column);
    });
}

// grad_hidden[row] = sum of values * weight[id] over the pairs of the row, for rows with a used
// pair. Pairs are sorted by row.
void write_grad_hidden_of_pairs(
    uintptr_t values, const CheckedRowIdPairs& pairs, const CheckedMatrix& weight,
    const CheckedMatrix& grad_hidden, int threads) {
    const SegmentedSumJob job =
        segmented_sum_job(values, pairs, weight, grad_hidden, false, threads);
    nb::gil_scoped_release release;
    run_segmented_sum(job, threads);
}

// The used pairs whose value is not 0, sorted by id by a radix sort. Pairs with equal ids keep
// their order. Each thread sorts one chunk of pairs at a time; the result does not depend on the
// number of chunks.
class PairsById {
public:
    std::unique_ptr<KeyedPair[]> pairs;
    int64_t count = 0;

    PairsById(const float* values, const RowIdPairs& unsorted, int64_t vocab, int threads)
        : num_chunks(unsorted.count < MIN_PAIRS_PER_CHUNK ? 1 : threads), threads(threads) {
        collect_used(values, unsorted);
        int id_bits = 0;
        while (id_bits < 32 && (vocab - 1) >> id_bits) id_bits++;
        const int num_digits = int(ceil_div(id_bits, MAX_DIGIT_BITS));
        std::unique_ptr<KeyedPair[]> sorted(new KeyedPair[num_digits ? size_t(count) : 0]);
        for (int digit = 0; digit < num_digits; digit++) {
            const int low_bit = id_bits * digit / num_digits;
            const int high_bit = id_bits * (digit + 1) / num_digits;
            sort_by_digit(pairs.get(), sorted.get(), low_bit, high_bit - low_bit);
            pairs.swap(sorted);
        }
    }

private:
    static constexpr int64_t MIN_PAIRS_PER_CHUNK = 65536;
    static constexpr int MAX_DIGIT_BITS = 11;  // the counters of a digit fit into the L1 cache
    const int64_t num_chunks;
    const int threads;

    // Calls body(chunk) in parallel.
    template <class Body> void for_each_chunk(const Body& body) const {
        parallel_for(num_chunks, 1, threads, [&](int64_t chunk, int64_t) { body(chunk); });
    }

    // Writes the used pairs whose value is not 0 to `pairs`, in their order: first each chunk
    // counts its pairs, then each chunk writes them from its own start on.
    void collect_used(const float* values, const RowIdPairs& unsorted) {
        const auto for_each_used = [&](int64_t chunk, const auto& body) {
            const int64_t end = unsorted.count * (chunk + 1) / num_chunks;
            for (int64_t k = unsorted.count * chunk / num_chunks; k < end; k++) {
                if (unsorted.ids[k] >= 0 && values[k] != 0) body(k);
            }
        };
        std::vector<int64_t> starts(size_t(num_chunks) + 1);  // first the counts
        for_each_chunk([&](int64_t chunk) {
            for_each_used(chunk, [&](int64_t) { starts[size_t(chunk) + 1]++; });
        });
        for (size_t chunk = 0; chunk < size_t(num_chunks); chunk++) {
            starts[chunk + 1] += starts[chunk];
        }
        count = starts[size_t(num_chunks)];
        pairs.reset(new KeyedPair[size_t(count)]);
        for_each_chunk([&](int64_t chunk) {
            KeyedPair* next = pairs.get() + starts[size_t(chunk)];
            for_each_used(
                chunk, [&](int64_t k) { *next++ = {uint32_t(unsorted.ids[k]), uint32_t(k)}; });
        });
    }

    // A stable counting sort by the bits low_bit .. low_bit + num_bits - 1 of the keys.
    void sort_by_digit(const KeyedPair* from, KeyedPair* to, int low_bit, int num_bits) const {
        const size_t num_bins = size_t(1) << num_bits;
        // [num_chunks, num_bins]: first the count of each bin, then where its next pair goes.
        std::vector<int64_t> positions(size_t(num_chunks) * num_bins);
        const auto for_each_pair = [&](int64_t chunk, const auto& body) {
            int64_t* chunk_positions = positions.data() + size_t(chunk) * num_bins;
            const int64_t end = count * (chunk + 1) / num_chunks;
            for (int64_t k = count * chunk / num_chunks; k < end; k++) {
                body(chunk_positions[from[k].key >> low_bit & (num_bins - 1)], from[k]);
            }
        };
        for_each_chunk([&](int64_t chunk) {
            for_each_pair(chunk, [](int64_t& bin_count, KeyedPair) { bin_count++; });
        });
        int64_t total = 0;
        for (size_t bin = 0; bin < num_bins; bin++) {
            for (size_t chunk = 0; chunk < size_t(num_chunks); chunk++) {
                int64_t& position = positions[chunk * num_bins + bin];
                const int64_t bin_count = position;
                position = total;
                total += bin_count;
            }
        }
        for_each_chunk([&](int64_t chunk) {
            for_each_pair(
                chunk, [to](int64_t& position, KeyedPair pair) { to[position++] = pair; });
        });
    }
};

// grad_weight[id] += sum of values * hidden[row] over the pairs of the id.
void add_grad_weight_of_pairs(
    uintptr_t values, const CheckedRowIdPairs& pairs, const CheckedMatrix& hidden,
    const CheckedMatrix& grad_weight, int threads) {
    SegmentedSumJob job = segmented_sum_job(values, pairs, hidden, grad_weight, true, threads);
    require(
        pairs.count <= UINT32_MAX, "count", pairs.count,
        "pairs are sorted as 32-bit numbers: pass fewer rows at a time.");
    require(
        grad_weight.rows <= int64_t(1) << 32, "grad_weight", grad_weight.rows,
        "ids are sorted as 32-bit numbers: pass a smaller vocabulary.");
    nb::gil_scoped_release release;
    const PairsById by_id(job.values, pairs, grad_weight.rows, threads);
    job.by_id = by_id.pairs.get();
    job.count = by_id.count;
    run_segmented_sum(job, threads);
}

// ---- instruction sets

// Returns the names of the instruction sets that this processor supports, the fastest first.
std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : supported_kernels()) names.emplace_back(table->name);
    return names;
}

// Uses the kernels of another instruction set, for tests.
void use_isa(const std::string& name) {
    for (const Kernels* table : supported_kernels()) {
        if (name != table->name) continue;
        kernels = table;
        return;
    }
    throw std::invalid_argument(
        "isa=" + name + ": this processor does not support it. Pass one of isas().");
}

}  // namespace

NB_MODULE(_cpu, m) {
    check_isa_setting();
    m.doc() = "CPU kernels of grpo_kernels; use them through grpo_kernels.core.backends.cpu.";

    nb::class_<CheckedRows>(m, "Rows").def(
        nb::init<uintptr_t, int, const Sizes3&, const Sizes3&, int64_t, int64_t>());
    nb::class_<CheckedLogitRows>(m, "LogitRows")
        .def(
            nb::init<
                uintptr_t, int, const Sizes3&, const Sizes3&, int64_t, int64_t, float, float, float,
                uintptr_t>());
    nb::class_<CheckedReferenceRows>(m, "ReferenceRows")
        .def(nb::init<const CheckedLogitRows&, int, double, uintptr_t, uintptr_t, uintptr_t>());
    nb::class_<CheckedNamedRows>(m, "NamedRows")
        .def(nb::init<uintptr_t, const Sizes2&, const Sizes2&, uint32_t>());
    nb::class_<CheckedMatrix>(m, "Matrix")
        .def(nb::init<uintptr_t, int, const Sizes2&, const Sizes2&>());
    nb::class_<CheckedRowIdPairs>(m, "RowIdPairs").def(nb::init<uintptr_t, uintptr_t, int64_t>());
    nb::class_<CheckedProgram>(m, "Program")
        .def(
            nb::init<
                const std::string&, int, int, const std::vector<Step>&, const std::vector<int>&>())
        .def("run", &CheckedProgram::run);

    m.def(
        "softmax_sums", &softmax_sums, nb::arg("policy"), nb::arg("reference").none(),
        nb::arg("targets"), nb::arg("mask"), nb::arg("sums"), nb::arg("threads"));
    m.def("mixture_sums", &mixture_sums);
    m.def(
        "softmax_gradient", &softmax_gradient, nb::arg("policy"), nb::arg("reference").none(),
        nb::arg("targets"), nb::arg("sums"), nb::arg("coefficients"), nb::arg("grad_logits"),
        nb::arg("threads"));
    m.def(
        "fused_loss", &fused_loss, nb::arg("program"), nb::arg("numbers"), nb::arg("inputs"),
        nb::arg("loss_has_entropy"), nb::arg("policy"), nb::arg("reference").none(),
        nb::arg("targets"), nb::arg("mask"), nb::arg("grad_logits").none(), nb::arg("outputs"),
        nb::arg("threads"));
    m.def("scale", &scale);
    m.def("pair_logits", &pair_logits);
    m.def("write_grad_hidden_of_pairs", &write_grad_hidden_of_pairs);
    m.def("add_grad_weight_of_pairs", &add_grad_weight_of_pairs);
    bind_matmuls(m);

    m.attr("built_from") = built_from;
    m.def("compiler", [] { return std::string(GRPO_COMPILER); });
    m.def(
        "isa", [] { return std::string(kernels ? kernels->name : ""); },
        "Return the instruction set in use, \"\" without AVX2.");
    m.def(
        "isas", &supported_isas,
        "Return the instruction sets that this processor supports, the fastest first.");
    m.def("use_isa", &use_isa, nb::arg("name"), "Use another instruction set, for tests.");
}

}  // namespace grpo
