// SPDX-License-Identifier: Apache-2.0
// Second kernel of paged_attention_scored: merges the ranges of each row into its output, and adds
// exp(noisy logit) / sum to the score of each key: head after head, row after row.
#pragma once

#include "attend_ranges.cuh"

namespace keyformer::cuda {

constexpr int kFinishThreads = 128;

// Both softmaxes of a whole row of one query head.
struct RowSums {
  OnlineSum plain;
  OnlineSum noisy;

  __device__ void merge(const RowSums& other) {
    plain.merge(other.plain);
    noisy.merge(other.noisy);
  }
};

// By one warp; every lane gets the result. A sink is one more key, without noise.
__device__ inline RowSums merge_ranges(const PagedAttentionScoredArgs& args, int64_t scratch_row,
                                       int num_ranges, float sink, float inverse_tau) {
  const RangeState* states = args.scratch.states + scratch_row * args.scratch.max_ranges;
  RowSums sums;
  for (int range = threadIdx.x % kWarp; range < num_ranges; range += kWarp) {
    const RangeState& state = states[range];
    sums.merge({{state.maximum, state.sum}, {state.noisy_maximum, state.noisy_sum}});
  }
  for (int distance = 1; distance < kWarp; distance *= 2) {
    RowSums other;
    other.plain.maximum = __shfl_xor_sync(0xFFFFFFFFu, sums.plain.maximum, distance);
    other.plain.sum = __shfl_xor_sync(0xFFFFFFFFu, sums.plain.sum, distance);
    other.noisy.maximum = __shfl_xor_sync(0xFFFFFFFFu, sums.noisy.maximum, distance);
    other.noisy.sum = __shfl_xor_sync(0xFFFFFFFFu, sums.noisy.sum, distance);
    sums.merge(other);
  }
  const float weight = sink == -INFINITY ? 0.0f : 1.0f;
  sums.merge({{sink, weight}, {sink * inverse_tau, weight}});
  return sums;
}

// The output of one query head, a thread per dimension.
__device__ inline void store_output(const PagedAttentionScoredArgs& args, int token, int query_head,
                                    int64_t scratch_row, int num_ranges, const OnlineSum& plain) {
  const int head_size = args.inputs.cache.head_size;
  const AttentionScratch& scratch = args.scratch;
  const RangeState* states = scratch.states + scratch_row * scratch.max_ranges;
  const float* outputs = scratch.outputs + scratch_row * scratch.max_ranges * head_size;
  const float base = OnlineSum::base(plain.maximum);
  auto* to = reinterpret_cast<uint16_t*>(args.output) + token * args.output_token_stride +
             query_head * args.output_head_stride;
  for (int d = threadIdx.x; d < head_size; d += kFinishThreads) {
    float sum = 0.0f;
#pragma unroll 4
    for (int range = 0; range < num_ranges; ++range) {
      const float factor = fast_exp2((states[range].maximum - base) * kLog2E);
      sum += outputs[static_cast<int64_t>(range) * head_size + d] * factor;
    }
    const float value = sum * fast_reciprocal(plain.sum);
    to[d] = static_cast<uint16_t>(args.inputs.element_type == ElementType::kBFloat16
                                      ? pack<BFloat16>(value, 0.0f)
                                      : pack<Float16>(value, 0.0f));
  }
}

// Adds a row to the scores of keys [begin, end) of a request, a thread per key.
__device__ inline void add_scores(const PagedAttentionScoredArgs& args, int request, int head,
                                  int64_t scratch_row, int begin, int end, const RowSums* sums) {
  const ScoreKeysArgs& inputs = args.inputs;
  const int group = inputs.num_query_heads / inputs.cache.num_kv_heads;
  const int32_t* blocks = inputs.requests.blocks(request);
  const int block_bits = inputs.cache.block_bits;
  for (int slot = begin + threadIdx.x; slot < end; slot += kFinishThreads) {
    const float* logits = args.scratch.logits + scratch_row * args.scratch.max_keys + slot;
    float share = 0.0f;
    for (int h = 0; h < group; ++h) {
      const OnlineSum& noisy = sums[h].noisy;
      const float x = logits[h * args.scratch.max_keys] - OnlineSum::base(noisy.maximum);
      share += divide(fast_exp2(x * kLog2E), noisy.sum, fast_reciprocal(noisy.sum));
    }
    const int64_t block = blocks[slot >> block_bits];
    inputs.score.at(0, block, head)[slot & ((1 << block_bits) - 1)] += share;
  }
}

// One block of threads per part of a (request, KV head): of its keys, and of its query heads.
__global__ void __launch_bounds__(kFinishThreads)
    finish_rows_kernel(const __grid_constant__ PagedAttentionScoredArgs args) {
  auto* sums = reinterpret_cast<RowSums*>(shared_memory());  // [query heads of the KV head]
  const ScoreKeysArgs& inputs = args.inputs;
  const int num_kv_heads = inputs.cache.num_kv_heads;
  const int group = inputs.num_query_heads / num_kv_heads;
  const int head = blockIdx.x % num_kv_heads;
  const int request = blockIdx.x / num_kv_heads;
  const int part = blockIdx.y;
  const int num_parts = args.num_splits;
  // The part of a key is the same for all rows, so that one thread adds them all.
  const int64_t kv_len = inputs.requests.kv_lens[request];
  const int begin = static_cast<int>(kv_len * part / num_parts);
  const int end = static_cast<int>(kv_len * (part + 1) / num_parts);
  const int first_token = max(args.first_token, inputs.query_start_loc[request]);
  const int end_token =
      min(args.first_token + args.scratch.num_rows, inputs.query_start_loc[request + 1]);
  for (int token = first_token; token < end_token; ++token) {
    const int num_keys = visible_keys(inputs, request, token);
    const int num_ranges = (num_keys + kRangeKeys - 1) / kRangeKeys;
    const int row = token - args.first_token;
    const int64_t scratch_row = static_cast<int64_t>(row) * inputs.num_query_heads + head * group;
    const float tau = inputs.tau[token];
    for (int h = threadIdx.x / kWarp; h < group; h += kFinishThreads / kWarp) {
      const float sink = inputs.sinks != nullptr ? inputs.sinks[head * group + h] : -INFINITY;
      const float inverse_tau = tau > 0.0f ? __fdiv_rn(1.0f, tau) : 1.0f;
      const RowSums merged = merge_ranges(args, scratch_row + h, num_ranges, sink, inverse_tau);
      if (threadIdx.x % kWarp == 0) sums[h] = merged;
    }
    __syncthreads();
    for (int h = part; h < group; h += num_parts) {
      store_output(args, token, head * group + h, scratch_row + h, num_ranges, sums[h].plain);
    }
    if (tau > 0.0f) {
      add_scores(args, request, head, scratch_row, begin, min(end, num_keys), sums);
    }
    __syncthreads();  // before the sums of the next row come
  }
}

}  // namespace keyformer::cuda
