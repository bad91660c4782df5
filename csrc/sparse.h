// Sparse products: dot products of each row of the hidden states with a few rows of the weight, and weighted sums of such rows, see
// rows/ragged.py. sparse.cpp is compiled once per instruction set, like kernels.cpp.
#pragma once
#include <stdint.h>

namespace grpo {

// A matrix with unit stride within a row; dtype as in kernels.h.
struct Table {
    char* base;
    int dtype;
    int64_t stride;  // in elements
};

struct SlotLogits {
    Table hidden, weight;
    int64_t width;
    const int64_t *ids, *rows;  // of each slot; a slot with an id below 0 is unused
    float* logits;
};

// A slot and its key: the row of `out` that the slot is added to.
struct KeyedSlot {
    uint32_t key, slot;
};

// out[key] = the sum of values * source[index] over the slots of a key, in their order. With `keep`, it is added to out[key].
struct SlotSums {
    Table source, out;
    int64_t width;
    const float* values;
    const int64_t *ids, *rows;
    const KeyedSlot* by_id;  // sorted; keys are ids, indices are rows. Null: slots as they are; keys are rows, indices are ids
    int64_t count;           // of by_id, or of all slots
    bool keep;
};

struct SparseKernels {
    const char* name;
    void (*logits)(const SlotLogits&, int64_t begin, int64_t end);  // slots
    // Computes these columns of the sums of the keys whose first slot is in [begin, end).
    void (*sums)(const SlotSums&, int64_t begin, int64_t end, int64_t first_column, int64_t last_column);
};

// The most columns in one call of `sums`, whose buffer is on the stack.
constexpr int64_t SUM_COLUMNS = 1024;

}  // namespace grpo
