// The arguments of the kernels as plain structs over pointers, and the tables of kernels.
// arguments.h checks what Python passes and fills these structs. kernels.cpp and matmuls*.cpp are
// compiled once for each instruction set and define one table each.
//
// Shapes: N is the number of rows (tokens) of a call, V the vocabulary size, H the hidden size. A
// "row" is the logits of one token. All statistics are fp32 [N], except for ARGMAX, which is int32.
// A "job" holds the arguments of one call of a kernel.
#pragma once
#include <stdint.h>

namespace grpo {

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The bytes of a cache line: scratch memory is aligned to it, and prefetches load one line each.
constexpr int CACHE_LINE = 64;

enum DType : int { FP32 = 0, BF16 = 1, FP16 = 2 };

static inline int size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

// ---- rows of logits

// Rows of a tensor [A, T, V], which is A * T rows of V elements with stride 1. Row number a * T + t
// is tensor[a, t]. The struct has the rows first .. first + count - 1; its row 0 is row `first`.
struct Rows {
    char* base;
    int dtype;
    int64_t inner_count;                 // T
    int64_t outer_stride, inner_stride;  // strides of A and T, in elements
    int64_t vocab;                       // V
    int64_t first, count;

    [[gnu::always_inline]] char* row(int64_t i) const {
        const int64_t number = first + i;
        const int64_t outer_offset = (number / inner_count) * outer_stride;
        const int64_t inner_offset = (number % inner_count) * inner_stride;
        return base + (outer_offset + inner_offset) * size_of(dtype);
    }
};

// The logits that the softmax is taken of, from the values x in memory:
//   z = softcap * tanh(x * scale / softcap) * inverse_temperature
// With softcap = 0 there is no tanh: z = x * scale * inverse_temperature.
struct Transform {
    float scale, softcap, inverse_temperature;
    const float* inverse_temperatures;  // [N], replaces inverse_temperature; may be null

