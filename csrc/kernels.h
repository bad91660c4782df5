// What kernels take, as plain structures over pointers, and the table of kernels that kernels.cpp makes once for each instruction set.
// arguments.h makes these structures from Python's arguments, and checks them.
#pragma once
#include <stdint.h>

namespace grpo {

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum DType : int { FP32 = 0, BF16 = 1, FP16 = 2 };

static inline int size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

// The rows first .. first + count of a tensor [A, T, V], counted in row-major order over A and T; unit stride in V. Row 0 is the first.
struct Rows {
    char* base;
    int dtype;
    int64_t inner_count, outer_stride, inner_stride, vocab;  // T; strides of A and of T, in elements; V
    int64_t first, count;

    [[gnu::always_inline]] char* row(int64_t i) const {
        const int64_t at = first + i, element = (at / inner_count) * outer_stride + (at % inner_count) * inner_stride;
        return base + element * size_of(dtype);
    }
};

// z = softcap * tanh(x * scale / softcap) * inv_temperature; softcap 0 means none.
struct Transform {
    float scale, softcap, inv_temperature;
    const float* inv_temperatures;  // per row, or null

    [[gnu::always_inline]] float inverse(int64_t i) const { return inv_temperatures ? inv_temperatures[i] : inv_temperature; }
};

struct Stream {
    Rows rows;
    Transform transform;
};

// The stream that a divergence compares with, and what is known of both rows, per row.
enum Direction : int { REVERSE = 0, FORWARD = 1, JSD = 2, TV = 3 };

struct Second {
    Stream stream;
    int direction;
    double mixture;         // the second stream's share in the mixture of JSD; the other one, 1 - mixture, is computed in fp64
    const float* weight;    // of the divergence in the loss, for `fused`; null: 0
    const float* log_sums;  // log(teacher_sum / sum), for `mixed` and `pull`
    const float* center;    // for `pull`, see rows/partials.py
};

// Vectors by name, null where one is not there. The order of names is that of OF_KERNELS in rows/partials.py.
enum Partial { MAX, SUM, TARGET, WEIGHTED, SQUARES, TOP, TEACHER_MAX, TEACHER_SUM, CROSS, EXCESS, PARTIALS };
enum Slope { OF_TARGET, CONSTANT, LOG, PROB, DIVERGENCE, SLOPES };
enum Result { LOGPS, ENTROPY, LOSSES, OF_DIVERGENCE, RESULTS };
enum Mixed { MIXED_STUDENT, MIXED_TEACHER, MIXED };

template <int N> struct Vectors {
    float* of[N];

    [[gnu::always_inline]] float* operator[](int name) const { return of[name]; }
};

// ---- a formula as a straight-line program on fp32 numbers, run for one row or for a block of rows at a time.
// formulas/program.py generates it.

// Registers hold the numbers of a call, then the inputs, then the result of each instruction.
constexpr int MOST_REGISTERS = 512;

// A condition is 1 if true, else 0. program.cpp has the names that Python uses, in this order.
enum Operation : uint16_t {
    NEGATE, ABSOLUTE, EXPONENTIAL, LOGARITHM, SQUARE_ROOT, HYPERBOLIC_TANGENT, RECIPROCAL, NOT,
    ADD, SUBTRACT, MULTIPLY, DIVIDE, MINIMUM, MAXIMUM, LESS, LESS_EQUAL, EQUAL, NOT_EQUAL, AND, OR,
    SELECT,  // a ? b : c
    OPERATIONS
};

struct Instruction {
    uint16_t operation, a, b, c;
};

struct Program {
    const Instruction* instructions;
    int count, numbers, inputs, outputs;
    const uint16_t* output;  // registers

    [[gnu::always_inline]] int registers() const { return numbers + inputs + count; }
};

// Each operation rounds to fp32 as torch does; exp, log and tanh are those of fp64, rounded.
void evaluate(const Program& program, const float* numbers, const float* inputs, float* outputs);
// For `rows` at a time. A register is so many numbers of `r`, in which the inputs are already.
void evaluate(const Program& program, const float* numbers, int64_t rows, float* r);

// ---- rows of logits. Vectors are indexed by row.

// `to` has MAX, SUM and TARGET; WEIGHTED if SQUARES; those from TEACHER_MAX on beside a second stream. TOP is int32.
struct StatsJob {
    Stream own;
    const Second* second;  // or null
    const int64_t* targets;
    const uint8_t* read;  // rows whose entry is 0 are not read; null: all are read
    Vectors<PARTIALS> to;
};

// Two sums over p and q themselves, from the statistics of the first visit.
struct MixedJob {
    Stream own;
    const Second* second;
    const uint8_t* read;
    Vectors<PARTIALS> of;
    Vectors<MIXED> to;
};

// d loss / d z_j = target (1[j = y] - p_j) + p_j (constant + log log p_j + prob p_j) + divergence G_j
struct PullJob {
    Stream own;
    const Second* second;  // null where no row has a divergence
    Rows out;
    const int64_t* targets;
    Vectors<PARTIALS> of;
    Vectors<SLOPES> slopes;  // those other than OF_TARGET may be null
};

// The loss and its gradient in one call. The program computes the loss and its slopes. Its first two inputs are the row's log-prob
// and entropy; of the other inputs it gets entry i.
constexpr int TOKEN_OUTPUTS = 3;  // loss, d loss / d log-prob, d loss / d entropy

struct FusedJob {
    Stream own;
    const Second* second;
    Rows out;  // base null: no gradient
    const int64_t* targets;
    const uint8_t* read;  // a row whose entry is 0 has gradient 0, and log-prob and entropy 0; null: all are read
    const Program* program;
    const float* numbers;
    const float* const* inputs;
    bool with_entropy;  // the loss depends on the entropy
    Vectors<RESULTS> to;
};

// What a visit keeps of a row for its gradient: one term of each column, beside a second stream two, times the slope of the softcap
// if there is one. From element `begin` on they are relative to these maxima, or near ones, of the streams.
struct Segment {
    int64_t begin;
    float shift, teacher_shift;
};

constexpr int64_t SHORTEST_SEGMENT = 16;  // except for the last ones

static inline int64_t most_segments(int64_t vocab) { return vocab / SHORTEST_SEGMENT + 8; }

// Memory of a thread for them. `terms[0]` is null if the terms lie in the memory of the gradient; `segments` if nothing is kept or
// no memory was available: the gradient is then computed from the logits again, which takes longer.
struct TermMemory {
    float* terms[2];
    Segment* segments;
};

struct ScaleJob {
    char* data;
    int dtype;
    int64_t count;
    float factor;
};

// ---- products over slots, see rows/ragged.py

// A matrix with unit stride within a row.
struct Matrix {
    char* base;
    int dtype;
    int64_t rows, columns, stride;  // in elements

