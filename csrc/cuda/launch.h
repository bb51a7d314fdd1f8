// SPDX-License-Identifier: Apache-2.0
// What the bindings fill in and launch. All pointers are device pointers; a stream is a
// cudaStream_t. Nothing here waits for the device or reads a value back, so what only the data can
// break is the caller's duty; where a kernel notices it, it stops the device with a message.
#pragma once

#include <cstdint>

#include "paged_cache.h"

namespace keyformer::cuda {

enum class ElementType : int32_t { kBFloat16 = 0, kFloat16 = 1 };

struct ResetSlotsArgs {
  SideView<float> score;
  SideView<int32_t> position;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t block_bits;
  const int64_t* slot_mapping;  // [num_tokens], negative: padding
  const int64_t* positions;     // [num_tokens] logical
  int64_t num_tokens;
};

struct SelectKeepArgs {
  SideView<const float> score;
  SideView<const int32_t> position;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t block_bits;
  RequestBatch requests;        // kv_lens before the eviction
  const int32_t* num_evict;     // [num_reqs]
  const int32_t* num_sinks;     // [num_reqs]: positions below it stay
  const int32_t* recent_start;  // [num_reqs]: positions from it on stay
  const int32_t* run_size;      // [num_reqs]: 1, or tokens ranked together
  const uint8_t* random;        // [num_reqs]: rank by noise instead of score
  const int64_t* noise_keys;    // [num_reqs]
  int64_t first_layer;          // in the whole model, for the random draws
  int64_t first_kv_head;
  int64_t max_kv_len;
  uint8_t* keep;  // [num_layers, num_reqs, num_kv_heads, max_kv_len]; all of it is written
};

struct CompactKvArgs {
  RowCache cache;
  SideView<float> score;
  SideView<int32_t> position;
  RequestBatch requests;     // kv_lens before the eviction
  const int32_t* num_evict;  // [num_reqs]
  const uint8_t* keep;       // [num_layers, num_reqs, num_kv_heads, max_kv_len]
  int64_t max_kv_len;
};

// Scratch of score_keys, filled on the device by its first kernel.
struct ScorePlan {
  int32_t* tokens;     // [num_tokens] those that score, ascending
  int32_t* ranks;      // [num_tokens + 1] scored tokens before each
  int32_t* row_tiles;  // [num_reqs + 1] tiles of query vectors before each request
  int32_t* key_tiles;  // [num_reqs + 1] tiles of keys before each request
};

struct ScoreKeysArgs {
  const char* query;  // [num_tokens, num_query_heads, head_size], dtype of the cache
  ElementType element_type;
  int64_t query_token_stride;  // elements
  int64_t query_head_stride;
  int32_t num_tokens;
  int32_t num_query_heads;
  RowCache cache;  // one layer
  SideView<float> score;
  SideView<const int32_t> position;
  SideView<const int32_t> place;  // no data: the bias is taken from `position`
  RequestBatch requests;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int64_t* query_positions;  // [num_tokens] logical
  const float* tau;                // [num_tokens], <= 0: not scored
  const int64_t* noise_keys;       // [num_reqs], 0: no noise
  const float* alibi_slopes;       // [num_query_heads], nullptr: no bias
  const float* sinks;              // [num_query_heads], nullptr: none
  int64_t layer_index;
  int64_t first_query_head;
  float scale;
  float soft_cap;
  ScorePlan plan;
};

constexpr int64_t kMaxScratchBytes = int64_t{256} << 20;

// Query vectors, and keys, of a tile of score_keys.
constexpr int kTile = 64;

// What a tile of keys has of a row; exponents are those of 2.
struct alignas(8) TileState {
  float maximum;
  float sum;  // of the weights against it
};

// Scratch of score_keys, of as many tiles of query vectors as fit into kMaxScratchBytes at a time,
// or one.
struct ScoreScratch {
  TileState* states;  // [num_row_tiles, num_kv_heads, max_key_tiles, kTile]
  float* factors;     // same shape: from weights to shares
  uint16_t* weights;  // [num_row_tiles, num_kv_heads, max_key_tiles, kTile, kTile] half precision
  int32_t num_row_tiles;
  int32_t max_key_tiles;  // that a row of the block table can hold

  // Counted in tiles.
  KEYFORMER_DEVICE int64_t tile(const ScoreKeysArgs& args, int row_tile, int head,
                                int key_tile) const {
    const int64_t heads = args.cache.num_kv_heads;
    return (row_tile * heads + head) * max_key_tiles + key_tile;
  }
};

struct ScoreGroupArgs {
  ScoreKeysArgs inputs;
  ScoreScratch scratch;
  int32_t first_row_tile;  // of those in scratch
};

// What a range of keys leaves of one (row, query head): the largest logit and the sum of weights
// against it, of the softmax that attends and of the noisy one that scores.
struct alignas(16) RangeState {
  float maximum;
  float sum;
  float noisy_maximum;
  float noisy_sum;
};

// Scratch of paged_attention_scored, of as many rows as fit into kMaxScratchBytes at a time, or
// one.
struct AttentionScratch {
  float* logits;       // [num_rows, num_query_heads, max_keys] noisy and divided by tau
  float* outputs;      // [num_rows, num_query_heads, max_ranges, head_size] divided by nothing yet
  RangeState* states;  // [num_rows, num_query_heads, max_ranges]
  int64_t max_keys;    // that a row of the block table can hold
  int32_t max_ranges;
  int32_t num_rows;
};

struct PagedAttentionScoredArgs {
  ScoreKeysArgs inputs;         // without a plan
  char* output;                 // [num_tokens, num_query_heads, head_size], dtype of the query
  int64_t output_token_stride;  // elements
  int64_t output_head_stride;
  AttentionScratch scratch;
  int32_t first_token;  // of the rows in scratch
  int32_t num_splits;   // thread blocks that share the ranges, or the keys, of a row
};

struct RenumberSlotsArgs {
  SideView<int32_t> place;
  SideView<const int32_t> position;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t block_bits;
  RequestBatch requests;
};

struct DrawNoiseArgs {
  const int32_t* positions;  // [num_keys]
  int64_t num_keys;
  int64_t noise_key;
  int64_t layer;
  int64_t query_head;
  int64_t query_position;
  bool gumbel;   // or the exponential draws behind it
  float* noise;  // [num_keys]
};

void launch_draw_noise(const DrawNoiseArgs& args, void* stream);
void launch_reset_slots(const ResetSlotsArgs& args, void* stream);
void launch_select_keep(const SelectKeepArgs& args, void* stream);
void launch_compact_kv(const CompactKvArgs& args, void* stream);

void launch_renumber_slots(const RenumberSlotsArgs& args, void* stream);

// Whether score_keys and paged_attention_scored were compiled for the head size.
bool scores_head_size(int64_t head_size);

// Bytes that a launch needs at `scratch`, aligned to 16. A function of sizes alone.
int64_t score_scratch_bytes(const ScoreKeysArgs& args);
void launch_score_keys(const ScoreKeysArgs& args, void* scratch, void* stream);

int64_t attention_scratch_bytes(const ScoreKeysArgs& inputs);
void launch_paged_attention_scored(PagedAttentionScoredArgs args, void* scratch, void* stream);

}  // namespace keyformer::cuda
