// SPDX-License-Identifier: Apache-2.0
#include "score_keys_launch.cuh"

namespace keyformer::cuda {

void launch_weights_bf16(const ScoreGroupArgs& args, void* stream) {
  launch_weights_of<BFloat16>(args, stream);
}

}  // namespace keyformer::cuda
