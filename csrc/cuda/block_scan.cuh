// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a block.
#pragma once

#include "device.cuh"

namespace keyformer::cuda {

constexpr int kWarp = 32;

// Sum of `value` over the threads before this one; `total` is the sum over all. Ends in a barrier.
template <int kThreads>
__device__ inline int scan_exclusive(int value, int* total) {
  static_assert(kThreads % kWarp == 0, "a block is whole warps");
  __shared__ int warp_sums[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  int sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == kWarp - 1) warp_sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  int before = 0;
  int all = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    if (warp == static_cast<int>(threadIdx.x) / kWarp) before = all;
    all += warp_sums[warp];
  }
  *total = all;
  __syncthreads();
  return before + sum - value;
}

}  // namespace keyformer::cuda
