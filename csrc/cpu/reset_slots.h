// SPDX-License-Identifier: Apache-2.0
// reset_slots: a slot that receives a token starts with score 0 and the token's position, in all
// layers. The engine does not clear recycled blocks, so without this stale scores would live on.
#pragma once

#include <algorithm>

#include "checks.h"
#include "paged_cache.h"
#include "task_pool.h"

namespace keyformer {

struct ResetSlotsArgs {
  SideView<float> score;
  SideView<int32_t> position;
  int64_t num_layers;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;
  const int64_t* slot_mapping;  // [num_tokens], negative: padding
  const int64_t* positions;     // [num_tokens] logical
  int64_t num_tokens;
};

inline void reset_slots(const ResetSlotsArgs& args, const ThreadPool& pool) {
  constexpr int64_t kRowsPerTask = 1024;  // one row: one token in one layer
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    if (args.slot_mapping[token] < num_slots) continue;
    throw std::invalid_argument("slot_mapping: slot outside the cache (token " +
                                std::to_string(token) + ", value " +
                                std::to_string(args.slot_mapping[token]) + ")");
  }
  const int64_t num_rows = args.num_layers * args.num_tokens;
  const int64_t num_tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  run_tasks(pool, num_tasks, [&] {
    return [&args, num_rows](int64_t task) {
      const int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
      for (int64_t row = task * kRowsPerTask; row < end; ++row) {
        const int64_t layer = row / args.num_tokens;
        const int64_t token = row % args.num_tokens;
        const int64_t slot = args.slot_mapping[token];
        if (slot < 0) continue;
        const int64_t block = slot / args.block_size;
        const int64_t offset = slot % args.block_size;
        for (int64_t head = 0; head < args.num_kv_heads; ++head) {
          args.score.at(layer, block, head)[offset] = 0.0f;
          args.position.at(layer, block, head)[offset] =
              static_cast<int32_t>(args.positions[token]);
        }
      }
    };
  });
}

}  // namespace keyformer