    [[gnu::always_inline]] bool is_bf16() const { return dtype == BF16; }
    template <class T> [[gnu::always_inline]] T* at(int64_t i, int64_t j) const { return reinterpret_cast<T*>(base) + i * stride + j; }
};

// Pairs of a row and an id; one with an id below 0 is not used.
struct Slots {
    const int64_t *ids, *rows;
    int64_t count;
};

struct SlotLogits {
    Matrix hidden, weight;
    Slots slots;
    float* logits;
};

// A slot and its key: the row of `out` that the slot is added to.
struct KeyedSlot {
    uint32_t key, slot;
};

// out[key] = the sum of values * source[index] over the slots of a key, in their order. With `keep`, it is added to out[key].
struct SlotSums {
    Matrix source, out;
    const float* values;
    Slots slots;
    const KeyedSlot* by_id;  // sorted; keys are ids, indices are rows. Null: slots as they are; keys are rows, indices are ids
    int64_t count;           // of by_id, or of all slots
    bool keep;
};

// The most columns in one call of `slot_sums`, whose buffer is on the stack.
constexpr int64_t SUM_COLUMNS = 1024;

// ---- the table

struct Kernels {
    const char* name;
    void (*stats)(const StatsJob&, int64_t i);
    void (*mixed)(const MixedJob&, int64_t i);
    void (*pull)(const PullJob&, int64_t i);
    void (*fused)(const FusedJob&, int64_t i, const TermMemory&);
    void (*scale)(const ScaleJob&, int64_t begin, int64_t end);
    void (*slot_logits)(const SlotLogits&, int64_t begin, int64_t end);  // slots
    // Computes these columns of the sums of the keys whose first slot is in [begin, end).
    void (*slot_sums)(const SlotSums&, int64_t begin, int64_t end, int64_t first_column, int64_t last_column);
};

// ---- matrix products of bf16 or fp32 operands with fp32 results. Libraries round the results of bf16 products or compute them at
// half the speed of the processor. Every output element is a sum over blocks of fixed size along the inner dimension. So its value
// depends neither on the number of threads nor on the number of rows. There is a table of them for each way to multiply.

// out [N, V] = hidden [N, H] weight [V, H]^T + bias [V]. Hidden states and weight are of one type.
struct LogitsProduct {
    Matrix hidden, weight;
    const float* bias;  // may be null
    Matrix out;
    int64_t rows, width, vocab;  // N, H, V
    uint32_t* packed;            // hidden_pack_bytes(N, H)
};

// out [N, H] = gradient [N, V] weight [V, H]. With a bf16 weight a gradient in fp32 is rounded to bf16 on the way.
struct HiddenGradProduct {
    Matrix gradient, weight, out;
    int64_t rows, width, vocab;
};

// out [V, H] = start [V, H] + gradient [N, V]^T hidden [N, H]. With hidden states in bf16 a gradient in fp32 is rounded on the way.
struct WeightGradProduct {
    Matrix gradient, hidden;
    Matrix start;  // base null: 0; may be out
    Matrix out;    // of bf16: the sum is rounded at its end
    int64_t rows, width, vocab;
    uint32_t* packed;  // hidden_panel_bytes(N, H)
};

// The operand that all threads share is packed first, by ranges of rows [N] or of column panels. Then one thread computes each range
// of the vocabulary, or each rectangle of the output. These functions return false, and have done nothing, if they get no memory.
struct Products {
    int64_t (*hidden_pack_bytes)(int64_t rows, int64_t width, bool is_bf16);
    void (*pack_hidden)(const LogitsProduct&, int64_t begin, int64_t end);  // rows of N
    bool (*logits)(const LogitsProduct&, int64_t begin, int64_t end);       // columns of V

    // rows of N, columns of H
    bool (*d_hidden)(const HiddenGradProduct&, int64_t begin, int64_t end, int64_t first_column, int64_t last_column);

    int64_t (*hidden_panel_bytes)(int64_t rows, int64_t width, bool is_bf16);
    void (*pack_hidden_panels)(const WeightGradProduct&, int64_t begin, int64_t end);  // panels of PANEL_COLUMNS of H
    bool (*d_weight)(const WeightGradProduct&, int64_t begin, int64_t end);            // rows of V

    int64_t row_unit;  // ranges of rows of N are multiples of this
    // d_hidden sums so many ids of the vocabulary apart, for threads to share: parts of a fixed size, added in order. Of each further
    // PART_WIDTH columns of H as many more, so that the parts together take about 1 / 16 of the memory of the logits. 0: all at once.
    int64_t part;
};

constexpr int64_t PART_WIDTH = 1024;

constexpr int64_t PANEL_COLUMNS = 64;

}  // namespace grpo
