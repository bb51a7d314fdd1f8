// SPDX-License-Identifier: Apache-2.0
// A tile of score_keys: 64 query vectors times 64 keys, on the tensor cores. A query vector is a
// row of one query head; vectors count row by row, and inside a row head by head.
//
// Four warps, 16 vectors each. Tiles lie in shared memory with rows padded by 16 bytes: then the 32
// lanes of a fragment load, 8 rows times 4 words, fall into 32 different banks for every head size
// here.
#pragma once

#include "block_scan.cuh"
#include "noise.cuh"
#include "row_softmax.cuh"
#include "score_plan.cuh"

namespace keyformer::cuda {

constexpr int kScoreThreads = 128;
constexpr int kColumnBlocks = kTile / 8;

// How the noise of a row enters. At tau = 1, exp(x + g) is exp(x) / E: one logarithm instead of
// two. The choice is the row's own, whatever rows share its tile.
enum class NoiseKind : int32_t { kNone = 0, kInLogit = 1, kInWeight = 2 };

// What a query vector needs besides its elements.
struct QueryVector {
  int visible;  // keys; 0: not a vector
  int bias_position;
  float inverse_tau;
  float slope;
  float sink;  // -inf: none
  NoiseKind noise;
  RowKey row_key;
};

template <typename T, int kHeadSize>
struct alignas(16) TileRows {
  static constexpr int kStride = kHeadSize + 8;
  T rows[kTile][kStride];

  __device__ uint32_t pair(int row, int column) const {
    uint32_t both;
    memcpy(&both, &rows[row][column], sizeof(both));
    return both;
  }
};

// The scored rows of one request.
struct RequestRows {
  int request;
  int first_scored;  // into the plan's tokens
  int num_vectors;

