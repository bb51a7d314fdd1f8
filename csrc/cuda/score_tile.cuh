// SPDX-License-Identifier: Apache-2.0
// A tile of score_keys: 64 query vectors times 64 keys, on the tensor cores. A query vector is a
// row of one query head; vectors count row by row, and inside a row head by head.
//
// Four warps, 16 vectors each. Tiles lie in shared memory with rows padded by 16 bytes: then the 8
// rows of a matrix load fall into different banks for every head size here.
#pragma once

#include "block_scan.cuh"
#include "noise.cuh"
#include "row_softmax.cuh"
#include "score_plan.cuh"

namespace keyformer::cuda {

constexpr int kScoreThreads = 128;
constexpr int kColumnBlocks = kTile / 8;

// Keys that a block of threads takes one tile after the other.
constexpr int kScoreRangeTiles = 8;
constexpr int kScoreRangeKeys = kScoreRangeTiles * kTile;

// What a query vector needs besides its elements.
struct QueryVector {
  const char* row;
  int visible;  // keys; 0: not a vector
  int bias_position;
  float inverse_tau;
  float slope;
  FoldedRowKey noise_key;
};

template <typename T, int kHeadSize>
struct alignas(16) TileRows {
  static constexpr int kStride = kHeadSize + 8;
  T rows[kTile][kStride];
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

// The rows of a tile of vectors that this group of tiles has in scratch.
struct RowTile {
  int slot;  // in scratch
  int request;
  int first_vector;  // of the request
  int num_keys;      // that its last row sees; 0: there is no such tile

  __device__ RowTile(const ScoreGroupArgs& args, int index) : slot(index), num_keys(0) {
    const ScoreKeysArgs& inputs = args.inputs;
    const int num_reqs = inputs.requests.num_reqs;
    const int tile = args.first_row_tile + slot;
    if (tile >= inputs.plan.row_tiles[num_reqs]) return;
    request = request_of_tile(inputs.plan.row_tiles, num_reqs, tile);
    const int group = inputs.num_query_heads / inputs.cache.num_kv_heads;
    const RequestRows rows(inputs, request, group);
    first_vector = (tile - inputs.plan.row_tiles[request]) * kTile;
    const int last_vector = min(first_vector + kTile, rows.num_vectors) - 1;
    const int last_token = inputs.plan.tokens[rows.first_scored + last_vector / group];
    num_keys = visible_keys(inputs, request, last_token);
  }
};

// Starts to copy the rows of a tile; row(i) is the address of row i.
template <typename T, int kHeadSize, typename Address>
__device__ inline void copy_tile(TileRows<T, kHeadSize>& tile, const Address& row) {
  constexpr int kAccesses = kHeadSize * sizeof(T) / 16;
  constexpr int kOwn = kTile * kAccesses / kScoreThreads;
  // All addresses first: shared memory is not read between copies to it.
  const char* from[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int access = i * kScoreThreads + threadIdx.x;
    from[i] = row(access / kAccesses) + access % kAccesses * 16;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int access = i * kScoreThreads + threadIdx.x;
    copy_async_16(reinterpret_cast<char*>(tile.rows[access / kAccesses]) + access % kAccesses * 16,
                  from[i], true);
  }
}

// Fills in `vectors`, a thread each; the caller's barrier makes them whole.
__device__ inline void prepare_vectors(const ScoreKeysArgs& args, const RequestRows& rows, int head,
                                       int first_vector, int64_t element_size,
                                       QueryVector* vectors) {
  if (threadIdx.x >= kTile) return;
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  const int vector = first_vector + threadIdx.x;
  QueryVector& own = vectors[threadIdx.x];
  // What is not a vector has some row, and sees nothing.
  own = {args.query, 0, 0, 1.0f, 0.0f, {0, 0}};
  if (vector >= rows.num_vectors) return;
  const int64_t token = args.plan.tokens[rows.first_scored + vector / group];
  const int64_t query_head = head * group + vector % group;
  own.row += (token * args.query_token_stride + query_head * args.query_head_stride) * element_size;
  own.visible = visible_keys(args, rows.request, token);
  own.bias_position = query_bias_position(args, rows.request, token);
  own.inverse_tau = __fdiv_rn(1.0f, args.tau[token]);
  if (args.alibi_slopes != nullptr) own.slope = args.alibi_slopes[query_head];
  own.noise_key =
      fold(make_row_key(args.noise_keys[rows.request], args.layer_index,
                        args.first_query_head + query_head, args.query_positions[token]));
}

// Where the keys of a range lie, and what noise and bias are functions of.
struct RangeKeys {
  const char* rows[kScoreRangeKeys];
  int noise_positions[kScoreRangeKeys];
  int bias_positions[kScoreRangeKeys];
};

// Keys [start, start + kScoreRangeKeys) of a request. Those from `end` on, which no row sees, are
// the first one again.
__device__ inline void prepare_keys(const ScoreKeysArgs& args, int request, int head, int start,
                                    int end, RangeKeys& keys) {
  const RowCache& cache = args.cache;
  const int32_t* blocks = args.requests.blocks(request);
  const int mask = (1 << cache.block_bits) - 1;
  const bool has_bias = args.alibi_slopes != nullptr;
  const bool needs_position = args.noise_keys[request] != 0 || has_bias;
  for (int i = threadIdx.x; i < kScoreRangeKeys; i += kScoreThreads) {
    const int slot = start + i < end ? start + i : start;
    const int64_t block = blocks[slot >> cache.block_bits];
    keys.rows[i] = cache.row(0, block, head, slot & mask);
    if (!needs_position) continue;
    const int position = args.position.at(0, block, head)[slot & mask];
    keys.noise_positions[i] = position;
    if (!has_bias) continue;
    keys.bias_positions[i] =
        args.place.data != nullptr ? args.place.at(0, block, head)[slot & mask] : position;
  }
}

// Products of a warp's 16 vectors with all keys of a tile. Lane 4 * g + t holds vectors g and
// g + 8: products[n][2 * half + i] is that of vector g + 8 * half and key 8 * n + 2 * t + i.
template <typename T, int kHeadSize>
__device__ inline void multiply_tile(const TileRows<T, kHeadSize>& query,
                                     const TileRows<T, kHeadSize>& key,
                                     float (&products)[kColumnBlocks][4]) {
  const int lane = threadIdx.x % kWarp;
  // The row of each matrix load that this lane names.
  const T* left = query.rows[threadIdx.x / kWarp * 16 + lane % 16] + lane / 16 * 8;
  const T* right = key.rows[lane / 16 * 8 + lane % 8] + lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) products[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeadSize; k += 16) {
    uint32_t a[4];
    load_matrices(a, left + k);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; n += 2) {
      uint32_t b[4];
      load_matrices(b, right + 8 * n * TileRows<T, kHeadSize>::kStride + k);
      multiply_accumulate<T>(products[n], a, {b[0], b[1]});
      multiply_accumulate<T>(products[n + 1], a, {b[2], b[3]});
    }
  }
}

}  // namespace keyformer::cuda
