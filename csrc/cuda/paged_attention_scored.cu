// SPDX-License-Identifier: Apache-2.0
// paged_attention_scored: attention and scores from one pass over K and V. Scores need the sum of
// their whole row, so the noisy logits wait for it in scratch: 4 bytes per key and query head, next
// to the 4 * head_size bytes of K and V that each KV head reads.
//
// Everything that the host decides follows from sizes, so a captured launch stays right whatever
// the lengths are when it runs.
#include "attend_ranges_launch.cuh"
#include "finish_rows.cuh"

namespace keyformer::cuda {

namespace {

// Enough blocks of threads to fill the largest GPU about five times over: so the last ones, which
// do not fill it, cost little.
constexpr int64_t kEnoughBlocks = 2048;

struct ScratchSizes {
  int64_t max_keys;
  int64_t max_ranges;
  int64_t row_bytes;
  int64_t num_rows;

  explicit ScratchSizes(const ScoreKeysArgs& inputs) {
    max_keys = static_cast<int64_t>(inputs.requests.max_blocks) << inputs.cache.block_bits;
    max_ranges = (max_keys + kRangeKeys - 1) / kRangeKeys;
    const int64_t range_bytes =
        inputs.cache.head_size * static_cast<int64_t>(sizeof(float)) + sizeof(RangeState);
    row_bytes = inputs.num_query_heads *
                (max_keys * static_cast<int64_t>(sizeof(float)) + max_ranges * range_bytes);
    const int64_t fitting = row_bytes == 0 ? 1 : kMaxScratchBytes / row_bytes;
    const int64_t at_least_one = fitting < 1 ? 1 : fitting;
    num_rows = inputs.num_tokens < at_least_one ? inputs.num_tokens : at_least_one;
  }
};

// Thread blocks that share one of `num_units` tasks, each of at most `most` equal pieces.
unsigned splits(int64_t num_units, int64_t most) {
  const int64_t wanted = kEnoughBlocks / num_units;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted > most ? most : wanted);
}

}  // namespace

int64_t attention_scratch_bytes(const ScoreKeysArgs& inputs) {
  const ScratchSizes sizes(inputs);
  return sizes.num_rows * sizes.row_bytes;
}

void launch_paged_attention_scored(PagedAttentionScoredArgs args, void* scratch, void* stream) {
  const ScoreKeysArgs& inputs = args.inputs;
  const ScratchSizes sizes(inputs);
  const int64_t num_reqs = inputs.requests.num_reqs;
  if (num_reqs == 0 || inputs.num_tokens == 0 || sizes.max_keys == 0) return;
  const int64_t num_kv_heads = inputs.cache.num_kv_heads;
  const int64_t group = inputs.num_query_heads / num_kv_heads;
  const int64_t num_passes = (group + kPassHeads - 1) / kPassHeads;
  args.scratch.max_keys = sizes.max_keys;
  args.scratch.max_ranges = static_cast<int32_t>(sizes.max_ranges);
  const int64_t num_states = sizes.num_rows * inputs.num_query_heads * sizes.max_ranges;
  args.scratch.states = static_cast<RangeState*>(scratch);
  args.scratch.outputs = reinterpret_cast<float*>(args.scratch.states + num_states);
  args.scratch.logits = args.scratch.outputs + num_states * inputs.cache.head_size;
  for (int64_t first = 0; first < inputs.num_tokens; first += sizes.num_rows) {
    const int64_t left = inputs.num_tokens - first;
    const int64_t num_rows = left < sizes.num_rows ? left : sizes.num_rows;
    args.first_token = static_cast<int32_t>(first);
    args.scratch.num_rows = static_cast<int32_t>(num_rows);
    const int64_t num_tasks = num_rows * num_kv_heads * num_passes;
    args.num_splits = static_cast<int32_t>(splits(num_tasks, sizes.max_ranges));
    const dim3 tasks{static_cast<unsigned>(num_tasks), static_cast<unsigned>(args.num_splits), 1};
    const bool is_bf16 = inputs.element_type == ElementType::kBFloat16;
    (is_bf16 ? launch_ranges_bf16 : launch_ranges_fp16)(args, tasks, stream);
    const int64_t num_units = num_reqs * num_kv_heads;
    args.num_splits = static_cast<int32_t>(splits(num_units, sizes.max_ranges));
    const dim3 units{static_cast<unsigned>(num_units), static_cast<unsigned>(args.num_splits), 1};
    launch(finish_rows_kernel, units, kFinishThreads, static_cast<int>(group * sizeof(RowSums)),
           stream, args);
  }
}

}  // namespace keyformer::cuda
