// SPDX-License-Identifier: Apache-2.0
#include "score_keys_launch.cuh"

namespace keyformer::cuda {

void launch_weights_fp16(const ScoreGroupArgs& args, void* stream) {
  launch_weights_of<Float16>(args, stream);
}

}  // namespace keyformer::cuda