    [[gnu::always_inline]] float inverse_temperature_of_row(int64_t i) const {
        return inverse_temperatures ? inverse_temperatures[i] : inverse_temperature;
    }
};

struct LogitRows {
    Rows rows;
    Transform transform;
};

// The divergence between the policy p and the reference q, in the order of `DIRECTIONS` in Python:
//   REVERSE  KL(p || q)
//   FORWARD  KL(q || p)
//   JSD      b KL(q || m) + (1 - b) KL(p || m) with the mixture m = b q + (1 - b) p
//   TV       total variation, sum |p - q| / 2
enum Direction : int { REVERSE = 0, FORWARD = 1, JSD = 2, TV = 3 };

struct ReferenceRows {
    LogitRows logits;
    int direction;
    double mixture;                  // b of JSD. 1 - b is computed in fp64.
    const float* divergence_weight;  // [N], factor of the divergence in the loss; null: 0
    // The next two follow from the sums of both rows. They are null if a kernel does not need them.
    const float* log_sum_ratio;  // [N], log(REFERENCE_SUM_EXP / SUM_EXP)
    // [N], the mean over a row that the gradient of the divergence subtracts in each column, see
    // SoftmaxSums.gradient_center in core/softmax.py
    const float* center;
};

// Sums over a row of transformed logits z, in the order of SUMS_OF_KERNELS in core/softmax.py. In
// the last two, d = (z - MAX_LOGIT) - (z_ref - REFERENCE_MAX_LOGIT) is the log of e / e_ref.
enum Sum {
    MAX_LOGIT,
    SUM_EXP,          // sum of e = exp(z - MAX_LOGIT)
    TARGET_LOGIT,     // z of the target id
    SUM_EXP_SHIFTED,  // sum of e * (z - MAX_LOGIT), for the entropy
    SUM_EXP_SQUARED,  // sum of e * e
    ARGMAX,           // int32, the first id with the largest logit
    REFERENCE_MAX_LOGIT,
    REFERENCE_SUM_EXP,
    SUM_LOG_RATIO,         // sum of e * d; FORWARD: of e_ref * -d
    SUM_LOG_RATIO_EXCESS,  // sum of e_ref - e + e * d; FORWARD: of e - e_ref - e_ref * d
    NUM_SUMS
};

// Coefficients of the gradient of a row, [N] each, in the order of COEFFICIENTS_OF_KERNELS in
// core/softmax.py:
//   d loss / d z_j = TARGET * (1[j is the target] - p_j)
//                  + p_j * (CONSTANT + LOGP * log p_j + PROB * p_j)
//                  + DIVERGENCE * (d divergence / d z_j)
enum Coefficient { TARGET, CONSTANT, LOGP, PROB, DIVERGENCE, NUM_COEFFICIENTS };

// Results of the fused loss, [N] each.
enum Output { LOGPS, ENTROPIES, LOSSES, DIVERGENCES, NUM_OUTPUTS };

// Sums of JSD and TV, which need SUM_EXP of both rows first:
//   JSD  MIXTURE_POLICY = KL(p || m), MIXTURE_REFERENCE = KL(q || m)
//   TV   MIXTURE_POLICY = sum of p sign(p - q) / 2, MIXTURE_REFERENCE = the total variation
enum MixtureSum { MIXTURE_POLICY, MIXTURE_REFERENCE, NUM_MIXTURE_SUMS };

// Vectors [N] by name (one of the enums above); null where Python passed none.
template <int NUM_NAMES> struct NamedRows {
    float* pointers[NUM_NAMES];

    [[gnu::always_inline]] float* operator[](int name) const { return pointers[name]; }
};

// ---- the loss formula: a program without branches on fp32 numbers, traced by formulas/program.py

// The registers of a program hold the scalars of a call ("numbers", such as clip bounds), then the
// inputs of a row (such as its log-prob), then the result of each instruction.
constexpr int MAX_REGISTERS = 512;

// A condition is 1 if true, else 0. program.cpp has Python's names in this order.
enum Operation : uint16_t {
    // one operand
    NEGATE,
    ABSOLUTE,
    EXPONENTIAL,
    LOGARITHM,
    SQUARE_ROOT,
    HYPERBOLIC_TANGENT,
    RECIPROCAL,
    NOT,
    // two operands
    ADD,
    SUBTRACT,
    MULTIPLY,
    DIVIDE,
    MINIMUM,
    MAXIMUM,
    LESS,
    LESS_EQUAL,
    EQUAL,
    NOT_EQUAL,
    AND,
    OR,
    // three operands
    SELECT,  // a ? b : c
    NUM_OPERATIONS
};

struct Instruction {
    uint16_t operation;
    uint16_t a, b, c;  // registers of the operands
};

struct Program {
    const Instruction* instructions;
    int num_instructions, num_numbers, num_inputs, num_outputs;
    const uint16_t* output_registers;

