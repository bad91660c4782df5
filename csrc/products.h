// Matrix products of bf16 operands with fp32 results, which no library offers at the speed of the processor's bf16
// instructions. Row-major operands with unit stride along the rows; strides in elements.
//
// Every output element is a sum of blocks along the inner dimension, whose size is fixed: it depends neither on the number of
// threads nor on how many other rows there are.
#pragma once
#include <stdint.h>

namespace grpo {

struct Bf16Matrix {
    const uint16_t* data;
    int64_t stride;
};

// fp32 or bf16; fp32 is rounded to bf16 on the way into the product.
struct GradientMatrix {
    const char* data;
    bool is_bf16;
    int64_t stride;
};

struct Fp32Matrix {
    float* data;
    int64_t stride;
};

// out [N, V] = hidden [N, H] weight [V, H]^T + bias [V]
struct LogitsProduct {
    Bf16Matrix hidden, weight;
    const float* bias;  // may be null
    Fp32Matrix out;
    int64_t rows, width, vocab;  // N, H, V
    uint32_t* packed;            // hidden_pack_bytes(N, H)
};

// out [N, H] = gradient [N, V] weight [V, H]
struct HiddenGradProduct {
    GradientMatrix gradient;
    Bf16Matrix weight;
    Fp32Matrix out;
    int64_t rows, width, vocab;
};

// sum [V, H] (+)= gradient [N, V]^T hidden [N, H]
struct WeightGradProduct {
    GradientMatrix gradient;
    Bf16Matrix hidden;
    Fp32Matrix sum;
    bool first;  // overwrite instead of adding
    int64_t rows, width, vocab;
    uint32_t* packed;  // hidden_panel_bytes(N, H)
};

// The operand that all threads share is packed first, by ranges of rows [N] or of column panels; then each range of the
// vocabulary, or each rectangle of the output, is one thread's work from beginning to end. That work returns false, and has
// done nothing, where the thread gets no memory to work in.
struct Products {
    int64_t (*hidden_pack_bytes)(int64_t rows, int64_t width);
    void (*pack_hidden)(const LogitsProduct&, int64_t begin, int64_t end);  // rows of N
    bool (*logits)(const LogitsProduct&, int64_t begin, int64_t end);       // columns of V

    // rows of N, columns of H
    bool (*d_hidden)(const HiddenGradProduct&, int64_t begin, int64_t end, int64_t first_column, int64_t last_column);

    int64_t (*hidden_panel_bytes)(int64_t rows, int64_t width);
    void (*pack_hidden_panels)(const WeightGradProduct&, int64_t begin, int64_t end);  // panels of PANEL_COLUMNS of H
    bool (*add_d_weight)(const WeightGradProduct&, int64_t begin, int64_t end);        // rows of V
};

constexpr int64_t PANEL_COLUMNS = 64;

}  // namespace grpo
