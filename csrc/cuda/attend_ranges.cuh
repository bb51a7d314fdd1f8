// SPDX-License-Identifier: Apache-2.0
// First kernel of paged_attention_scored: attends the keys of a row range by range.
//
// A range of 256 keys leaves its output and the states of both softmaxes, and its noisy logits;
// finish_rows.cuh makes output and scores of them. Ranges are cut by slot alone and always summed
// in the same order, so how they are shared among thread blocks changes no bit, and neither do the
// neighbours of a row.
//
// Four warps take turns at the range's chunks of 16 keys, each with a ring of its own in shared
// memory, so that they wait for each other once in a range. A warp multiplies keys by up to 8 query
// heads of one KV head on the tensor cores: keys as columns of the first product leave the
// weights in the lanes that the second one wants them in. K and V of a chunk are read while the
// chunk before is multiplied: at head size 128 that is 8 KiB per warp, 12 warps to a
// multiprocessor, 96 KiB in flight; about 35 KiB hide a latency of 1 us at 4.5 TB/s.
#pragma once

#include "block_scan.cuh"
#include "noise.cuh"
#include "row_softmax.cuh"

namespace keyformer::cuda {

constexpr int kAttendWarps = 4;
constexpr int kAttendThreads = kAttendWarps * kWarp;
constexpr int kChunkKeys = 16;
constexpr int kRangeKeys = 256;
constexpr int kRangeChunks = kRangeKeys / kChunkKeys / kAttendWarps;  // of one warp
constexpr int kPassHeads = 8;  // query heads at a time; the next ones read K and V again
constexpr int kStages = 2;

// Keys and values of 16 tokens. Rows are padded by 16 bytes: then the 8 rows of a matrix load fall
// into different banks for every head size here.
template <typename T, int kHeadSize>
struct alignas(16) Chunk {
  static constexpr int kStride = 2 * kHeadSize + 8;
  T rows[kChunkKeys][kStride];
  int positions[kChunkKeys];
  int places[kChunkKeys];
};

// The output of a warp for its share of a range.
template <int kHeadSize>
struct PartialOutput {
  // Padded, so that the 4 heads that a warp writes at a time lie in different banks.
  static constexpr int kStride = kHeadSize + 4;
  float heads[kPassHeads][kStride];
};

// At the end of a range a warp leaves its output where the last chunk lay.
template <typename T, int kHeadSize>
union Stage {
  static_assert(sizeof(PartialOutput<kHeadSize>) <= sizeof(Chunk<T, kHeadSize>), "needs no more");

  Chunk<T, kHeadSize> chunk;
  PartialOutput<kHeadSize> partial;
};

template <typename T, int kHeadSize>
struct AttendShared {
  Stage<T, kHeadSize> stages[kAttendWarps][kStages];
  RangeState states[kAttendWarps][kPassHeads];
};

// What a thread block attends: up to 8 query heads of one row and KV head.
struct AttendTask {
  int row;  // in scratch
  int token;
  int request;
  int head;
  int first_query_head;
  int num_heads;
  int num_keys;
  int first_range;
  int end_range;

  __device__ explicit AttendTask(const PagedAttentionScoredArgs& args) {
    const ScoreKeysArgs& inputs = args.inputs;
    const int num_kv_heads = inputs.cache.num_kv_heads;
    const int group = inputs.num_query_heads / num_kv_heads;
    const int num_passes = (group + kPassHeads - 1) / kPassHeads;
    const int pass = blockIdx.x % num_passes;
    head = blockIdx.x / num_passes % num_kv_heads;
    row = blockIdx.x / num_passes / num_kv_heads;
    token = args.first_token + row;
    first_query_head = head * group + pass * kPassHeads;
    num_heads = min(kPassHeads, group - pass * kPassHeads);
    first_range = end_range = 0;
    const int num_reqs = inputs.requests.num_reqs;
    if (token >= inputs.query_start_loc[num_reqs]) return;  // a row of nobody
    request = request_of_tile(inputs.query_start_loc, num_reqs, token);
    num_keys = visible_keys(inputs, request, token);
    if (num_keys > args.scratch.max_keys) {
      if (threadIdx.x == 0) fail("kv_lens: more than block_table holds", request, num_keys);
      return;
    }
    const int num_ranges = (num_keys + kRangeKeys - 1) / kRangeKeys;
    const int split = blockIdx.y;
    first_range = static_cast<int>(static_cast<int64_t>(num_ranges) * split / args.num_splits);
    end_range = static_cast<int>(static_cast<int64_t>(num_ranges) * (split + 1) / args.num_splits);
  }

