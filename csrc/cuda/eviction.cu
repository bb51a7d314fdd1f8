// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels that evict. They look at bytes, so nothing depends on the dtype.
#include "compact_kv.cuh"
#include "renumber_slots.cuh"
#include "reset_slots.cuh"
#include "select_keep.cuh"

namespace keyformer::cuda {

void launch_reset_slots(const ResetSlotsArgs& args, void* stream) {
  const int64_t num_threads = args.num_tokens * args.num_layers * args.num_kv_heads;
  const auto num_blocks = static_cast<unsigned>((num_threads + kResetThreads - 1) / kResetThreads);
  launch(reset_slots_kernel, dim3{num_blocks, 1, 1}, kResetThreads, 0, stream, args);
}

void launch_renumber_slots(const RenumberSlotsArgs& args, void* stream) {
  const auto num_problems =
      static_cast<unsigned>(args.num_layers * args.requests.num_reqs * args.num_kv_heads);
  launch(renumber_slots_kernel, dim3{num_problems, 1, 1}, kRenumberThreads, 0, stream, args);
}

void launch_select_keep(const SelectKeepArgs& args, void* stream) {
  const auto num_problems =
      static_cast<unsigned>(args.num_layers * args.requests.num_reqs * args.num_kv_heads);
  launch(select_tokens_kernel, dim3{num_problems, 1, 1}, kSelectThreads, 0, stream, args);
  launch(select_runs_kernel, dim3{num_problems, 1, 1}, kSelectThreads, 0, stream, args);
}

void launch_compact_kv(const CompactKvArgs& args, void* stream) {
  const auto num_problems = static_cast<unsigned>(args.cache.num_layers * args.requests.num_reqs *
                                                  args.cache.num_kv_heads);
  launch(compact_kv_kernel, dim3{num_problems, 1, 1}, kCompactThreads, 0, stream, args);
}

}  // namespace keyformer::cuda
