// SPDX-License-Identifier: Apache-2.0
// Last kernels of score_keys: from weights in scratch to shares, and those to the keys' scores.
#pragma once

#include "row_softmax.cuh"
#include "score_tile.cuh"

namespace keyformer::cuda {

constexpr int kScaleThreads = 256;

// A thread per vector and every fourth tile of keys.
__global__ void __launch_bounds__(kScaleThreads)
    scale_tiles_kernel(const __grid_constant__ ScoreGroupArgs args) {
  constexpr int kParts = kScaleThreads / kTile;
  __shared__ float maxima[kParts][kTile];
  __shared__ float sums[kParts][kTile];
  const ScoreKeysArgs& inputs = args.inputs;
  const int head = blockIdx.y;
  const RowTile tile(args, blockIdx.x);
  const int num_key_tiles = (tile.num_keys + kTile - 1) / kTile;
  if (num_key_tiles == 0) return;
  const int index = threadIdx.x % kTile;
  const int part = threadIdx.x / kTile;
  const int64_t at = args.scratch.tile(inputs, tile.slot, head, 0) * kTile;
  const TileState* states = args.scratch.states + at;
  float* factors = args.scratch.factors + at;
  RowSum own;
#pragma unroll 4
  for (int i = part; i < num_key_tiles; i += kParts) {
    const TileState& state = states[static_cast<int64_t>(i) * kTile + index];
    own.merge({state.maximum, state.sum});
  }
  maxima[part][index] = own.maximum;
  sums[part][index] = own.sum;
  __syncthreads();
  RowSum row;
  for (int i = 0; i < kParts; ++i) row.merge({maxima[i][index], sums[i][index]});
  const int group = inputs.num_query_heads / inputs.cache.num_kv_heads;
  const RequestRows rows(inputs, tile.request, group);
  const int vector = tile.first_vector + index;
  if (inputs.sinks != nullptr && vector < rows.num_vectors) {
    // A sink is one more key, without noise: nor may the others lack a part of theirs.
    const int token = inputs.plan.tokens[rows.first_scored + vector / group];
    const float sink = inputs.sinks[head * group + vector % group];
    const float missing = inputs.noise_keys[tile.request] != 0 ? kLog2Ln2 : 0.0f;
    const float exponent = fmaf(sink, kLog2E, missing) * __fdiv_rn(1.0f, inputs.tau[token]);
    row.merge({exponent, sink == -INFINITY ? 0.0f : 1.0f});
  }
  const float base = RowSum::base(row.maximum);
#pragma unroll 4
  for (int i = part; i < num_key_tiles; i += kParts) {
    const TileState& state = states[static_cast<int64_t>(i) * kTile + index];
    // A division, so that a row in which one key has all the weight gives it 1. A vector that is
    // none has no sum.
    const float power = RowSum::power(state.maximum - base);
    factors[static_cast<int64_t>(i) * kTile + index] =
        vector < rows.num_vectors ? __fdiv_rn(power, row.sum) : 0.0f;
  }
}

// The key of a tile whose weights are in a column of it in scratch.
__device__ inline int column_key(int column) {
  constexpr int kOwn = kTile / 4;  // columns of a lane
  return column % kOwn / 2 * 8 + column / kOwn * 2 + column % 2;
}

// The first tile of a request's vectors in which a row sees key `start`.
__device__ inline int first_tile_seeing(const ScoreKeysArgs& args, int request, int start) {
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  const RequestRows rows(args, request, group);
  int first = 0;
  int last = rows.num_vectors / group - 1;
  while (first < last) {
    const int middle = (first + last) / 2;
    const int token = args.plan.tokens[rows.first_scored + middle];
    if (visible_keys(args, request, token) > start) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return args.plan.row_tiles[request] + first * group / kTile;
}

constexpr int kColumnStages = 4;

struct AddColumnsShared {
  struct Stage {
    uint16_t weights[kTile][kTile];
    alignas(16) float factors[kTile];
  } stages[kColumnStages];
};

// A thread per key, so that it adds its shares in order.
__global__ void __launch_bounds__(kTile)
    add_columns_kernel(const __grid_constant__ ScoreGroupArgs args) {
  auto& shared = *reinterpret_cast<AddColumnsShared*>(shared_memory());
  const ScoreKeysArgs& inputs = args.inputs;
  const ScorePlan& plan = inputs.plan;
  const int num_reqs = inputs.requests.num_reqs;
  const int head = blockIdx.y;
  const int end_row_tile =
      min(args.first_row_tile + args.scratch.num_row_tiles, plan.row_tiles[num_reqs]);
  if (args.first_row_tile >= end_row_tile) return;
  // The keys of the requests whose rows are in scratch.
  const int first_request = request_of_tile(plan.row_tiles, num_reqs, args.first_row_tile);
  const int last_request = request_of_tile(plan.row_tiles, num_reqs, end_row_tile - 1);
  const int end_key_tile = plan.key_tiles[last_request + 1];
  for (int i = plan.key_tiles[first_request] + blockIdx.x; i < end_key_tile; i += gridDim.x) {
    const int request = request_of_tile(plan.key_tiles, num_reqs, i);
    const int key_tile = i - plan.key_tiles[request];
    const int slot = key_tile * kTile + column_key(threadIdx.x);
    const int begin =
        max(first_tile_seeing(inputs, request, key_tile * kTile), args.first_row_tile);
    const int end = min(plan.row_tiles[request + 1], end_row_tile);
    if (begin >= end) continue;
    const auto copy = [&](int tile) {
      if (tile < end) {
        auto& stage = shared.stages[tile % kColumnStages];
        const int64_t at =
            args.scratch.tile(inputs, tile - args.first_row_tile, head, key_tile) * kTile;
        const auto* weights = reinterpret_cast<const char*>(args.scratch.weights + at * kTile);
        constexpr int kAccesses = sizeof(stage.weights) / 16 / kTile;
#pragma unroll
        for (int access = 0; access < kAccesses; ++access) {
          const int byte = 16 * (access * kTile + threadIdx.x);
          copy_async_16(reinterpret_cast<char*>(stage.weights) + byte, weights + byte, true);
        }
        if (threadIdx.x < sizeof(stage.factors) / 16) {
          copy_async_16(stage.factors + 4 * threadIdx.x,
                        args.scratch.factors + at + 4 * threadIdx.x, true);
        }
      }
      close_copies();
    };
    for (int ahead = 0; ahead < kColumnStages - 1; ++ahead) copy(begin + ahead);
    float* score = nullptr;
    float total = 0.0f;
    // Keys behind the last one that any row sees weigh nothing, and have no slot.
    const int64_t last_token = plan.tokens[plan.ranks[inputs.query_start_loc[request + 1]] - 1];
    if (slot < visible_keys(inputs, request, static_cast<int>(last_token))) {
      const int block_bits = inputs.cache.block_bits;
      const int64_t block = inputs.requests.blocks(request)[slot >> block_bits];
      score = inputs.score.at(0, block, head) + (slot & ((1 << block_bits) - 1));
      total = *score;
    }
    for (int tile = begin; tile < end; ++tile) {
      wait_for_copies<kColumnStages - 2>();
      __syncthreads();  // ends also the reading of the stage that is filled next
      copy(tile + kColumnStages - 1);
      const auto& stage = shared.stages[tile % kColumnStages];
#pragma unroll 4
      for (int row = 0; row < kTile; row += 4) {
        const float4 factors = *reinterpret_cast<const float4*>(&stage.factors[row]);
        const auto weight = [&](int i) {
          return half_to_float(stage.weights[row + i][threadIdx.x]);
        };
        total = fmaf(weight(0), factors.x, total);
        total = fmaf(weight(1), factors.y, total);
        total = fmaf(weight(2), factors.z, total);
        total = fmaf(weight(3), factors.w, total);
      }
    }
    if (score != nullptr) *score = total;
    wait_for_copies<0>();
    __syncthreads();  // before the stages are filled for other keys
  }
}

}  // namespace keyformer::cuda
