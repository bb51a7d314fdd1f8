// SPDX-License-Identifier: Apache-2.0
// Launches of weigh_tiles for one dtype; one file compiles one dtype, side by side.
#pragma once

#include "weigh_tiles.cuh"

namespace keyformer::cuda {

template <typename T, int kHeadSize>
void launch_weights(const ScoreGroupArgs& args, void* stream) {
  const int64_t num_ranges = (args.scratch.max_key_tiles + kScoreRangeTiles - 1) / kScoreRangeTiles;
  const dim3 grid{static_cast<unsigned>(args.scratch.num_row_tiles * num_ranges),
                  static_cast<unsigned>(args.inputs.cache.num_kv_heads), 1};
  launch(weigh_tiles_kernel<T, kHeadSize>, grid, kScoreThreads,
         static_cast<int>(sizeof(WeighShared<T, kHeadSize>)), stream, args);
}

template <typename T>
void launch_weights_of(const ScoreGroupArgs& args, void* stream) {
  const int head_size = args.inputs.cache.head_size;
  switch (head_size) {
    case 64:
      return launch_weights<T, 64>(args, stream);
    case 80:
      return launch_weights<T, 80>(args, stream);
    case 96:
      return launch_weights<T, 96>(args, stream);
    case 128:
      return launch_weights<T, 128>(args, stream);
    case 256:
      return launch_weights<T, 256>(args, stream);
    default:
      throw std::invalid_argument("kv_cache: head size " + std::to_string(head_size));
  }
}

void launch_weights_bf16(const ScoreGroupArgs& args, void* stream);
void launch_weights_fp16(const ScoreGroupArgs& args, void* stream);

}  // namespace keyformer::cuda