  // Index of a query head of the task in scratch, in front of keys or ranges.
  __device__ int64_t scratch_row(const PagedAttentionScoredArgs& args, int query_head) const {
    return static_cast<int64_t>(row) * args.inputs.num_query_heads + first_query_head + query_head;
  }
};

// The row as a lane sees it: lane 4 * g + t looks at query head g.
struct AttendRow {
  float inverse_tau;  // 0: not scored
  float slope;
  int bias_position;
  bool is_noisy;
  RowKey row_key;

  __device__ AttendRow(const ScoreKeysArgs& args, const AttendTask& task, int query_head) {
    const float tau = args.tau[task.token];
    const int64_t noise_key = args.noise_keys[task.request];
    const int index = task.first_query_head + min(query_head, task.num_heads - 1);
    inverse_tau = tau > 0.0f ? __fdiv_rn(1.0f, tau) : 0.0f;
    slope = args.alibi_slopes != nullptr ? args.alibi_slopes[index] : 0.0f;
    bias_position = query_bias_position(args, task.request, task.token);
    is_noisy = noise_key != 0;
    row_key = make_row_key(noise_key, args.layer_index, args.first_query_head + index,
                           args.query_positions[task.token]);
  }

  __device__ bool is_scored() const { return inverse_tau != 0.0f; }
};

// Starts to copy keys [start, start + 16) of the task; values of keys that the row does not see
// become zeros, because even a weight of 0 would let a NaN through.
template <typename T, int kHeadSize>
__device__ inline void load_chunk(const ScoreKeysArgs& args, const AttendTask& task, int start,
                                  Chunk<T, kHeadSize>& chunk) {
  constexpr int kAccesses = 2 * kHeadSize * sizeof(T) / 16;
  const int lane = threadIdx.x % kWarp;
  const RowCache& cache = args.cache;
  const int64_t block = args.requests.blocks(task.request)[start >> cache.block_bits];
  const int first = start & ((1 << cache.block_bits) - 1);  // a block holds whole chunks
  const char* rows = cache.row(0, block, task.head, first);
  const int64_t row_bytes = cache.token_stride * cache.element_size;
#pragma unroll
  for (int i = 0; i < kChunkKeys * kAccesses / kWarp; ++i) {
    const int access = i * kWarp + lane;
    const int key = access / kAccesses;
    const int part = access % kAccesses;
    copy_async_16(reinterpret_cast<char*>(chunk.rows[key]) + 16 * part,
                  rows + key * row_bytes + 16 * part, start + key < task.num_keys);
  }
  if (lane < kChunkKeys) {
    copy_async_4(&chunk.positions[lane], args.position.at(0, block, task.head) + first + lane);
  } else if (args.place.data != nullptr) {
    const int key = lane - kChunkKeys;
    copy_async_4(&chunk.places[key], args.place.at(0, block, task.head) + first + key);
  }
}

// The query heads of a task as the left side of a product: two words for each 16 dimensions.
template <typename T, int kHeadSize>
struct QueryFragments {
  uint32_t pairs[kHeadSize / 16][2];

  __device__ QueryFragments(const ScoreKeysArgs& args, const AttendTask& task) {
    const int lane = threadIdx.x % kWarp;
    const int64_t query_head = task.first_query_head + lane / 4;
    const T* row = reinterpret_cast<const T*>(args.query) + task.token * args.query_token_stride +
                   query_head * args.query_head_stride;
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pairs[k][i] = 0;
        if (lane / 4 < task.num_heads) {
          memcpy(&pairs[k][i], row + 16 * k + 8 * i + lane % 4 * 2, sizeof(uint32_t));
        }
      }
    }
  }
};

// A warp's share of a range. The output lies turned over: lane 4 * g + t holds dimensions g and
// g + 8 of every 16, of query heads 2 * t and 2 * t + 1.
template <typename T, int kHeadSize>
struct WarpAttention {
  OnlineSum plain;  // the maximum is that of the 4 lanes of a query head, the sum a lane's own
  OnlineSum noisy;  // a lane's own
  float output[kHeadSize / 16][4];

