// SPDX-License-Identifier: Apache-2.0
// score_keys: adds softmax((q . k + noise) / tau), summed over rows and heads, to the keys' scores.
//
// Two sweeps over the same products, so that n x n numbers are never in memory:
//   sum_rows     one block per 64 query vectors: each row's maximum and sum, tile of keys by tile;
//   sum_columns  one block per 64 keys: their weights in all rows that see them, added up.
// Both compute a weight by the same operations from numbers that do not depend on where in a tile
// the row lies. Each lane sums its own columns of a row, and lanes are merged in a fixed order;
// each key's scores are added row after row by one thread. So the result is the same, to the bit,
// in every run, alone or in a batch, in one chunk or in several.
//
// The time goes into the noise (about 40 integer and float operations per weight at tau = 1, 80
// otherwise), not into the products: hence plain loads into shared memory and several small blocks
// to a multiprocessor that hide each other's latency.
#pragma once

#include "score_tile.cuh"

namespace keyformer::cuda {

template <typename T, int kHeadSize>
struct SumRowsShared {
  TileRows<T, kHeadSize> query;
  TileRows<T, kHeadSize> key;
  QueryVector vectors[kTile];
  KeyPositions positions;
};

template <typename T, int kHeadSize>
struct SumColumnsShared {
  // Rows of weights, padded so that the 8-byte stores of a half warp meet no bank twice.
  static constexpr int kWeightStride = kTile + 8;

  TileRows<T, kHeadSize> query;
  TileRows<T, kHeadSize> key;
  float weights[kTile][kWeightStride];
  QueryVector vectors[kTile];
  float maxima[kTile];
  float sums[kTile];
  KeyPositions positions;
};

// Where the plan keeps what belongs to a query vector of a KV head.
__device__ inline int64_t vector_index(const ScoreKeysArgs& args, const RequestRows& rows, int head,
                                       int vector) {
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  const int64_t row = rows.first_scored + vector / group;
  return row * args.num_query_heads + head * group + vector % group;
}

// Adds a tile's 16 products of one row to the sum of a lane.
__device__ inline void add_products(const ScoreKeysArgs& args, const QueryVector& vector,
                                    const float (&products)[kColumnBlocks][4], int half,
                                    int key_start, const KeyPositions& positions, OnlineSum* sum) {
  const int column = threadIdx.x % 4 * 2;
  float logits[kColumnBlocks][2];
  float maximum = -INFINITY;
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 8 * n + column + i;
      const float logit = scaled_logit(args, vector, products[n][2 * half + i], positions, key);
      // Selected, not added: a key that the row does not see may be NaN.
      logits[n][i] = key_start + key < vector.visible ? logit : -INFINITY;
      maximum = fmaxf(maximum, logits[n][i]);
    }
  }
  sum->raise(maximum);
  const float base = OnlineSum::base(sum->maximum);
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum->sum += weight(vector, logits[n][i], base, positions.noise[8 * n + column + i]);
    }
  }
}

// Blocks of sum_rows that shared memory lets run on a multiprocessor, at least.
template <int kHeadSize>
constexpr int kRowBlocks = kHeadSize <= 128 ? 5 : 3;

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kScoreThreads, kRowBlocks<kHeadSize>)
    sum_rows_kernel(const __grid_constant__ ScoreKeysArgs args) {
  auto& shared = *reinterpret_cast<SumRowsShared<T, kHeadSize>*>(shared_memory());
  const int head = blockIdx.y;
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  const int num_reqs = args.requests.num_reqs;
  const int num_tiles = args.plan.row_tiles[num_reqs];
  const int lane = threadIdx.x % kWarp;
  const int row = threadIdx.x / kWarp * 16 + lane / 4;  // and row + 8
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int request = request_of_tile(args.plan.row_tiles, num_reqs, tile);
    const RequestRows rows(args, request, group);
    const int first_vector = (tile - args.plan.row_tiles[request]) * kTile;
    load_vectors(args, rows, head, first_vector, shared.query, shared.vectors);
    __syncthreads();
    const int last = min(kTile, rows.num_vectors - first_vector) - 1;
    const int num_keys = shared.vectors[last].visible;
    OnlineSum sums[2];
    for (int start = 0; start < num_keys; start += kTile) {
      load_keys(args, request, head, start, num_keys, shared.key, shared.positions);
      __syncthreads();
      float products[kColumnBlocks][4];
      multiply_tile(shared.query, shared.key, products);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const QueryVector& vector = shared.vectors[row + 8 * half];
        add_products(args, vector, products, half, start, shared.positions, &sums[half]);
      }
      __syncthreads();  // before the next keys come
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OnlineSum sum = sums[half];
      for (int distance = 1; distance < 4; distance *= 2) {
        OnlineSum other;
        other.maximum = __shfl_xor_sync(0xFFFFFFFFu, sum.maximum, distance);
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, sum.sum, distance);
        sum.merge(other);
      }
      const QueryVector& vector = shared.vectors[row + 8 * half];
      if (vector.visible == 0 || lane % 4 != 0) continue;
      // A sink is one more key, without noise.
      OnlineSum sink;
      sink.maximum = vector.sink * vector.inverse_tau;
      sink.sum = vector.sink == -INFINITY ? 0.0f : 1.0f;
      sum.merge(sink);
      const int64_t index = vector_index(args, rows, head, first_vector + row + 8 * half);
      args.plan.row_maxima[index] = OnlineSum::base(sum.maximum);
      args.plan.row_sums[index] = sum.sum;
    }
    __syncthreads();  // before the next vectors come
  }
}

