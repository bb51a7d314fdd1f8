// SPDX-License-Identifier: Apache-2.0
// Scores of one tile: logits by a register-blocked product over unpacked key panels, noisy softmax
// row by row, sum over the query heads. Every number depends only on its own row and key, never on
// the other rows of the tile, so the result is the same however rows are cut into tiles.
#pragma once

#include <cmath>

#include "isa.h"
#include "noise_vec.h"
#include "vec.h"

namespace keyformer::KEYFORMER_ISA {
namespace {

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Whether the products of this element type run on pairs of dimensions.
constexpr bool takes_pairs(ElementType type) { return kHasPairs && type == ElementType::kBFloat16; }

template <typename T>
void widen_query(const char* source, int64_t head_size, float* target, int64_t stride) {
  const T* elements = reinterpret_cast<const T*>(source);
  for (int64_t start = 0; start < head_size; start += kLanes) {
    float values[kLanes];
    store(values, load_as_float(elements + start));
    for (int64_t i = 0; i < kLanes; ++i) target[(start + i) * stride] = values[i];
  }
}

void load_query(const char* source, ElementType type, int64_t head_size, float* target,
                int64_t stride) {
  if (takes_pairs(type)) {
    for (int64_t i = 0; i < head_size / 2; ++i) {
      std::memcpy(target + i * stride, source + i * sizeof(float), sizeof(float));
    }
    return;
  }
  if (type == ElementType::kFloat32) return widen_query<float>(source, head_size, target, stride);
  if (type == ElementType::kBFloat16) {
    return widen_query<BFloat16>(source, head_size, target, stride);
  }
  widen_query<Float16>(source, head_size, target, stride);
}

// K of kKeyChunk tokens from `token` on, as fp32 [head_size, kKeyChunk].
template <typename T>
void unpack_keys_vec(const T* keys, int64_t head_size, int64_t block_size, int64_t token,
                     float* panel) {
  for (int64_t d = 0; d < head_size; ++d) {
    for (int64_t t = 0; t < kKeyChunk; t += kLanes) {
      store(panel + d * kKeyChunk + t, load_as_float(keys + d * block_size + token + t));
    }
  }
}

// amx: groups of 16 tokens; inside, dimension pairs of 16 tokens are interleaved.
inline void unpack_keys_amx(const BFloat16* keys, int64_t head_size, int64_t token, float* panel) {
  for (int64_t group = 0; group < kKeyChunk; group += 16) {
    const BFloat16* source = keys + (token + group) * head_size;
    for (int64_t d = 0; d < head_size; d += 2) {
      float* even = panel + d * kKeyChunk + group;
      float* odd = even + kKeyChunk;
      for (int64_t t = 0; t < 16; t += kLanes) {
        const VecU pair = load<VecU>(source + d * 16 + 2 * t);
        store(even + t, bit_cast<VecF>(pair << 16));
        store(odd + t, bit_cast<VecF>(pair & 0xFFFF0000u));
      }
    }
  }
}

// The same K as pairs of dimensions [head_size / 2, kKeyChunk].
inline void pair_keys_vec(const BFloat16* keys, int64_t head_size, int64_t block_size,
                          int64_t token, float* panel) {
  for (int64_t d = 0; d < head_size; d += 2) {
    const BFloat16* source = keys + d * block_size + token;
    VecF pairs[2] = {};
    interleave(source, source + block_size, pairs);
    store(panel + d / 2 * kKeyChunk, pairs[0]);
    store(panel + d / 2 * kKeyChunk + kLanes, pairs[1]);
  }
}

// amx stores pairs.
inline void pair_keys_amx(const BFloat16* keys, int64_t head_size, int64_t token, float* panel) {
  for (int64_t group = 0; group < kKeyChunk; group += 16) {
    const BFloat16* source = keys + (token + group) * head_size;
    for (int64_t d = 0; d < head_size; d += 2) {
      std::memcpy(panel + d / 2 * kKeyChunk + group, source + d * 16, 16 * sizeof(float));
    }
  }
}

// The panel of one chunk and its row stride; fp32 "vec" blocks are panels already.
inline const float* key_panel(const ScoreTile& tile, int64_t chunk_start, int64_t* stride) {
  const int64_t block = tile.block_table[chunk_start / tile.block_size];
  const int64_t token = chunk_start % tile.block_size;
  const char* keys = tile.keys + block * tile.block_bytes;
  if (tile.layout == Layout::kVec && tile.element_type == ElementType::kFloat32) {
    *stride = tile.block_size;
    return reinterpret_cast<const float*>(keys) + token;
  }
  *stride = kKeyChunk;
  if (takes_pairs(tile.element_type)) {
    const BFloat16* source = reinterpret_cast<const BFloat16*>(keys);
    if (tile.layout == Layout::kAmx) {
      pair_keys_amx(source, tile.head_size, token, tile.panel);
    } else {
      pair_keys_vec(source, tile.head_size, tile.block_size, token, tile.panel);
    }
  } else if (tile.layout == Layout::kAmx) {
    unpack_keys_amx(reinterpret_cast<const BFloat16*>(keys), tile.head_size, token, tile.panel);
  } else if (tile.element_type == ElementType::kBFloat16) {
    unpack_keys_vec(reinterpret_cast<const BFloat16*>(keys), tile.head_size, tile.block_size, token,
                    tile.panel);
  } else {
    unpack_keys_vec(reinterpret_cast<const Float16*>(keys), tile.head_size, tile.block_size, token,
                    tile.panel);
  }
  return tile.panel;
}

// Logits of kRows query vectors [num_words, kTileRows] against one chunk; the sum over the head
// size runs in order.
template <int kRows, bool kPairs>
void multiply_panel(const float* query, int64_t num_words, const float* panel, int64_t panel_stride,
                    float scale, float soft_cap, float* logits, int64_t row_stride) {
  for (int64_t t = 0; t < kKeyChunk; t += 2 * kLanes) {
    VecF sums[kRows][2] = {};
    for (int64_t i = 0; i < num_words; ++i) {
      const VecF keys_0 = load<VecF>(panel + i * panel_stride + t);
      const VecF keys_1 = load<VecF>(panel + i * panel_stride + t + kLanes);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const float q = query[i * kTileRows + row];
        sums[row][0] = add_product<kPairs>(q, keys_0, sums[row][0]);
        sums[row][1] = add_product<kPairs>(q, keys_1, sums[row][1]);
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        VecF x = sums[row][half] * scale;
        if (soft_cap > 0.0f) x = soft_cap_logits(x, soft_cap);
        store(logits + row * row_stride + t + half * kLanes, x);
      }
    }
  }
}

using MultiplyPanel = void (*)(const float*, int64_t, const float*, int64_t, float, float, float*,
                               int64_t);

// multiply_panel by number of rows; a tile never asks for 0 of them.
template <bool kPairs>
constexpr MultiplyPanel kMultiplyPanel[] = {
    nullptr,
    multiply_panel<1, kPairs>,
    multiply_panel<2, kPairs>,
    multiply_panel<3, kPairs>,
    multiply_panel<4, kPairs>,
    multiply_panel<5, kPairs>,
    multiply_panel<6, kPairs>,
#if defined(__AVX512F__)
    multiply_panel<7, kPairs>,
    multiply_panel<8, kPairs>,
    multiply_panel<9, kPairs>,
    multiply_panel<10, kPairs>,
    multiply_panel<11, kPairs>,
    multiply_panel<12, kPairs>,
#endif
};
static_assert(sizeof(kMultiplyPanel<false>) / sizeof(kMultiplyPanel<false>[0]) == kTileRows + 1,
              "one product per row count");

void compute_logits(const ScoreTile& tile) {
  const int64_t num_keys = tile.visible[tile.num_rows - 1];
  const int64_t num_vectors = tile.num_rows * tile.num_heads;
  const bool pairs = takes_pairs(tile.element_type);
  const MultiplyPanel* multiply = pairs ? kMultiplyPanel<kHasPairs> : kMultiplyPanel<false>;
  const int64_t num_words = pairs ? tile.head_size / 2 : tile.head_size;
  int64_t first_row = 0;
  for (int64_t chunk = 0; chunk < num_keys; chunk += kKeyChunk) {
    // Rows that end before this chunk cannot see it: only the causal part is computed.
    while (tile.visible[first_row] <= chunk) ++first_row;
    int64_t panel_stride;
    const float* panel = key_panel(tile, chunk, &panel_stride);
    int64_t vector = first_row * tile.num_heads;
    vector -= vector % kTileRows;
    while (vector < num_vectors) {
      const int64_t left = num_vectors - vector;
      const int64_t count = left < kTileRows ? left : kTileRows;
      multiply[count](tile.query + vector * tile.head_size, num_words, panel, panel_stride,
                      tile.scale, tile.soft_cap, tile.weights + vector * tile.row_stride + chunk,
                      tile.row_stride);
      vector += count;
    }
  }
}

inline float larger(float a, float b) { return a > b ? a : b; }

// A NaN is passed over: it shows up in the sum of the weights.
inline float row_max(const float* row, int64_t num_keys) {
  // Two chains: one would wait for itself.
  VecF even = load<VecF>(row);
  VecF odd = even;
  int64_t j = kLanes;
  for (; j + kLanes < num_keys; j += 2 * kLanes) {
    even = larger(load<VecF>(row + j), even);
    odd = larger(load<VecF>(row + j + kLanes), odd);
  }
  if (j < num_keys) even = larger(load<VecF>(row + j), even);
  return max_lane(larger(odd, even));
}

// Calls `step(start, count)` for stretches of keys short enough for one draw of noise.
template <typename Step>
inline void for_each_stretch(int64_t num_keys, const Step& step) {
  for (int64_t start = 0; start < num_keys; start += kNoiseStretch) {
    const int64_t left = num_keys - start;
    step(start, left < kNoiseStretch ? left : kNoiseStretch);
  }
}

// Adds the ALiBi bias of one (row, head): the slope times the distance from query to key.
inline void add_alibi(float* row, int64_t num_keys, float slope, int32_t query_position,
                      const int32_t* positions) {
  for (int64_t j = 0; j < num_keys; j += kLanes) {
    const VecI distance = load<VecI>(positions + j) - query_position;
    store(row + j, load<VecF>(row + j) + slope * __builtin_convertvector(distance, VecF));
  }
}

// Turns the logits of one (row, head) into unnormalised weights and returns their sum, the sink's
// weight included. Logits beyond the visible keys are -inf, which makes their weight exactly 0.
// `num_keys` is whole vectors; `key` is nullptr for a row without noise, and `sink` is -inf for a
// row without a sink.
float weigh_row(float* row, int64_t num_keys, float tau, const RowKey* key,
                const int32_t* positions, float sink) {
  alignas(kVectorBytes) float noise[kNoiseStretch];
  const bool divides = key != nullptr && tau == 1.0f;
  if (key != nullptr && !divides) {
    for_each_stretch(num_keys, [&](int64_t start, int64_t count) {
      draw_uniforms(*key, positions + start, count, noise);
      replace_by_minus_ln(count, noise);
      for (int64_t j = 0; j < count; j += kLanes) {
        const VecF gumbel = value(minus_ln_fixed(load<VecF>(noise + j)));
        store(row + start + j, load<VecF>(row + start + j) + gumbel);
      }
    });
  }
  const float largest = larger(row_max(row, num_keys), sink);
  const float log2_e_per_tau = 1.44269504088896341f / tau;
  VecF sum = {};
  if (divides) {
    // exp(x + g) = exp(x) / E: one logarithm instead of two.
    alignas(kVectorBytes) float denominators[kNoiseStretch];
    for_each_stretch(num_keys, [&](int64_t start, int64_t count) {
      draw_uniforms(*key, positions + start, count, noise);
      uniforms_to_fractions(count, noise, denominators);
      for (int64_t j = 0; j < count; j += kLanes) {
        const VecF x = exp2_nonpositive((load<VecF>(row + start + j) - largest) * log2_e_per_tau);
        const VecF weight = x * load<VecF>(denominators + j) / load<VecF>(noise + j);
        store(row + start + j, weight);
        sum += weight;
      }
    });
  } else {
    for (int64_t j = 0; j < num_keys; j += kLanes) {
      const VecF weight = exp2_nonpositive((load<VecF>(row + j) - largest) * log2_e_per_tau);
      store(row + j, weight);
      sum += weight;
    }
  }
  return sum_lanes(sum) + exp2_nonpositive(splat((sink - largest) * log2_e_per_tau))[0];
}

void compute_tile(const ScoreTile& tile) {
  compute_logits(tile);
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const int64_t visible = tile.visible[r];
    const int64_t padded = round_up(visible, kLanes);
    for (int64_t h = 0; h < tile.num_heads; ++h) {
      const int64_t vector = r * tile.num_heads + h;
      float* row = tile.weights + vector * tile.row_stride;
      for (int64_t j = visible; j < padded; ++j) row[j] = -INFINITY;
      if (tile.alibi_slopes != nullptr) {
        add_alibi(row, padded, tile.alibi_slopes[h], tile.query_bias_positions[r],
                  tile.bias_positions);
      }
      const RowKey* key = tile.row_keys != nullptr ? tile.row_keys + vector : nullptr;
      const float sink = tile.sinks != nullptr ? tile.sinks[h] : -INFINITY;
      tile.inverse_sums[vector] =
          1.0f / weigh_row(row, padded, tile.tau[r], key, tile.positions, sink);
    }
  }
}