  __device__ void clear() {
    plain = noisy = OnlineSum();
#pragma unroll
    for (int d = 0; d < kHeadSize / 16; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[d][i] = 0.0f;
    }
  }

  // `logits` of the lane's query head, from the first key of the chunk on.
  __device__ void add(const ScoreKeysArgs& args, const AttendTask& task, const AttendRow& row,
                      const QueryFragments<T, kHeadSize>& query, const Chunk<T, kHeadSize>& chunk,
                      int start, float* logits) {
    const int lane = threadIdx.x % kWarp;
    // The row of each matrix load that this lane names.
    const T* address = chunk.rows[lane / 16 * 8 + lane % 8] + lane / 8 % 2 * 8;
    float products[2][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      uint32_t keys[4];
      load_matrices(keys, address + 16 * k);
      const uint32_t left[4] = {query.pairs[k][0], 0, query.pairs[k][1], 0};
      multiply_accumulate<T>(products[0], left, {keys[0], keys[1]});
      multiply_accumulate<T>(products[1], left, {keys[2], keys[3]});
    }
    float x[2][2];
    float maximum = plain.maximum;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = 8 * n + lane % 4 * 2 + i;
        float logit = capped_logit(args, products[n][i]);
        if (args.alibi_slopes != nullptr) {
          const int* positions = args.place.data != nullptr ? chunk.places : chunk.positions;
          logit += bias(row.slope, positions[key], row.bias_position);
        }
        x[n][i] = start + key < task.num_keys ? logit : -INFINITY;
        maximum = fmaxf(maximum, x[n][i]);
      }
    }
    if (row.is_scored()) add_noisy(task, row, chunk, x, logits);
    for (int distance = 1; distance < 4; distance *= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, distance));
    }
    const float base = OnlineSum::base(maximum);
    const float factor = fast_exp2((plain.maximum - base) * kLog2E);
    plain.maximum = maximum;
    plain.sum *= factor;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[n][i] = fast_exp2((x[n][i] - base) * kLog2E);
        plain.sum += x[n][i];
      }
    }
    const uint32_t weights[2] = {pack<T>(x[0][0], x[0][1]), pack<T>(x[1][0], x[1][1])};
    const float factors[2] = {__shfl_sync(0xFFFFFFFFu, factor, lane % 4 * 8),
                              __shfl_sync(0xFFFFFFFFu, factor, lane % 4 * 8 + 4)};
#pragma unroll
    for (int d = 0; d < kHeadSize / 16; ++d) {
      uint32_t values[4];
      load_matrices_transposed(values, address + kHeadSize + 16 * d);
#pragma unroll
      for (int i = 0; i < 4; ++i) output[d][i] *= factors[i % 2];
      multiply_accumulate<T>(output[d], values, weights);
    }
  }

  // Leaves state and output for the other warps.
  __device__ void store(RangeState* states, PartialOutput<kHeadSize>& partial) {
    const int lane = threadIdx.x % kWarp;
    for (int distance = 1; distance < 4; distance *= 2) {
      plain.sum += __shfl_xor_sync(0xFFFFFFFFu, plain.sum, distance);
      OnlineSum other;
      other.maximum = __shfl_xor_sync(0xFFFFFFFFu, noisy.maximum, distance);
      other.sum = __shfl_xor_sync(0xFFFFFFFFu, noisy.sum, distance);
      noisy.merge(other);
    }
    if (lane % 4 == 0) states[lane / 4] = {plain.maximum, plain.sum, noisy.maximum, noisy.sum};
#pragma unroll
    for (int d = 0; d < kHeadSize / 16; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial.heads[lane % 4 * 2 + i % 2][16 * d + i / 2 * 8 + lane / 4] = output[d][i];
      }
    }
  }

 private:
  __device__ void add_noisy(const AttendTask& task, const AttendRow& row,
                            const Chunk<T, kHeadSize>& chunk, const float (&x)[2][2],
                            float* logits) {
    const int lane = threadIdx.x % kWarp;
    if (lane / 4 >= task.num_heads) return;
    float noisy_x[2][2];
    float maximum = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = 8 * n + lane % 4 * 2 + i;
        const float g = row.is_noisy ? draw_gumbel_fast(row.row_key, chunk.positions[key]) : 0.0f;
        noisy_x[n][i] = (x[n][i] + g) * row.inverse_tau;
        maximum = fmaxf(maximum, noisy_x[n][i]);
      }
      *reinterpret_cast<float2*>(logits + 8 * n + lane % 4 * 2) =
          float2{noisy_x[n][0], noisy_x[n][1]};
    }
    noisy.raise(maximum);
    const float base = OnlineSum::base(noisy.maximum);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) noisy.sum += fast_exp2((noisy_x[n][i] - base) * kLog2E);
    }
  }
};

