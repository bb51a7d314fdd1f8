// SPDX-License-Identifier: Apache-2.0
// Products of a few query heads with one block of the cache, straight from its packed layout: each
// key and each value is read and widened once for all heads of a tile.
#pragma once

#include <type_traits>

#include "vec.h"

namespace keyformer::KEYFORMER_ISA {
namespace {

// Query heads that share one pass over a block; larger groups take several, from the L1 cache.
constexpr int kMaxTileHeads = 4;

// K [head_size, block_size], V [block_size, head_size].
template <typename T>
struct VecBlock {
  static constexpr bool kPairs = kHasPairs && std::is_same_v<T, BFloat16>;

  const T* keys;
  const T* values;
  int64_t block_size;
  int64_t head_size;

  VecBlock(const char* keys, const char* values, int64_t block_size, int64_t head_size)
      : keys(reinterpret_cast<const T*>(keys)),
        values(reinterpret_cast<const T*>(values)),
        block_size(block_size),
        head_size(head_size) {}

  // Dimensions d and d + 1 of the keys of tokens [t, t + kLanes).
  void load_keys(int64_t t, int64_t d, VecF* first, VecF* second) const {
    const T* source = keys + d * block_size + t;
    *first = load_as_float(source);
    *second = load_as_float(source + block_size);
  }

  // Pairs of dimensions d and d + 1 of the keys of tokens [t, t + 2 * kLanes).
  void load_key_pairs(int64_t t, int64_t d, VecF pairs[2]) const {
    const T* source = keys + d * block_size + t;
    interleave(source, source + block_size, pairs);
  }

  // Dimensions [d, d + kLanes) of the values of tokens t and t + 1, t even.
  void load_values(int64_t t, int64_t d, VecF* first, VecF* second) const {
    const T* source = values + t * head_size + d;
    *first = load_as_float(source);
    *second = load_as_float(source + head_size);
  }
};

// bf16 in pairs. K: groups of 16 tokens, inside them pairs of dimensions. V: groups of 16
// dimensions, inside them pairs of tokens.
struct AmxBlock {
  static constexpr bool kPairs = kHasPairs;

  const BFloat16* keys;
  const BFloat16* values;
  int64_t block_size;
  int64_t head_size;

  AmxBlock(const char* keys, const char* values, int64_t block_size, int64_t head_size)
      : keys(reinterpret_cast<const BFloat16*>(keys)),
        values(reinterpret_cast<const BFloat16*>(values)),
        block_size(block_size),
        head_size(head_size) {}

  void load_keys(int64_t t, int64_t d, VecF* first, VecF* second) const {
    load_pairs(keys + t / 16 * 16 * head_size + d / 2 * 32 + t % 16 * 2, first, second);
  }

  void load_values(int64_t t, int64_t d, VecF* first, VecF* second) const {
    load_pairs(values + d / 16 * 16 * block_size + t / 2 * 32 + d % 16 * 2, first, second);
  }

  void load_key_pairs(int64_t t, int64_t d, VecF pairs[2]) const {
    const BFloat16* source = keys + t * head_size + d / 2 * 32;
    pairs[0] = load<VecF>(source);
    pairs[1] = load<VecF>(source + 16 * head_size);
  }

  static void load_pairs(const BFloat16* source, VecF* first, VecF* second) {
    const VecU pair = load<VecU>(source);
    *first = bit_cast<VecF>(pair << 16);
    *second = bit_cast<VecF>(pair & 0xFFFF0000u);
  }
};

// Vectors of keys per step: enough sums to hide the latency of a product, few enough to stay in
// registers.
constexpr int key_vectors(int num_heads) {
  constexpr int kChunkVectors = kKeyChunk / kLanes;
  const int wanted = num_heads <= 2 ? 4 : 2;
  return wanted < kChunkVectors ? wanted : kChunkVectors;
}

// Logits of kHeads query heads for the chunk of keys that starts at token `chunk` of the block. The
// sum over the head size runs in order, as in the tiles of score_keys: so both give the same bits.
template <int kHeads, typename Block>
void multiply_keys(const Block& block, int64_t chunk, const float* query, float scale,
                   float soft_cap, float* logits, int64_t row_stride) {
  constexpr int kVectors = key_vectors(kHeads);
  for (int64_t t = 0; t < kKeyChunk; t += kVectors * kLanes) {
    VecF sums[kHeads][kVectors] = {};
    for (int64_t d = 0; d < block.head_size; d += 2) {
      if constexpr (Block::kPairs) {
        static_assert(kVectors == 2, "pairs come in two vectors");
        VecF pairs[kVectors];
        block.load_key_pairs(chunk + t, d, pairs);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          const float q = query[h * block.head_size + d / 2];
          sums[h][0] = add_product<true>(q, pairs[0], sums[h][0]);
          sums[h][1] = add_product<true>(q, pairs[1], sums[h][1]);
        }
        continue;
      }
      VecF first[kVectors];
      VecF second[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        block.load_keys(chunk + t + v * kLanes, d, &first[v], &second[v]);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const VecF q = splat(query[h * block.head_size + d]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[h][v] = multiply_add(q, first[v], sums[h][v]);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const VecF q = splat(query[h * block.head_size + d + 1]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[h][v] = multiply_add(q, second[v], sums[h][v]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        VecF x = sums[h][v] * scale;
        if (soft_cap > 0.0f) x = soft_cap_logits(x, soft_cap);
        store(logits + h * row_stride + t + v * kLanes, x);
      }
    }
  }
}

// Vectors of dimensions per step.
constexpr int value_vectors(int num_heads) {
  if (num_heads == 1) return 8;
#if defined(__AVX512F__)
  return 4;
#else
  return num_heads < 4 ? 4 : 2;
#endif
}

// Adds the weighted values of `num_tokens` tokens from `token` (even) on, dimensions from `d` on.
// Slots behind them are never part of a product: they may hold NaN.
template <int kHeads, int kVectors, typename Block>
void add_values(const Block& block, int64_t d, int64_t token, int64_t num_tokens,
                const float* weights, int64_t weight_stride, float* output) {
  for (; d + kVectors * kLanes <= block.head_size; d += kVectors * kLanes) {
    VecF sums[kHeads][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[h][v] = load<VecF>(output + h * block.head_size + d + v * kLanes);
      }
    }
    for (int64_t t = 0; t < num_tokens; t += 2) {
      VecF first[kVectors];
      VecF second[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        block.load_values(token + t, d + v * kLanes, &first[v], &second[v]);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const VecF weight = splat(weights[h * weight_stride + t]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[h][v] = multiply_add(weight, first[v], sums[h][v]);
      }
      if (t + 1 == num_tokens) break;
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const VecF weight = splat(weights[h * weight_stride + t + 1]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sums[h][v] = multiply_add(weight, second[v], sums[h][v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        store(output + h * block.head_size + d + v * kLanes, sums[h][v]);
      }
    }
  }
  if constexpr (kVectors > 1) {
    add_values<kHeads, kVectors / 2>(block, d, token, num_tokens, weights, weight_stride, output);
  }
}

}  // namespace
}  // namespace keyformer::KEYFORMER_ISA