    [[gnu::always_inline]] int num_registers() const {
        return num_numbers + num_inputs + num_instructions;
    }
};

// Evaluates the program for one row: numbers [num_numbers], inputs [num_inputs], and the results,
// outputs [num_outputs]. Each operation rounds to fp32 as torch does; exp, log and tanh are
// computed in fp64 and rounded.
void evaluate(const Program& program, const float* numbers, const float* inputs, float* outputs);
// Evaluates the program for num_rows rows. `registers` is [num_registers, num_rows]. The caller has
// filled the registers of the inputs, and reads the results from program.output_registers.
void evaluate_rows(
    const Program& program, const float* numbers, int64_t num_rows, float* registers);

// ---- arguments of the kernels over rows of logits

struct SoftmaxSumsJob {
    LogitRows policy;
    const ReferenceRows* reference;  // null: no divergence
    const int64_t* targets;          // [N]
    // [N], may be null. Rows with 0 are skipped and get constants: SUM_EXP and REFERENCE_SUM_EXP
    // are 1, ARGMAX is -1, and the other sums are 0.
    const uint8_t* mask;
    // MAX_LOGIT, SUM_EXP and TARGET_LOGIT are required, with a reference also the four sums from
    // REFERENCE_MAX_LOGIT on. SUM_EXP_SQUARED requires SUM_EXP_SHIFTED.
    NamedRows<NUM_SUMS> sums;
};

struct MixtureSumsJob {
    LogitRows policy;
    const ReferenceRows* reference;
    const uint8_t* mask;       // [N], may be null. Rows with 0 get 0.
    NamedRows<NUM_SUMS> sums;  // inputs
    NamedRows<NUM_MIXTURE_SUMS> mixture_sums;
};

struct SoftmaxGradientJob {
    LogitRows policy;
    const ReferenceRows* reference;  // null: no divergence
    Rows grad_logits;                // may be the memory of the logits
    const int64_t* targets;          // [N]
    NamedRows<NUM_SUMS> sums;
    NamedRows<NUM_COEFFICIENTS> coefficients;  // TARGET is required; the others may be null
};

// Statistics, loss and gradient in one call. The first two inputs of the program are the row's
// log-prob and entropy; it outputs the loss, d loss / d log-prob and d loss / d entropy.
constexpr int INPUTS_FROM_SOFTMAX = 2;
constexpr int LOSS_PROGRAM_OUTPUTS = 3;

struct FusedLossJob {
    LogitRows policy;
    const ReferenceRows* reference;  // null: no divergence
    Rows grad_logits;                // base null: no gradient. May be the memory of the logits
    const int64_t* targets;          // [N]
    // [N], may be null. Rows with 0 have log-prob, entropy, divergence and gradient 0.
    const uint8_t* mask;
    const Program* program;
    const float* numbers;        // [program->num_numbers]
    const float* const* inputs;  // the program's further inputs, [N] each
    bool loss_has_entropy;       // d loss / d entropy may be nonzero
    NamedRows<NUM_OUTPUTS> outputs;
};

// In its pass over a row the fused loss saves the exponential of each column (with a reference two
// terms for each column), so that the gradient needs no second pass over the logits. An exponential
// is exp(z - shift), where the shift is near the largest logit so far and rises along the row. A
// segment is a range of columns with the same shifts. It ends where the next one begins.
struct Segment {
    int64_t begin;                 // first column
    float shift, reference_shift;  // of policy and reference
};

// Segments are at least this long, except for the last ones (fewer than 8).
constexpr int64_t MIN_SEGMENT_COLUMNS = 16;
constexpr int64_t MAX_SHORT_SEGMENTS = 8;

static inline int64_t max_segments(int64_t vocab) {
    return vocab / MIN_SEGMENT_COLUMNS + MAX_SHORT_SEGMENTS;
}

// Scratch memory of one thread for the saved terms of one row.
//   terms[0]  [V]; null if the terms fit into the memory of the gradient
//   terms[1]  [V] with a reference; else null
//   segments  null if nothing is saved, or no memory was available: the gradient is then computed
//             from the logits in a second pass
struct SavedTermsBuffer {
    float* terms[2];
    Segment* segments;
};

struct ScaleJob {
    char* data;
    int dtype;
    int64_t count;
    float factor;
};

// ---- (row, id) pairs: logits at single ids and their gradients

// A row-major matrix. The elements of a row are contiguous.
struct Matrix {
    char* base;
    int dtype;
    int64_t rows, columns;
    int64_t stride;  // from row to row, in elements