// Adds up what the warps have left of a range, warp after warp.
template <typename T, int kHeadSize>
__device__ inline void store_range(const PagedAttentionScoredArgs& args, const AttendTask& task,
                                   AttendShared<T, kHeadSize>& shared, int stage, int range) {
  const AttentionScratch& scratch = args.scratch;
  const int query_head = threadIdx.x;
  if (query_head < task.num_heads) {
    OnlineSum plain;
    OnlineSum noisy;
    for (int warp = 0; warp < kAttendWarps; ++warp) {
      const RangeState& state = shared.states[warp][query_head];
      plain.merge({state.maximum, state.sum});
      noisy.merge({state.noisy_maximum, state.noisy_sum});
    }
    scratch.states[task.scratch_row(args, query_head) * scratch.max_ranges + range] = {
        plain.maximum, plain.sum, noisy.maximum, noisy.sum};
  }
  for (int i = threadIdx.x; i < task.num_heads * kHeadSize; i += kAttendThreads) {
    const int own_head = i / kHeadSize;
    const int d = i % kHeadSize;
    float maximum = -INFINITY;
    for (int warp = 0; warp < kAttendWarps; ++warp) {
      maximum = fmaxf(maximum, shared.states[warp][own_head].maximum);
    }
    const float base = OnlineSum::base(maximum);
    float sum = 0.0f;
    for (int warp = 0; warp < kAttendWarps; ++warp) {
      const auto& partial = shared.stages[warp][stage].partial;
      sum += partial.heads[own_head][d] *
             fast_exp2((shared.states[warp][own_head].maximum - base) * kLog2E);
    }
    const int64_t at = task.scratch_row(args, own_head) * scratch.max_ranges + range;
    scratch.outputs[at * kHeadSize + d] = sum;
  }
}

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kAttendThreads)
    attend_ranges_kernel(const __grid_constant__ PagedAttentionScoredArgs args) {
  auto& shared = *reinterpret_cast<AttendShared<T, kHeadSize>*>(shared_memory());
  const ScoreKeysArgs& inputs = args.inputs;
  const AttendTask task(args);
  if (task.first_range == task.end_range) return;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const AttendRow row(inputs, task, lane / 4);
  const QueryFragments<T, kHeadSize> query(inputs, task);
  float* logits = args.scratch.logits +
                  task.scratch_row(args, min(lane / 4, task.num_heads - 1)) * args.scratch.max_keys;
  const int num_chunks = (task.end_range - task.first_range) * kRangeChunks;
  const auto start_of = [&](int i) {
    return task.first_range * kRangeKeys + (i * kAttendWarps + warp) * kChunkKeys;
  };
  const auto load = [&](int i) {
    if (i < num_chunks && start_of(i) < task.num_keys) {
      load_chunk(inputs, task, start_of(i), shared.stages[warp][i % kStages].chunk);
    }
    close_copies();
  };
  load(0);
  WarpAttention<T, kHeadSize> attention;
  attention.clear();
  for (int i = 0; i < num_chunks; ++i) {
    Stage<T, kHeadSize>& stage = shared.stages[warp][i % kStages];
    // Ends also the reading of the chunk that the next one takes the place of.
    wait_for_copies<0>();
    __syncwarp();
    load(i + 1);
    if (start_of(i) < task.num_keys) {
      attention.add(inputs, task, row, query, stage.chunk, start_of(i), logits + start_of(i));
    }
    if (i % kRangeChunks != kRangeChunks - 1) continue;
    __syncwarp();  // before the chunk is overwritten
    attention.store(shared.states[warp], stage.partial);
    __syncthreads();
    store_range(args, task, shared, i % kStages, task.first_range + i / kRangeChunks);
    attention.clear();
    __syncthreads();  // before states and chunks are overwritten
  }
}

}  // namespace keyformer::cuda
