// SPDX-License-Identifier: Apache-2.0
// Attention of one query row over a range of keys, the merge of the ranges, and the row's scores
// from the logits that the ranges left behind. Include after score_tile.h, whose row arithmetic
// makes the scores equal to those of score_keys to the bit.
#pragma once

#include <cmath>

#include "attend_block.h"
#include "attend_row.h"
#include "score_tile.h"

namespace keyformer::KEYFORMER_ISA {
namespace {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls `step(first head, Constant<number of heads>)` for the tiles of a group of query heads.
template <typename Step>
void for_each_head_tile(int64_t num_heads, const Step& step) {
  static_assert(kMaxTileHeads == 4, "one case per tile size");
  for (int64_t head = 0; head < num_heads; head += kMaxTileHeads) {
    switch (num_heads - head) {
      case 1:
        step(head, Constant<1>{});
        break;
      case 2:
        step(head, Constant<2>{});
        break;
      case 3:
        step(head, Constant<3>{});
        break;
      default:
        step(head, Constant<4>{});
    }
  }
}

inline void prefetch(const char* data, int64_t num_bytes) {
  for (int64_t offset = 0; offset < num_bytes; offset += 64) __builtin_prefetch(data + offset);
}

template <typename Block>
void attend_range_of(const AttendRow& row, int64_t begin, int64_t end, const RangeResult& result,
                     float* weights) {
  const int64_t head_size = row.head_size;
  const int64_t half_bytes = row.values - row.keys;
  const auto block_offset = [&row](int64_t key) {
    return row.block_table[key / row.block_size] * row.block_bytes;
  };
  for (int64_t chunk = begin; chunk < end; chunk += kKeyChunk) {
    const int64_t offset = block_offset(chunk);
    const Block block(row.keys + offset, row.values + offset, row.block_size, head_size);
    const int64_t next = chunk + row.block_size;
    if (chunk % row.block_size == 0 && next < end) {
      prefetch(row.keys + block_offset(next), half_bytes);
    }
    for_each_head_tile(row.num_heads, [&](int64_t head, auto heads) {
      multiply_keys<heads.value>(block, chunk % row.block_size, row.query + head * head_size,
                                 row.scale, row.soft_cap,
                                 row.logits + head * row.row_stride + chunk, row.row_stride);
    });
  }
  const int64_t padded = round_up(end, kLanes);
  for (int64_t h = 0; h < row.num_heads; ++h) {
    float* logits = row.logits + h * row.row_stride;
    for (int64_t j = end; j < padded; ++j) logits[j] = -INFINITY;
    logits += begin;
    if (row.alibi_slopes != nullptr) {
      add_alibi(logits, padded - begin, row.alibi_slopes[h], row.query_bias_position,
                row.bias_positions + begin);
    }
    const float largest = row_max(logits, padded - begin);
    VecF sum = {};
    for (int64_t j = 0; j < padded - begin; j += kLanes) {
      const VecF weight = exp_nonpositive(load<VecF>(logits + j) - largest);
      store(weights + h * kRangeKeys + j, weight);
      sum += weight;
    }
    result.max[h] = largest;
    result.sum[h] = sum_lanes(sum);
  }
  for (int64_t i = 0; i < row.num_heads * head_size; i += kLanes) store(result.output + i, VecF{});
  for (int64_t key = begin; key < end; key += row.block_size - key % row.block_size) {
    const int64_t offset = block_offset(key);
    const Block block(row.keys + offset, row.values + offset, row.block_size, head_size);
    const int64_t token = key % row.block_size;
    const int64_t left = end - key;
    if (left > row.block_size - token) {
      prefetch(row.values + block_offset(key + row.block_size - token), half_bytes);
    }
    const int64_t num_tokens = left < row.block_size - token ? left : row.block_size - token;
    for_each_head_tile(row.num_heads, [&](int64_t head, auto heads) {
      add_values<heads.value, value_vectors(heads.value)>(
          block, 0, token, num_tokens, weights + head * kRangeKeys + key - begin, kRangeKeys,
          result.output + head * head_size);
    });
  }
}

void attend_range(const AttendRow& row, int64_t begin, int64_t end, const RangeResult& result,
                  float* weights) {
  if (row.layout == Layout::kAmx) {
    attend_range_of<AmxBlock>(row, begin, end, result, weights);
  } else if (row.element_type == ElementType::kFloat32) {
    attend_range_of<VecBlock<float>>(row, begin, end, result, weights);
  } else if (row.element_type == ElementType::kBFloat16) {
    attend_range_of<VecBlock<BFloat16>>(row, begin, end, result, weights);
  } else {
    attend_range_of<VecBlock<Float16>>(row, begin, end, result, weights);
  }
}

inline float exp_scalar(float x) { return exp_nonpositive(splat(x))[0]; }

inline uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (value != value) return 0x7FC0u;
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);  // ties to even
}

