// SPDX-License-Identifier: Apache-2.0
// compact_kv: moves the survivors of the freed front into the holes behind it. All layers, requests
// and KV heads in one launch, one block of threads for each.
//
//   slots   [ freed front: num_evict )[ retained: kv_len - num_evict )
//   keep      . x . . x                 x x . x . x
//                 \    \________________________^
//                  \__________________^
//
// As many survivors sit in the front as there are holes behind it; they pair up by rank. Sources
// and targets are disjoint, so the order of the moves cannot matter. One warp moves one token, 16
// bytes a lane: K and V of head size 128 in 2-byte elements are one access of the whole warp.
#pragma once

#include "block_scan.cuh"
#include "launch.h"

namespace keyformer::cuda {

constexpr int kCompactThreads = 256;
constexpr int kPairs = kCompactThreads;  // moved at a time

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

// Finds slots by their flag, in ascending order, a batch at a time.
struct SlotFinder {
  const uint8_t* keep;
  bool wanted;
  int next;
  int end;

  // Writes the next slots, at most kPairs; returns how many. Ends in a barrier.
  __device__ int find(int* slots) {
    __shared__ int resume;
    int num_found = 0;
    while (num_found < kPairs && next < end) {
      const int slot = next + threadIdx.x;
      const bool matches = slot < end && (keep[slot] != 0) == wanted;
      int num_matches;
      const int rank = num_found + scan_exclusive<kCompactThreads>(matches, &num_matches);
      if (matches && rank < kPairs) slots[rank] = slot;
      // The batch is full in the middle of the stretch: go on behind its last slot.
      if (matches && rank == kPairs - 1) resume = slot + 1;
      __syncthreads();
      const bool is_full = num_found + num_matches >= kPairs;
      next = is_full ? resume : next + kCompactThreads;
      num_found = is_full ? kPairs : num_found + num_matches;
      __syncthreads();
    }
    return num_found;
  }
};

struct TokenPlace {
  int64_t block;
  int offset;
};

__device__ inline TokenPlace place_of(const int32_t* blocks, int slot, int block_bits) {
  return {blocks[slot >> block_bits], slot & ((1 << block_bits) - 1)};
}

__device__ inline void move_token(const CompactKvArgs& args, int layer, int head, TokenPlace source,
                                  TokenPlace target) {
  const RowCache& cache = args.cache;
  const int lane = threadIdx.x % kWarp;
  const int num_accesses = static_cast<int>(2 * cache.head_size * cache.element_size / 16);
  const Bytes16* from =
      reinterpret_cast<const Bytes16*>(cache.row(layer, source.block, head, source.offset));
  Bytes16* to = reinterpret_cast<Bytes16*>(cache.row(layer, target.block, head, target.offset));
  for (int i = lane; i < num_accesses; i += kWarp) to[i] = from[i];
  if (lane == 0) {
    args.score.at(layer, target.block, head)[target.offset] =
        args.score.at(layer, source.block, head)[source.offset];
  }
  if (lane == 1) {
    args.position.at(layer, target.block, head)[target.offset] =
        args.position.at(layer, source.block, head)[source.offset];
  }
}

__global__ void __launch_bounds__(kCompactThreads)
    compact_kv_kernel(const __grid_constant__ CompactKvArgs args) {
  __shared__ int sources[kPairs];
  __shared__ int targets[kPairs];
  const int num_reqs = args.requests.num_reqs;
  const int head = blockIdx.x % args.cache.num_kv_heads;
  const int request = blockIdx.x / args.cache.num_kv_heads % num_reqs;
  const int layer = blockIdx.x / args.cache.num_kv_heads / num_reqs;
  const int num_evict = args.num_evict[request];
  if (num_evict == 0) return;
  const int kv_len = args.requests.kv_lens[request];
  const uint8_t* keep = args.keep + static_cast<int64_t>(blockIdx.x) * args.max_kv_len;

  int own = 0;
  for (int slot = threadIdx.x; slot < kv_len; slot += kCompactThreads) own += keep[slot] != 0;
  int num_kept;
  scan_exclusive<kCompactThreads>(own, &num_kept);
  if (num_kept != kv_len - num_evict) {  // before anything has moved
    if (threadIdx.x == 0) {
      fail("keep: number of survivors is not kv_len - num_evict", request, num_evict);
    }
    return;
  }
  SlotFinder survivors{keep, true, 0, num_evict};
  SlotFinder holes{keep, false, num_evict, kv_len};
  const int32_t* blocks = args.requests.blocks(request);
  while (true) {
    const int num_pairs = survivors.find(sources);
    if (num_pairs == 0) return;
    holes.find(targets);
    for (int pair = threadIdx.x / kWarp; pair < num_pairs; pair += kCompactThreads / kWarp) {
      move_token(args, layer, head, place_of(blocks, sources[pair], args.cache.block_bits),
                 place_of(blocks, targets[pair], args.cache.block_bits));
    }
    __syncthreads();  // the next batch overwrites the lists
  }
}

}  // namespace keyformer::cuda
