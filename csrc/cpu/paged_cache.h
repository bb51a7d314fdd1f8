// SPDX-License-Identifier: Apache-2.0
// The packed CPU cache of vLLM as plain pointers and strides, all offsets int64.
#pragma once

#include <cstdint>

namespace keyformer {

enum class ElementType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// "vec" and "vec16" share one packing: K is [head_size, block_size], V is
// [block_size, head_size]. "amx" interleaves pairs for the tile instructions.
enum class Layout : int32_t { kVec = 0, kAmx = 1 };

// Keys are scored in chunks of this many tokens; block sizes are multiples of it.
constexpr int64_t kKeyChunk = 32;

// One attention layer stack: [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size].
// Inside one (layer, block, head) the first half holds K and the second half V. Strides in elements.
struct PagedCache {
  char* data;
  int64_t element_size;  // bytes
  int64_t layer_stride;
  int64_t block_stride;
  int64_t head_stride;
  int64_t num_layers;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_size;
  Layout layout;
};

// Score (float) or position (int32_t) of every slot: [num_layers, num_blocks, num_kv_heads,
// block_size]. The last dimension is contiguous; the rest is strided, in elements.
template <typename T>
struct SideView {
  T* data;
  int64_t layer_stride;
  int64_t block_stride;
  int64_t head_stride;

  T* at(int64_t layer, int64_t block, int64_t head) const {
    return data + layer * layer_stride + block * block_stride + head * head_stride;
  }
};

// A batch of requests. Block tables are physical: freed blocks are already shifted out.
struct RequestBatch {
  const int32_t* block_table;  // [num_reqs, max_blocks], rows contiguous
  int64_t block_table_stride;
  const int32_t* kv_lens;  // [num_reqs] tokens
  int64_t num_reqs;
};

}  // namespace keyformer