inline uint16_t round_to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (value != value) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // from 65520 on: infinity
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: a sum with 0.5 rounds to multiples of 2^-24
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;  // ties to even
  }
  return static_cast<uint16_t>(half | (bits & 0x80000000u) >> 16);
}

// A group of ranges merged into the output of its first one: the sum of weighted values, not yet
// divided by the sum of the weights.
struct MergedRanges {
  float max;
  float sum;
  const float* output;  // [head_size]
};

MergedRanges merge_group(const AttendRow& row, int64_t head, float* results, int64_t begin,
                         int64_t end, float sink) {
  const auto result_at = [&row, results](int64_t range) {
    return RangeResult::at(results, range, row.num_heads, row.head_size);
  };
  float largest = sink;
  for (int64_t range = begin; range < end; ++range) {
    largest = larger(result_at(range).max[head], largest);
  }
  float sum = sink > -INFINITY ? exp_scalar(sink - largest) : 0.0f;
  float* merged = result_at(begin).output + head * row.head_size;
  for (int64_t range = begin; range < end; ++range) {
    const RangeResult result = result_at(range);
    const float share = exp_scalar(result.max[head] - largest);
    sum += share * result.sum[head];
    const float* part = result.output + head * row.head_size;
    for (int64_t d = 0; d < row.head_size; d += kLanes) {
      const VecF x = share * load<VecF>(part + d);
      store(merged + d, range == begin ? x : load<VecF>(merged + d) + x);
    }
  }
  return {largest, sum, merged};
}

void write_output(const AttendRow& row, int64_t d, float value, char* output) {
  if (row.element_type == ElementType::kFloat32) {
    reinterpret_cast<float*>(output)[d] = value;
  } else {
    reinterpret_cast<uint16_t*>(output)[d] = row.element_type == ElementType::kBFloat16
                                                 ? round_to_bfloat16(value)
                                                 : round_to_float16(value);
  }
}

void merge_ranges(const AttendRow& row, int64_t head, float* results, char* output, float* audit) {
  const int64_t front_ranges = num_ranges(row.front);
  const float sink = row.sinks != nullptr ? row.sinks[head] : -INFINITY;
  const MergedRanges rest = merge_group(row, head, results, front_ranges, num_ranges(row), sink);
  const float inverse_rest = 1.0f / rest.sum;
  if (front_ranges == 0) {
    float norm = 0.0f;
    for (int64_t d = 0; d < row.head_size; ++d) {
      const float value = rest.output[d] * inverse_rest;
      write_output(row, d, value, output);
      norm += value * value;
    }
    if (audit != nullptr) {
      audit[0] = audit[1] = 0.0f;
      audit[2] = norm;
    }
    return;
  }
  const MergedRanges front = merge_group(row, head, results, 0, front_ranges, -INFINITY);
  const float largest = larger(front.max, rest.max);
  const float front_share = exp_scalar(front.max - largest);
  const float rest_share = exp_scalar(rest.max - largest);
  const float front_sum = front_share * front.sum;
  const float sum = front_sum + rest_share * rest.sum;
  const float inverse_sum = 1.0f / sum;
  float change = 0.0f;
  float norm = 0.0f;
  for (int64_t d = 0; d < row.head_size; ++d) {
    const float value = (front_share * front.output[d] + rest_share * rest.output[d]) * inverse_sum;
    const float difference = value - rest.output[d] * inverse_rest;
    write_output(row, d, value, output);
    change += difference * difference;
    norm += value * value;
  }
  if (audit != nullptr) {
    audit[0] = front_sum / sum;  // a quotient never exceeds 1, a product with the inverse may
    audit[1] = change;
    audit[2] = norm;
  }
}

void weigh_head(const AttendRow& row, int64_t head, float tau, const RowKey* key) {
  float* logits = row.logits + head * row.row_stride;
  const int64_t padded = round_up(row.num_keys, kLanes);
  const float sink = row.sinks != nullptr ? row.sinks[head] : -INFINITY;
  const float inverse_sum = 1.0f / weigh_row(logits, padded, tau, key, row.positions, sink);
  for (int64_t j = 0; j < padded; j += kLanes)
    store(logits + j, load<VecF>(logits + j) * inverse_sum);
}

void add_heads(const AttendRow& row, float* score, int64_t score_block_stride) {
  for (int64_t start = 0; start < row.num_keys; start += row.block_size) {
    const float* weights = row.logits + start;
    const int64_t left = row.num_keys - start;
    add_row(left < row.block_size ? left : row.block_size,
            score + row.block_table[start / row.block_size] * score_block_stride,
            [&](int64_t j, VecF total) {
              VecF share = load<VecF>(weights + j);
              for (int64_t h = 1; h < row.num_heads; ++h) {
                share += load<VecF>(weights + h * row.row_stride + j);
              }
              return total + share;
            });
  }
}

}  // namespace
}  // namespace keyformer::KEYFORMER_ISA
