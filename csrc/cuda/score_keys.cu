// SPDX-License-Identifier: Apache-2.0
#include "plan_scores.cuh"
#include "score_keys_launch.cuh"

namespace keyformer::cuda {

bool scores_head_size(int64_t head_size) {
  return head_size == 64 || head_size == 80 || head_size == 96 || head_size == 128 ||
         head_size == 256;
}

void launch_score_keys(const ScoreKeysArgs& args, void* stream) {
  const int64_t num_reqs = args.requests.num_reqs;
  if (num_reqs == 0 || args.num_tokens == 0) return;
  launch(plan_scores_kernel, dim3{1, 1, 1}, kPlanThreads, 0, stream, args);
  // Upper bounds: the device alone knows how many rows score and how many keys they see.
  const int64_t group = args.num_query_heads / args.cache.num_kv_heads;
  const int64_t num_row_tiles = args.num_tokens * group / kTile + num_reqs;
  const int64_t max_kv_len = static_cast<int64_t>(args.requests.max_blocks)
                             << args.cache.block_bits;
  const int64_t num_key_tiles = num_reqs * ((max_kv_len + kTile - 1) / kTile);
  const bool is_bf16 = args.element_type == ElementType::kBFloat16;
  (is_bf16 ? launch_sums_bf16 : launch_sums_fp16)(args, num_row_tiles, num_key_tiles, stream);
}

}  // namespace keyformer::cuda