// The first scored row of a request that sees key `start`.
__device__ inline int first_row_seeing(const ScoreKeysArgs& args, const RequestRows& rows,
                                       int num_rows, int start) {
  int first = 0;
  int last = num_rows - 1;
  while (first < last) {
    const int middle = (first + last) / 2;
    const int token = args.plan.tokens[rows.first_scored + middle];
    if (visible_keys(args, rows.request, token) > start) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

template <typename T, int kHeadSize>
__device__ inline void store_weights(const ScoreKeysArgs& args,
                                     SumColumnsShared<T, kHeadSize>& shared, int key_start,
                                     const float (&products)[kColumnBlocks][4]) {
  const int lane = threadIdx.x % kWarp;
  const int column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / kWarp * 16 + lane / 4 + 8 * half;
    const QueryVector& vector = shared.vectors[row];
    const float maximum = shared.maxima[row];
    const float sum = shared.sums[row];
    const float inverse = fast_reciprocal(sum);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = 8 * n + column + i;
        const int position = shared.positions.noise[key];
        const float logit =
            scaled_logit(args, vector, products[n][2 * half + i], shared.positions, key);
        const float share = divide(weight(vector, logit, maximum, position), sum, inverse);
        pair[i] = key_start + key < vector.visible ? share : 0.0f;
      }
      *reinterpret_cast<float2*>(&shared.weights[row][8 * n + column]) = float2{pair[0], pair[1]};
    }
  }
}

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kScoreThreads)
    sum_columns_kernel(const __grid_constant__ ScoreKeysArgs args) {
  auto& shared = *reinterpret_cast<SumColumnsShared<T, kHeadSize>*>(shared_memory());
  const int head = blockIdx.y;
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  const int num_reqs = args.requests.num_reqs;
  const int num_tiles = args.plan.key_tiles[num_reqs];
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int request = request_of_tile(args.plan.key_tiles, num_reqs, tile);
    const RequestRows rows(args, request, group);
    const int num_rows = rows.num_vectors / group;
    const int last_token = args.plan.tokens[rows.first_scored + num_rows - 1];
    const int num_keys = visible_keys(args, request, last_token);
    const int start = (tile - args.plan.key_tiles[request]) * kTile;
    load_keys(args, request, head, start, num_keys, shared.key, shared.positions);
    // One thread per key from here to the end of the rows, so that they add in order.
    const int slot = start + threadIdx.x;
    const bool owns_key = threadIdx.x < kTile && slot < num_keys;
    float* score = nullptr;
    float total = 0.0f;
    float share = 0.0f;
    if (owns_key) {
      const int64_t block = args.requests.blocks(request)[slot >> args.cache.block_bits];
      score = args.score.at(0, block, head) + (slot & ((1 << args.cache.block_bits) - 1));
      total = *score;
    }
    int first_vector = first_row_seeing(args, rows, num_rows, start) * group;
    for (; first_vector < rows.num_vectors; first_vector += kTile) {
      load_vectors(args, rows, head, first_vector, shared.query, shared.vectors);
      if (threadIdx.x < kTile && first_vector + static_cast<int>(threadIdx.x) < rows.num_vectors) {
        const int64_t index = vector_index(args, rows, head, first_vector + threadIdx.x);
        shared.maxima[threadIdx.x] = args.plan.row_maxima[index];
        shared.sums[threadIdx.x] = args.plan.row_sums[index];
      }
      __syncthreads();
      float products[kColumnBlocks][4];
      multiply_tile(shared.query, shared.key, products);
      store_weights(args, shared, start, products);
      __syncthreads();
      if (!owns_key) continue;
      const int count = min(kTile, rows.num_vectors - first_vector);
      // A row's heads first, then the row: its heads may lie in two tiles.
      int query_head = first_vector % group;
      for (int i = 0; i < count; ++i) {
        const float own = shared.weights[i][threadIdx.x];
        share = query_head == 0 ? own : share + own;
        if (++query_head < group) continue;
        total += share;
        query_head = 0;
      }
    }
    if (owns_key) *score = total;
    __syncthreads();  // before the next keys come
  }
}

}  // namespace keyformer::cuda
