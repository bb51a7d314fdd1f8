// SPDX-License-Identifier: Apache-2.0
// One query row with all query heads of one KV head, as the attention kernels see it.
//
// The keys are attended in ranges of kRangeKeys. Each range leaves its own maximum, sum and
// unnormalised output per query head, and the ranges are merged in ascending order: so the result
// is the same whether one thread runs them all or each runs on another. No range crosses the end of
// the front, so what a row without its front would attend comes out of the same pass.
#pragma once

#include <cstdint>

#include "paged_cache.h"

namespace keyformer {

constexpr int64_t kRangeKeys = 512;
static_assert(kRangeKeys % kKeyChunk == 0, "a range is whole chunks");

struct AttendRow {
  int64_t head_size;
  int64_t block_size;
  int64_t num_heads;  // query heads per KV head
  int64_t num_keys;   // the row sees slots [0, num_keys)
  int64_t front;      // slots [0, front) are attended but not scored; whole blocks
  ElementType element_type;
  Layout layout;
  float scale;
  float soft_cap;              // 0: none
  const char* keys;            // K of this (layer, KV head) in block 0
  const char* values;          // V, likewise
  int64_t block_bytes;         // from block to block
  const int32_t* block_table;  // [num_blocks of the request]
  const float* query;          // [num_heads, head_size], as load_query leaves it
  const float* alibi_slopes;   // [num_heads], nullptr: no bias
  const float* sinks;          // [num_heads] logits that only the normaliser sees, nullptr: none
  // Of this KV head, [num_keys, padded to whole chunks], for noise and for bias; only read where
  // there is any.
  const int32_t* positions;
  const int32_t* bias_positions;
  int32_t query_bias_position;
  float* logits;       // [num_heads, row_stride]; later the weights of the score
  int64_t row_stride;  // multiple of kKeyChunk
};

inline int64_t num_ranges(int64_t num_keys) { return (num_keys + kRangeKeys - 1) / kRangeKeys; }

inline int64_t num_ranges(const AttendRow& row) {
  return num_ranges(row.front) + num_ranges(row.num_keys - row.front);
}

// What one range leaves behind; ranges of a row lie one after the other.
struct RangeResult {
  float* max;     // [num_heads]
  float* sum;     // [num_heads]
  float* output;  // [num_heads, head_size], divided by nothing yet

  static int64_t num_floats(int64_t num_heads, int64_t head_size) {
    // Rounded up, so that every output starts on a whole vector.
    return (num_heads * (head_size + 2) + 15) / 16 * 16;
  }

  static RangeResult at(float* base, int64_t range, int64_t num_heads, int64_t head_size) {
    float* output = base + range * num_floats(num_heads, head_size);
    return {output + num_heads * head_size, output + num_heads * (head_size + 1), output};
  }
};

}  // namespace keyformer
