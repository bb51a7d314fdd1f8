// SPDX-License-Identifier: Apache-2.0
// Second kernel of score_keys: the weights of a tile of query vectors in a range of keys.
#pragma once

#include "score_tile.cuh"

namespace keyformer::cuda {

template <typename T, int kHeadSize>
struct WeighShared {
  TileRows<T, kHeadSize> query;
  TileRows<T, kHeadSize> key;
  QueryVector vectors[kTile];
  RangeKeys keys;
};

// Turns a lane's products with a tile of keys into exponents of 2 at tau = 1; -inf: not seen.
// Those of a row with noise lack -log2(ln 2).
__device__ inline void make_exponents(const ScoreKeysArgs& args, const QueryVector (&vectors)[2],
                                      int key_start, bool has_noise, bool is_masked,
                                      const int* noise_positions, const int* bias_positions,
                                      float (&exponents)[kColumnBlocks][4]) {
  const int column = threadIdx.x % 4 * 2;
  float factor = args.scale * kLog2E;
  if (args.soft_cap > 0.0f || args.alibi_slopes != nullptr) {
    factor = kLog2E;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const QueryVector& vector = vectors[i / 2];
        exponents[n][i] = capped_logit(args, exponents[n][i]);
        if (args.alibi_slopes == nullptr) continue;
        exponents[n][i] +=
            bias(vector.slope, bias_positions[8 * n + column + i % 2], vector.bias_position);
      }
    }
  }
  if (has_noise) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float noise = log2_exponential_fast(vectors[i / 2].noise_key,
                                                  noise_positions[8 * n + column + i % 2]);
        exponents[n][i] = fmaf(exponents[n][i], factor, -noise);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) exponents[n][i] *= factor;
    }
  }
  if (!is_masked) return;
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Selected, not added: a key that the row does not see may be NaN.
      const bool is_seen = key_start + 8 * n + column + i % 2 < vectors[i / 2].visible;
      exponents[n][i] = is_seen ? exponents[n][i] : -INFINITY;
    }
  }
}

// Accesses of 16 bytes to a row of weights in scratch.
constexpr int kRowAccesses = kTile * sizeof(uint16_t) / sizeof(uint4);

// Leaves the weights of a lane's two vectors, and the sums of their rows in the tile, at the places
// of the first; the other is eight rows on.
__device__ inline void store_weights(const QueryVector (&vectors)[2],
                                     const float (&exponents)[kColumnBlocks][4], uint4* weights,
                                     TileState* states) {
  uint32_t pairs[2][kColumnBlocks];
  float maxima[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float maximum = -INFINITY;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      maximum = fmaxf(maximum, fmaxf(exponents[n][2 * half], exponents[n][2 * half + 1]));
    }
    for (int distance = 1; distance < 4; distance *= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, distance));
    }
    const float inverse_tau = vectors[half].inverse_tau;
    maxima[half] = maximum * inverse_tau;
    const float base = RowSum::base(maxima[half]);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      const float low = fast_exp2(fmaf(exponents[n][2 * half], inverse_tau, -base));
      const float high = fast_exp2(fmaf(exponents[n][2 * half + 1], inverse_tau, -base));
      pairs[half][n] = pack<Float16>(low, high);
    }
  }
  // As rounded, so that a row's shares sum to 1: products with ones.
  constexpr uint32_t kOnes = 0x3C003C00u;
  float sums[4] = {};
#pragma unroll
  for (int n = 0; n < kColumnBlocks; n += 2) {
    multiply_accumulate<Float16>(sums, {pairs[0][n], pairs[1][n], pairs[0][n + 1], pairs[1][n + 1]},
                                 {kOnes, kOnes});
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto& own = pairs[half];
    weights[8 * half * kRowAccesses] = {own[0], own[1], own[2], own[3]};
    weights[8 * half * kRowAccesses + 1] = {own[4], own[5], own[6], own[7]};
    if (threadIdx.x % 4 == 0) states[8 * half] = {maxima[half], sums[2 * half]};
  }
}

// Blocks of weigh_tiles that shared memory lets run on a multiprocessor, at least.
template <int kHeadSize>
constexpr int kWeighBlocks = kHeadSize <= 128 ? 4 : 2;

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kScoreThreads, kWeighBlocks<kHeadSize>)
    weigh_tiles_kernel(const __grid_constant__ ScoreGroupArgs args) {
  auto& shared = *reinterpret_cast<WeighShared<T, kHeadSize>*>(shared_memory());
  const ScoreKeysArgs& inputs = args.inputs;
  const int num_ranges = (args.scratch.max_key_tiles + kScoreRangeTiles - 1) / kScoreRangeTiles;
  const int head = blockIdx.y;
  const RowTile tile(args, blockIdx.x / num_ranges);
  const int begin = blockIdx.x % num_ranges * kScoreRangeKeys;
  if (begin >= tile.num_keys) return;
  const int end = min(begin + kScoreRangeKeys, tile.num_keys);
  const int group = inputs.num_query_heads / inputs.cache.num_kv_heads;
  prepare_vectors(inputs, RequestRows(inputs, tile.request, group), head, tile.first_vector,
                  sizeof(T), shared.vectors);
  prepare_keys(inputs, tile.request, head, begin, end, shared.keys);
  __syncthreads();
  const int row = threadIdx.x / kWarp * 16 + threadIdx.x % kWarp / 4;
  const QueryVector vectors[2] = {shared.vectors[row], shared.vectors[row + 8]};
  // What every vector of the tile sees, if it is a whole tile.
  const int seen_by_all = shared.vectors[kTile - 1].visible == 0 ? 0 : shared.vectors[0].visible;
  const bool has_noise = inputs.noise_keys[tile.request] != 0;
  copy_tile(shared.query, [&](int i) { return shared.vectors[i].row; });
  copy_tile(shared.key, [&](int i) { return shared.keys.rows[i]; });
  close_copies();
  // A lane's weights lie together: column_key() says which they are.
  const int64_t at = args.scratch.tile(inputs, tile.slot, head, begin / kTile) * kTile + row;
  auto* weights = reinterpret_cast<uint4*>(args.scratch.weights) + at * kRowAccesses +
                  threadIdx.x % 4 * (kRowAccesses / 4);
  TileState* states = args.scratch.states + at;
  for (int start = begin; start < end; start += kTile) {
    wait_for_copies<0>();
    __syncthreads();
    float exponents[kColumnBlocks][4];
    multiply_tile(shared.query, shared.key, exponents);
    __syncthreads();  // before the next keys come, which they do behind the weights of these
    const int offset = start - begin;
    if (start + kTile < end) {
      copy_tile(shared.key, [&](int i) { return shared.keys.rows[offset + kTile + i]; });
    }
    close_copies();
    make_exponents(inputs, vectors, start, has_noise, start + kTile > seen_by_all,
                   shared.keys.noise_positions + offset, shared.keys.bias_positions + offset,
                   exponents);
    store_weights(vectors, exponents, weights, states);
    weights += kTile * kRowAccesses;
    states += kTile;
  }
}

}  // namespace keyformer::cuda