  __device__ RequestRows(const ScoreKeysArgs& args, int index, int group) : request(index) {
    first_scored = args.plan.ranks[args.query_start_loc[index]];
    num_vectors = (args.plan.ranks[args.query_start_loc[index + 1]] - first_scored) * group;
  }
};

template <typename T, int kHeadSize, typename Address>
__device__ inline void load_rows(TileRows<T, kHeadSize>& tile, const Address& address) {
  constexpr int kAccesses = kHeadSize * sizeof(T) / sizeof(uint4);
  for (int i = threadIdx.x; i < kTile * kAccesses; i += kScoreThreads) {
    const int row = i / kAccesses;
    const uint4* source = reinterpret_cast<const uint4*>(address(row));
    const uint4 zero{0, 0, 0, 0};
    reinterpret_cast<uint4*>(tile.rows[row])[i % kAccesses] =
        source == nullptr ? zero : source[i % kAccesses];
  }
}

template <typename T, int kHeadSize>
__device__ inline void load_vectors(const ScoreKeysArgs& args, const RequestRows& rows, int head,
                                    int first_vector, TileRows<T, kHeadSize>& tile,
                                    QueryVector* vectors) {
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  load_rows(tile, [&](int i) -> const T* {
    const int vector = first_vector + i;
    if (vector >= rows.num_vectors) return nullptr;
    const int64_t token = args.plan.tokens[rows.first_scored + vector / group];
    const int64_t query_head = head * group + vector % group;
    return reinterpret_cast<const T*>(args.query) + token * args.query_token_stride +
           query_head * args.query_head_stride;
  });
  if (threadIdx.x >= kTile) return;
  const int vector = first_vector + threadIdx.x;
  QueryVector& own = vectors[threadIdx.x];
  own = {0, 0, 0.0f, 0.0f, -INFINITY, NoiseKind::kNone, {0, 0}};
  if (vector >= rows.num_vectors) return;
  const int token = args.plan.tokens[rows.first_scored + vector / group];
  const int query_head = head * group + vector % group;
  const float tau = args.tau[token];
  const int64_t noise_key = args.noise_keys[rows.request];
  own.visible = visible_keys(args, rows.request, token);
  own.bias_position = query_bias_position(args, rows.request, token);
  own.inverse_tau = __fdiv_rn(1.0f, tau);
  if (args.alibi_slopes != nullptr) own.slope = args.alibi_slopes[query_head];
  if (args.sinks != nullptr) own.sink = args.sinks[query_head];
  if (noise_key != 0) {
    own.noise = tau == 1.0f ? NoiseKind::kInWeight : NoiseKind::kInLogit;
    own.row_key = make_row_key(noise_key, args.layer_index, args.first_query_head + query_head,
                               args.query_positions[token]);
  }
}

// What noise and bias of a tile of keys are functions of.
struct KeyPositions {
  int noise[kTile];
  int bias[kTile];
};

// Keys [start, start + kTile) of a request; those from `end` on are zeros.
template <typename T, int kHeadSize>
__device__ inline void load_keys(const ScoreKeysArgs& args, int request, int head, int start,
                                 int end, TileRows<T, kHeadSize>& tile, KeyPositions& positions) {
  const RowCache& cache = args.cache;
  const int32_t* blocks = args.requests.blocks(request);
  const int mask = (1 << cache.block_bits) - 1;
  load_rows(tile, [&](int i) -> const T* {
    const int slot = start + i;
    if (slot >= end) return nullptr;
    return reinterpret_cast<const T*>(
        cache.row(0, blocks[slot >> cache.block_bits], head, slot & mask));
  });
  const bool has_bias = args.alibi_slopes != nullptr;
  if (args.noise_keys[request] == 0 && !has_bias) return;
  const int slot = start + threadIdx.x;
  if (threadIdx.x >= kTile) return;
  const auto read = [&](const SideView<const int32_t>& side) {
    return slot < end ? side.at(0, blocks[slot >> cache.block_bits], head)[slot & mask] : 0;
  };
  const int position = read(args.position);
  positions.noise[threadIdx.x] = position;
  if (has_bias) {
    positions.bias[threadIdx.x] = args.place.data != nullptr ? read(args.place) : position;
  }
}

// Products of a warp's 16 vectors with all keys of a tile. Lane 4 * g + t holds vectors g and
// g + 8: products[n][2 * half + i] is that of vector g + 8 * half and key 8 * n + 2 * t + i.
template <typename T, int kHeadSize>
__device__ inline void multiply_tile(const TileRows<T, kHeadSize>& query,
                                     const TileRows<T, kHeadSize>& key,
                                     float (&products)[kColumnBlocks][4]) {
  const int lane = threadIdx.x % kWarp;
  const int first = threadIdx.x / kWarp * 16;
  const int g = lane / 4;
  const int t = lane % 4;
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) products[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeadSize; k += 16) {
    const int column = k + 2 * t;
    const uint32_t a[4] = {query.pair(first + g, column), query.pair(first + g + 8, column),
                           query.pair(first + g, column + 8),
                           query.pair(first + g + 8, column + 8)};
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      const uint32_t b[2] = {key.pair(8 * n + g, column), key.pair(8 * n + g, column + 8)};
      multiply_accumulate<T>(products[n], a, b);
    }
  }
}

// The exponent of a weight, all but the noise of a row that puts it into the weight.
__device__ inline float scaled_logit(const ScoreKeysArgs& args, const QueryVector& vector,
                                     float product, const KeyPositions& positions, int key) {
  float x = capped_logit(args, product);
  if (args.alibi_slopes != nullptr) {
    x += bias(vector.slope, positions.bias[key], vector.bias_position);
  }
  if (vector.noise == NoiseKind::kInLogit) x += draw_gumbel(vector.row_key, positions.noise[key]);
  return x * vector.inverse_tau;
}

// What a key weighs in its row, against a maximum of the row's logits.
__device__ inline float weight(const QueryVector& vector, float logit, float maximum,
                               int key_position) {
  float w = fast_exp2((logit - maximum) * kLog2E);
  if (vector.noise == NoiseKind::kInWeight) {
    const Fraction exponential = draw_exponential(vector.row_key, key_position);
    w *= exponential.denominator * fast_reciprocal(exponential.numerator);
  }
  return w;
}

}  // namespace keyformer::cuda
