// SPDX-License-Identifier: Apache-2.0
#include "attend_ranges_launch.cuh"

namespace keyformer::cuda {

void launch_ranges_bf16(const PagedAttentionScoredArgs& args, dim3 grid, void* stream) {
  launch_ranges_of<BFloat16>(args, grid, stream);
}

}  // namespace keyformer::cuda
