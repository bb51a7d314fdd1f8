// SPDX-License-Identifier: Apache-2.0
// renumber_slots: the place of every token among those that its KV head holds, in the order of
// their positions. One block of threads per (layer, request, KV head).
//
// Positions are marked in a table of bits, a window of positions at a time; a token's place is the
// number of bits before its own.
#pragma once

#include "block_scan.cuh"
#include "launch.h"

namespace keyformer::cuda {

constexpr int kRenumberThreads = 256;
constexpr int kWordsPerThread = 8;
constexpr int kWindowWords = kRenumberThreads * kWordsPerThread;
constexpr int kWindowPositions = 32 * kWindowWords;

struct RenumberShared {
  uint32_t bits[kWindowWords];
  int before[kWindowWords];  // bits in the words before, and in the windows before
  int smallest;
  int largest;
  int num_repeated;
};

__global__ void __launch_bounds__(kRenumberThreads, 4)
    renumber_slots_kernel(const __grid_constant__ RenumberSlotsArgs args) {
  __shared__ RenumberShared shared;
  const int num_reqs = args.requests.num_reqs;
  const int head = blockIdx.x % args.num_kv_heads;
  const int request = blockIdx.x / args.num_kv_heads % num_reqs;
  const int layer = blockIdx.x / args.num_kv_heads / num_reqs;
  const int32_t* blocks = args.requests.blocks(request);
  const int kv_len = args.requests.kv_lens[request];
  const int mask = (1 << args.block_bits) - 1;
  // Calls visit(position, slot) for the slots of the request.
  const auto for_each_slot = [&](const auto& visit) {
    for (int slot = threadIdx.x; slot < kv_len; slot += kRenumberThreads) {
      visit(args.position.at(layer, blocks[slot >> args.block_bits], head)[slot & mask], slot);
    }
  };
  if (threadIdx.x == 0) shared.smallest = shared.largest = shared.num_repeated = 0;
  __syncthreads();
  int smallest = 0;
  int largest = 0;
  for_each_slot([&](int position, int) {
    smallest = min(smallest, position);
    largest = max(largest, position);
  });
  atomicMin(&shared.smallest, smallest);
  atomicMax(&shared.largest, largest);
  __syncthreads();
  bool is_refused = shared.smallest < 0;
  int num_before = 0;
  // By its number, because a position may be the largest integer.
  for (int window = 0; !is_refused && window <= shared.largest / kWindowPositions; ++window) {
    for (int word = threadIdx.x; word < kWindowWords; word += kRenumberThreads) {
      shared.bits[word] = 0;
    }
    __syncthreads();
    for_each_slot([&](int position, int) {
      if (position / kWindowPositions != window) return;
      const uint32_t bit = uint32_t{1} << position % 32;
      const uint32_t old = atomicOr(&shared.bits[position % kWindowPositions / 32], bit);
      if ((old & bit) != 0) atomicAdd(&shared.num_repeated, 1);
    });
    __syncthreads();
    const int first_word = threadIdx.x * kWordsPerThread;
    int own = 0;
    for (int i = 0; i < kWordsPerThread; ++i) own += __popc(shared.bits[first_word + i]);
    int total;
    int before = num_before + scan_exclusive<kRenumberThreads>(own, &total);
    for (int i = 0; i < kWordsPerThread; ++i) {
      shared.before[first_word + i] = before;
      before += __popc(shared.bits[first_word + i]);
    }
    num_before += total;
    is_refused = shared.num_repeated != 0;
    __syncthreads();
    if (is_refused) break;
    for_each_slot([&](int position, int slot) {
      if (position / kWindowPositions != window) return;
      const int word = position % kWindowPositions / 32;
      const uint32_t lower = (uint32_t{1} << position % 32) - 1;
      args.place.at(layer, blocks[slot >> args.block_bits], head)[slot & mask] =
          shared.before[word] + __popc(shared.bits[word] & lower);
    });
    __syncthreads();  // before the next window's bits come
  }
  if (is_refused && threadIdx.x == 0) {
    fail("position: negative or held twice by one KV head", request, kv_len);
  }
}

}  // namespace keyformer::cuda
