// SPDX-License-Identifier: Apache-2.0
// What the kernels share that turn products into weights of a softmax.
#pragma once

#include "device.cuh"
#include "score_plan.cuh"

namespace keyformer::cuda {

constexpr float kLog2E = 0x1.715476p+0f;

// A query is the last of the keys that it sees.
__device__ inline int query_bias_position(const ScoreKeysArgs& args, int request, int token) {
  return args.place.data != nullptr ? visible_keys(args, request, token) - 1
                                    : static_cast<int>(args.query_positions[token]);
}

__device__ inline float capped_logit(const ScoreKeysArgs& args, float product) {
  const float x = product * args.scale;
  return args.soft_cap > 0.0f ? args.soft_cap * tanhf(x / args.soft_cap) : x;
}

__device__ inline float bias(float slope, int key_position, int query_position) {
  return slope * static_cast<float>(key_position - query_position);
}

// w / sum, rounded as a division but where both are tiny: a row in which one key has almost all the
// weight gives it 1, not 1 - 2^-24, and such rows add up.
__device__ inline float divide(float w, float sum, float inverse) {
  const float quotient = w * inverse;
  return fmaf(fmaf(-quotient, sum, w), inverse, quotient);
}

// A running maximum of exponents and the sum of powers against it: powers of 2, or of e.
template <bool kIsBase2>
struct SumOfPowers {
  float maximum = -INFINITY;
  float sum = 0.0f;

  __device__ static float power(float x) { return fast_exp2(kIsBase2 ? x : x * kLog2E); }

  // A row of which nothing was seen has no maximum, and no weight to rescale.
  __device__ static float base(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

  __device__ void raise(float other) {
    const float next = fmaxf(maximum, other);
    sum *= power(maximum - base(next));
    maximum = next;
  }

  __device__ void merge(SumOfPowers other) {
    const float next = fmaxf(maximum, other.maximum);
    sum = sum * power(maximum - base(next)) + other.sum * power(other.maximum - base(next));
    maximum = next;
  }
};

using OnlineSum = SumOfPowers<false>;
using RowSum = SumOfPowers<true>;

}  // namespace keyformer::cuda
