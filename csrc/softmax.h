// Log-prob of the target and entropy of a row, from its statistics in fp32: with the logarithm in fp64, as rows/partials.py has
// them on a CPU, so that results are the same.
#pragma once
#include <math.h>

namespace grpo {
namespace {

struct Softmax {
    double log_sum, logp;
    float entropy;

    Softmax(double max, double sum, double target, double weighted) : log_sum(log(sum)), logp((target - max) - log_sum) {
        const double found = log_sum - weighted / sum;
        entropy = found < 0 ? 0.0f : float(found);  // rounding may make that of a one-hot row slightly negative; NaN stays
    }
};

}  // namespace
}  // namespace grpo