// Adds one row to the scores of `num_keys` keys in one block.
template <typename AddVector>
inline void add_row(int64_t num_keys, float* score, const AddVector& add) {
  int64_t j = 0;
  for (; j + kLanes <= num_keys; j += kLanes) store(score + j, add(j, load<VecF>(score + j)));
  if (j == num_keys) return;
  // Slots behind the last key belong to nobody yet: leave their bytes alone.
  float last[kLanes] = {};
  std::memcpy(last, score + j, static_cast<size_t>(num_keys - j) * sizeof(float));
  store(last, add(j, load<VecF>(last)));
  std::memcpy(score + j, last, static_cast<size_t>(num_keys - j) * sizeof(float));
}

void add_tile(const ScoreTile& tile, float* score, int64_t score_block_stride) {
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const float* inverse_sums = tile.inverse_sums + r * tile.num_heads;
    for (int64_t start = 0; start < tile.visible[r]; start += tile.block_size) {
      const float* weights = tile.weights + r * tile.num_heads * tile.row_stride + start;
      const int64_t left = tile.visible[r] - start;
      add_row(left < tile.block_size ? left : tile.block_size,
              score + tile.block_table[start / tile.block_size] * score_block_stride,
              [&](int64_t j, VecF total) {
                VecF share = load<VecF>(weights + j) * inverse_sums[0];
                for (int64_t h = 1; h < tile.num_heads; ++h) {
                  share += load<VecF>(weights + h * tile.row_stride + j) * inverse_sums[h];
                }
                return total + share;
              });
    }
  }
}

void fill_noise(RowKey row, const int32_t* positions, int64_t num_keys, bool gumbel, float* noise) {
  for_each_stretch(round_up(num_keys, kLanes), [&](int64_t start, int64_t count) {
    draw_uniforms(row, positions + start, count, noise + start);
    replace_by_minus_ln(count, noise + start);
    if (gumbel) replace_by_minus_ln(count, noise + start);
  });
}

}  // namespace

}  // namespace keyformer::KEYFORMER_ISA
