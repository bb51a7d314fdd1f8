// SPDX-License-Identifier: Apache-2.0
// reset_slots: a slot that receives a token starts with score 0 and the token's position, in all
// layers.
#pragma once

#include "device.cuh"
#include "launch.h"

namespace keyformer::cuda {

constexpr int kResetThreads = 256;

// One thread per (token, layer, KV head), the head fastest.
__global__ void __launch_bounds__(kResetThreads)
    reset_slots_kernel(const __grid_constant__ ResetSlotsArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kResetThreads + threadIdx.x;
  const int64_t head = index % args.num_kv_heads;
  const int64_t layer = index / args.num_kv_heads % args.num_layers;
  const int64_t token = index / args.num_kv_heads / args.num_layers;
  if (token >= args.num_tokens) return;
  const int64_t slot = args.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot >> args.block_bits;
  const int64_t offset = slot - (block << args.block_bits);
  args.score.at(layer, block, head)[offset] = 0.0f;
  args.position.at(layer, block, head)[offset] = static_cast<int32_t>(args.positions[token]);
}

}  // namespace keyformer::cuda
