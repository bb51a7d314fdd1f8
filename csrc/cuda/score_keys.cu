// SPDX-License-Identifier: Apache-2.0
// score_keys: adds softmax((q . k + noise) / tau), summed over rows and heads, to the keys' scores.
//
// A share needs the sum of its whole row, and a key the shares of all rows. The noise is most of
// the work (about 20 instructions per weight), so each weight is computed once and waits for the
// sum of its row in scratch, rounded to half precision. Tiles of 64 query vectors go through three
// kernels, as many at a time as have room in scratch:
//   weigh_tiles  a block of threads per tile of vectors and range of keys: weights against the
//                largest of their row in a tile of 64 keys, and what is the largest and the sum;
//   scale_tiles  a block per tile of vectors: what each tile of keys is to be multiplied with;
//   add_columns  a block per 64 keys: adds their shares in all rows that see them, a thread per
//                key, row after row and head after head.
// A weight depends on its row and the keys of its tile alone, and sums have an order that does not
// depend on where in a tile the row lies. So the result is the same, to the bit, in every run,
// alone or in a batch, in one chunk or in several.
#include "add_columns.cuh"
#include "plan_scores.cuh"
#include "score_keys_launch.cuh"

namespace keyformer::cuda {

namespace {

// Blocks of add_columns walk over their tiles, so more of them than fit on the largest GPU gain
// nothing.
constexpr int64_t kMaxColumnBlocks = 4096;

// Upper bounds: the device alone knows how many rows score and how many keys they see.
struct ScratchSizes {
  int64_t max_key_tiles;
  int64_t all_row_tiles;
  int64_t num_row_tiles;  // at a time
  int64_t row_tile_bytes;

  explicit ScratchSizes(const ScoreKeysArgs& args) {
    const int64_t group = args.num_query_heads / args.cache.num_kv_heads;
    const int64_t max_keys = static_cast<int64_t>(args.requests.max_blocks)
                             << args.cache.block_bits;
    max_key_tiles = (max_keys + kTile - 1) / kTile;
    all_row_tiles = args.num_tokens * group / kTile + args.requests.num_reqs;
    constexpr int64_t kTileBytes =
        kTile * (kTile * sizeof(uint16_t) + sizeof(TileState) + sizeof(float));
    row_tile_bytes = args.cache.num_kv_heads * max_key_tiles * kTileBytes;
    const int64_t fitting = row_tile_bytes == 0 ? 1 : kMaxScratchBytes / row_tile_bytes;
    const int64_t at_least_one = fitting < 1 ? 1 : fitting;
    num_row_tiles = all_row_tiles < at_least_one ? all_row_tiles : at_least_one;
  }
};

}  // namespace

bool scores_head_size(int64_t head_size) {
  return head_size == 64 || head_size == 80 || head_size == 96 || head_size == 128 ||
         head_size == 256;
}

int64_t score_scratch_bytes(const ScoreKeysArgs& args) {
  const ScratchSizes sizes(args);
  return sizes.num_row_tiles * sizes.row_tile_bytes;
}

void launch_score_keys(const ScoreKeysArgs& args, void* scratch, void* stream) {
  const ScratchSizes sizes(args);
  const int64_t num_reqs = args.requests.num_reqs;
  if (num_reqs == 0 || args.num_tokens == 0 || sizes.max_key_tiles == 0) return;
  launch(plan_scores_kernel, dim3{1, 1, 1}, kPlanThreads, 0, stream, args);
  ScoreGroupArgs group{};
  group.inputs = args;
  group.scratch.max_key_tiles = static_cast<int32_t>(sizes.max_key_tiles);
  group.scratch.states = static_cast<TileState*>(scratch);
  const auto heads = static_cast<unsigned>(args.cache.num_kv_heads);
  const int64_t num_tiles = sizes.num_row_tiles * heads * sizes.max_key_tiles;
  group.scratch.factors = reinterpret_cast<float*>(group.scratch.states + num_tiles * kTile);
  group.scratch.weights = reinterpret_cast<uint16_t*>(group.scratch.factors + num_tiles * kTile);
  const bool is_bf16 = args.element_type == ElementType::kBFloat16;
  for (int64_t first = 0; first < sizes.all_row_tiles; first += sizes.num_row_tiles) {
    const int64_t left = sizes.all_row_tiles - first;
    const int64_t num_row_tiles = left < sizes.num_row_tiles ? left : sizes.num_row_tiles;
    group.first_row_tile = static_cast<int32_t>(first);
    group.scratch.num_row_tiles = static_cast<int32_t>(num_row_tiles);
    (is_bf16 ? launch_weights_bf16 : launch_weights_fp16)(group, stream);
    const dim3 row_tiles{static_cast<unsigned>(num_row_tiles), heads, 1};
    launch(scale_tiles_kernel, row_tiles, kScaleThreads, 0, stream, group);
    // Each tile of vectors belongs to one request.
    const int64_t most_reqs = num_reqs < num_row_tiles ? num_reqs : num_row_tiles;
    const int64_t key_tiles = most_reqs * sizes.max_key_tiles;
    const dim3 columns{
        static_cast<unsigned>(key_tiles < kMaxColumnBlocks ? key_tiles : kMaxColumnBlocks), heads,
        1};
    launch(add_columns_kernel, columns, kTile, static_cast<int>(sizeof(AddColumnsShared)), stream,
           group);
  }
}

}  // namespace keyformer::cuda
