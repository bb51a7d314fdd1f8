// SPDX-License-Identifier: Apache-2.0
// draw_noise: the noise of one query row, for tests against its Python twin.
#include "launch.h"
#include "noise.cuh"

namespace keyformer::cuda {

constexpr int kDrawThreads = 128;

__global__ void __launch_bounds__(kDrawThreads)
    draw_noise_kernel(const __grid_constant__ DrawNoiseArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDrawThreads + threadIdx.x;
  if (i >= args.num_keys) return;
  const RowKey row = make_row_key(args.noise_key, args.layer, args.query_head, args.query_position);
  args.noise[i] = args.gumbel ? draw_gumbel(row, args.positions[i])
                              : value(draw_exponential(row, args.positions[i]));
}

void launch_draw_noise(const DrawNoiseArgs& args, void* stream) {
  const auto num_blocks = static_cast<unsigned>((args.num_keys + kDrawThreads - 1) / kDrawThreads);
  launch(draw_noise_kernel, dim3{num_blocks, 1, 1}, kDrawThreads, 0, stream, args);
}

}  // namespace keyformer::cuda
