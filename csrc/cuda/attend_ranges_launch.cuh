// SPDX-License-Identifier: Apache-2.0
// Launches of the attention kernel for one dtype; one file compiles one dtype, side by side.
#pragma once

#include "attend_ranges.cuh"

namespace keyformer::cuda {

template <typename T, int kHeadSize>
void launch_ranges(const PagedAttentionScoredArgs& args, dim3 grid, void* stream) {
  launch(attend_ranges_kernel<T, kHeadSize>, grid, kAttendThreads,
         static_cast<int>(sizeof(AttendShared<T, kHeadSize>)), stream, args);
}

template <typename T>
void launch_ranges_of(const PagedAttentionScoredArgs& args, dim3 grid, void* stream) {
  switch (args.inputs.cache.head_size) {
    case 64:
      return launch_ranges<T, 64>(args, grid, stream);
    case 80:
      return launch_ranges<T, 80>(args, grid, stream);
    case 96:
      return launch_ranges<T, 96>(args, grid, stream);
    case 128:
      return launch_ranges<T, 128>(args, grid, stream);
    case 256:
      return launch_ranges<T, 256>(args, grid, stream);
    default:
      throw std::invalid_argument("kv_cache: head size " +
                                  std::to_string(args.inputs.cache.head_size));
  }
}

void launch_ranges_bf16(const PagedAttentionScoredArgs& args, dim3 grid, void* stream);
void launch_ranges_fp16(const PagedAttentionScoredArgs& args, dim3 grid, void* stream);

}  // namespace keyformer::cuda