    [[gnu::always_inline]] bool is_bf16() const { return dtype == BF16; }
    template <class T> [[gnu::always_inline]] T* at(int64_t i, int64_t j) const {
        return reinterpret_cast<T*>(base) + i * stride + j;
    }
};

// A pair whose id is negative is unused.
struct RowIdPairs {
    const int64_t *ids, *rows;  // [count]
    int64_t count;
};

// logits[k] = hidden[rows[k]] . weight[ids[k]], -inf for unused pairs.
struct PairLogitsJob {
    Matrix hidden, weight;  // [N, H], [V, H]
    RowIdPairs pairs;
    float* logits;  // [pairs.count]
};

// A pair and its key: the row of `out` that the pair is added to.
struct KeyedPair {
    uint32_t key, pair;
};

// out[key] = sum of values[k] * source[index of pair k] over the pairs k with this key, in their
// order.
//   grad_hidden   by_id is null, the key of a pair is its row, the index its id
//   grad_weight   by_id is given, the key of a pair is its id, the index its row
struct SegmentedSumJob {
    Matrix source, out;
    const float* values;  // [pairs.count]
    RowIdPairs pairs;
    const KeyedPair* by_id;  // [count], the used pairs, sorted by key; or null
    int64_t count;           // number of pairs in by_id, or of all pairs
    bool accumulate;         // whether the sums are added to the values in `out`
};

// The columns of one call of `segmented_sum`, whose buffer is on the stack.
constexpr int64_t SUM_COLUMNS = 1024;

// ---- the table of kernels for one instruction set. Row kernels compute row i.

struct Kernels {
    const char* name;
    void (*softmax_sums)(const SoftmaxSumsJob&, int64_t i);
    void (*mixture_sums)(const MixtureSumsJob&, int64_t i);
    void (*softmax_gradient)(const SoftmaxGradientJob&, int64_t i);
    void (*fused_loss)(const FusedLossJob&, int64_t i, const SavedTermsBuffer&);
    void (*scale)(const ScaleJob&, int64_t begin, int64_t end);             // elements
    void (*pair_logits)(const PairLogitsJob&, int64_t begin, int64_t end);  // pairs
    // Computes these columns of the sums of the keys whose first pair is in [begin, end).
    void (*segmented_sum)(
        const SegmentedSumJob&, int64_t begin, int64_t end, int64_t first_column,
        int64_t last_column);
};

// ---- matmuls of bf16 or fp32 operands with fp32 results
//
// Libraries round the results of bf16 matmuls to bf16, or compute fp32 ones at half the speed of
// the processor. Every output element is a sum over blocks of fixed size along the inner dimension,
// so its value depends neither on the number of threads nor on the number of rows.

// out [N, V] = hidden [N, H] weight [V, H]^T + bias [V]. `hidden` and `weight` have one dtype.
struct LogitsMatmul {
    Matrix hidden, weight;
    const float* bias;  // may be null
    Matrix out;
    int64_t rows, width, vocab;  // N, H, V
    uint32_t* packed_hidden;     // packed_hidden_bytes(N, H)
};

// out [N, H] = grad_logits [N, V] weight [V, H]. With a bf16 weight, fp32 grad_logits are rounded
// to bf16 while they are packed.
struct GradHiddenMatmul {
    Matrix grad_logits, weight, out;
    int64_t rows, width, vocab;
};

// out [V, H] = start [V, H] + grad_logits [N, V]^T hidden [N, H]. With bf16 hidden states, fp32
// grad_logits are rounded to bf16 while they are packed.
struct GradWeightMatmul {
    Matrix grad_logits, hidden;
    Matrix start;  // base null: 0; may be `out`
    Matrix out;    // fp32, or bf16: the fp32 sum is then rounded once
    int64_t rows, width, vocab;
    uint32_t* packed_hidden;  // packed_hidden_panels_bytes(N, H)
};

// The functions of one engine, a set of instructions for matmuls. Operands are packed, that is
// copied into the layout that is multiplied. For logits and grad_weight the hidden states, which
// all threads share, are packed first, in parallel. Then each thread computes ranges of the
// vocabulary (grad_hidden: rectangles of the output). The functions that return bool return false,
// with nothing written, if they get no memory.
struct Matmuls {
    int64_t (*packed_hidden_bytes)(int64_t rows, int64_t width, bool is_bf16);
    void (*pack_hidden)(const LogitsMatmul&, int64_t begin, int64_t end);  // rows of N
    bool (*logits)(const LogitsMatmul&, int64_t begin, int64_t end);       // columns of V

    // rows of N, columns of H
    bool (*grad_hidden)(
        const GradHiddenMatmul&, int64_t begin, int64_t end, int64_t first_column,
        int64_t last_column);

    int64_t (*packed_hidden_panels_bytes)(int64_t rows, int64_t width, bool is_bf16);
    // panels of PANEL_COLUMNS columns of H
    void (*pack_hidden_panels)(const GradWeightMatmul&, int64_t begin, int64_t end);
    bool (*grad_weight)(const GradWeightMatmul&, int64_t begin, int64_t end);  // rows of V

    int64_t row_unit;  // ranges of rows of N are multiples of this
    // grad_hidden splits the vocabulary into parts of this many ids per SPLIT_WIDTH columns of H,
    // for threads to share, and adds the results of the parts in order. A wider H has larger parts,
    // so that all parts together take about 1/16 of the memory of the logits. 0: no split.
    int64_t vocab_split;
};

constexpr int64_t SPLIT_WIDTH = 1024;

// Columns of the right operand that the innermost loop multiplies at once.
constexpr int64_t PANEL_COLUMNS = 64;

}  // namespace grpo
