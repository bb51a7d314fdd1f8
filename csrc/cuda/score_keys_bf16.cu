// SPDX-License-Identifier: Apache-2.0
#include "score_keys_launch.cuh"

namespace keyformer::cuda {

void launch_sums_bf16(const ScoreKeysArgs& args, int64_t num_row_tiles, int64_t num_key_tiles,
                      void* stream) {
  launch_sums_of<BFloat16>(args, num_row_tiles, num_key_tiles, stream);
}

}  // namespace keyformer::cuda
