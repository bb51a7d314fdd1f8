// SPDX-License-Identifier: Apache-2.0
// How score_keys finds its work: tiles of 64 query vectors or keys, request by request. How many
// there are is known to the device only, so the kernels walk over tiles with a grid of a size that
// the host can name.
#pragma once

#include "device.cuh"
#include "launch.h"

namespace keyformer::cuda {

// Keys that the row of `token` sees.
__device__ inline int visible_keys(const ScoreKeysArgs& args, int request, int token) {
  return args.requests.kv_lens[request] - args.query_start_loc[request + 1] + token + 1;
}

// The request that a tile belongs to: the last one that begins at or before it.
__device__ inline int request_of_tile(const int32_t* tiles_before, int num_reqs, int tile) {
  int first = 0;
  int last = num_reqs - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (tiles_before[middle] <= tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

}  // namespace keyformer::cuda
