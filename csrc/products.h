// Matrix products of bf16 or fp32 operands with fp32 results. Libraries round the results of bf16 products or compute them at half
// the speed of the processor. Operands are row-major with unit stride within a row; strides are in elements.
//
// Every output element is a sum over blocks of fixed size along the inner dimension. So its value depends neither on the number of
// threads nor on the number of rows. There is a table of them for each way to multiply.
#pragma once
#include <stdint.h>

namespace grpo {

// A matrix of fp32 or bf16.
struct Operand {
    const char* data;
    bool is_bf16;
    int64_t stride;

    template <class T> [[gnu::always_inline]] const T* at(int64_t i, int64_t j) const { return reinterpret_cast<const T*>(data) + i * stride + j; }
};

struct Fp32Matrix {
    float* data;
    int64_t stride;
};

// out [N, V] = hidden [N, H] weight [V, H]^T + bias [V]. Hidden states and weight are of one type.
struct LogitsProduct {
    Operand hidden, weight;
    const float* bias;  // may be null
    Fp32Matrix out;
    int64_t rows, width, vocab;  // N, H, V
    uint32_t* packed;            // hidden_pack_bytes(N, H)
};

// out [N, H] = gradient [N, V] weight [V, H]. With a bf16 weight a gradient in fp32 is rounded to bf16 on the way.
struct HiddenGradProduct {
    Operand gradient, weight;
    Fp32Matrix out;
    int64_t rows, width, vocab;
};

// out [V, H] = start [V, H] + gradient [N, V]^T hidden [N, H]. With hidden states in bf16 a gradient in fp32 is rounded on the way.
struct WeightGradProduct {
    Operand gradient, hidden;
    const float* start;  // null: 0; may be out
    int64_t start_stride;
    char* out;
    bool out_is_bf16;  // the sum is rounded at its end
    int64_t out_stride;
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
    // d_hidden sums so many ids of the vocabulary apart, of PART_WIDTH columns of H, for threads to share: parts of a fixed size, added
    // in order. Of H columns as many times more, so that the parts together take about 1 / 16 of the memory of the logits. 0: all.
    int64_t part;
};

constexpr int64_t PART_WIDTH = 1024;

constexpr int64_t PANEL_COLUMNS = 64;

}  // namespace grpo
