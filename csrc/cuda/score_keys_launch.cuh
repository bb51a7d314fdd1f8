// SPDX-License-Identifier: Apache-2.0
// Launches of the score kernels for one dtype; one file compiles one dtype, side by side.
#pragma once

#include "score_keys.cuh"

namespace keyformer::cuda {

// The kernels walk over their tiles, so more blocks than fit on the largest GPU gain nothing.
constexpr int64_t kMaxScoreBlocks = 4096;

template <typename T, int kHeadSize>
void launch_sums(const ScoreKeysArgs& args, int64_t num_row_tiles, int64_t num_key_tiles,
                 void* stream) {
  const auto heads = static_cast<unsigned>(args.cache.num_kv_heads);
  const auto grid = [heads](int64_t num_tiles) {
    return dim3{static_cast<unsigned>(num_tiles < kMaxScoreBlocks ? num_tiles : kMaxScoreBlocks),
                heads, 1};
  };
  launch(sum_rows_kernel<T, kHeadSize>, grid(num_row_tiles), kScoreThreads,
         static_cast<int>(sizeof(SumRowsShared<T, kHeadSize>)), stream, args);
  launch(sum_columns_kernel<T, kHeadSize>, grid(num_key_tiles), kScoreThreads,
         static_cast<int>(sizeof(SumColumnsShared<T, kHeadSize>)), stream, args);
}

template <typename T>
void launch_sums_of(const ScoreKeysArgs& args, int64_t num_row_tiles, int64_t num_key_tiles,
                    void* stream) {
  switch (args.cache.head_size) {
    case 64:
      return launch_sums<T, 64>(args, num_row_tiles, num_key_tiles, stream);
    case 80:
      return launch_sums<T, 80>(args, num_row_tiles, num_key_tiles, stream);
    case 96:
      return launch_sums<T, 96>(args, num_row_tiles, num_key_tiles, stream);
    case 128:
      return launch_sums<T, 128>(args, num_row_tiles, num_key_tiles, stream);
    case 256:
      return launch_sums<T, 256>(args, num_row_tiles, num_key_tiles, stream);
    default:
      throw std::invalid_argument("kv_cache: head size " + std::to_string(args.cache.head_size));
  }
}

void launch_sums_bf16(const ScoreKeysArgs& args, int64_t num_row_tiles, int64_t num_key_tiles,
                      void* stream);
void launch_sums_fp16(const ScoreKeysArgs& args, int64_t num_row_tiles, int64_t num_key_tiles,
                      void* stream);

}  // namespace keyformer::cuda
