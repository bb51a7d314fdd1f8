// SPDX-License-Identifier: Apache-2.0
// The strided cache of vLLM's GPU backends (FlashAttention, Triton) as plain pointers and strides.
// A token of one KV head is one row, K first, V behind it; where the row lies is up to the strides,
// so [block, token, head] and [block, head, token] order are the same to the kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KEYFORMER_DEVICE __host__ __device__
#else
#define KEYFORMER_DEVICE
#endif

namespace keyformer::cuda {

// [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size], the last dimension contiguous.
// Strides in elements.
struct RowCache {
  char* data;
  int64_t element_size;  // bytes
  int64_t layer_stride;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t block_bits;  // log2 of the block size
  int32_t head_size;

  KEYFORMER_DEVICE char* row(int64_t layer, int64_t block, int64_t head, int64_t token) const {
    return data + (layer * layer_stride + block * block_stride + head * head_stride +
                   token * token_stride) *
                      element_size;
  }
};

// Score (float) or position (int32_t) of every slot: [num_layers, num_blocks, num_kv_heads,
// block_size]. The last dimension is contiguous; the rest is strided, in elements.
template <typename T>
struct SideView {
  T* data;
  int64_t layer_stride;
  int64_t block_stride;
  int64_t head_stride;

  KEYFORMER_DEVICE T* at(int64_t layer, int64_t block, int64_t head) const {
    return data + layer * layer_stride + block * block_stride + head * head_stride;
  }
};

// A batch of requests. Block tables are physical: freed blocks are already shifted out.
struct RequestBatch {
  const int32_t* block_table;  // [num_reqs, max_blocks], rows contiguous
  int64_t block_table_stride;
  const int32_t* kv_lens;  // [num_reqs] tokens
  int32_t num_reqs;
  int32_t max_blocks;

  KEYFORMER_DEVICE const int32_t* blocks(int64_t request) const {
    return block_table + request * block_table_stride;
  }
};

}  // namespace keyformer::cuda
