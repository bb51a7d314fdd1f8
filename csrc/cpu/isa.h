// SPDX-License-Identifier: Apache-2.0
// What the code of one instruction set offers to the drivers, and the choice among them.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "attend_row.h"
#include "noise.h"
#include "paged_cache.h"

namespace keyformer {

// Consecutive scored query rows of one request, all query heads of one KV head.
struct ScoreTile {
  int64_t head_size;
  int64_t block_size;
  int64_t num_heads;  // query heads per KV head
  int64_t num_rows;
  ElementType element_type;
  Layout layout;
  float scale;
  float soft_cap;              // 0: none
  const char* keys;            // K of this (layer, KV head) in block 0
  int64_t block_bytes;         // from block to block
  const int32_t* block_table;  // [num_blocks of the request]
  // [query vectors / product_vectors, head_size, product_vectors]: the vectors (row, head) in
  // ascending order, as load_query leaves them; the last ones may be missing
  const float* query;
  const int32_t* visible;     // [num_rows] keys the row sees, ascending
  const float* tau;           // [num_rows]
  const RowKey* row_keys;     // [num_rows, num_heads], nullptr: no noise
  const float* alibi_slopes;  // [num_heads], nullptr: no bias
  const float* sinks;         // [num_heads] logits that only the normaliser sees, nullptr: none
  // Of this KV head, [keys, padded to whole chunks], for noise and for bias; only read where there
  // is any.
  const int32_t* positions;
  const int32_t* bias_positions;
  const int32_t* query_bias_positions;  // [num_rows]
  float* weights;                       // [num_rows, num_heads, row_stride] scratch
  float* inverse_sums;                  // [num_rows, num_heads] scratch, of the weights
  int64_t row_stride;                   // multiple of 16
  float* panel;                         // [head_size, kKeyChunk] scratch
};

struct IsaKernels {
  const char* name;
  int64_t product_vectors;  // query vectors that one register-blocked product takes
  // Converts one query vector to what the products take: fp32, or pairs of bf16 in half as many
  // words. Word i goes to target[i * stride].
  void (*load_query)(const char* source, ElementType type, int64_t head_size, float* target,
                     int64_t stride);
  // Fills the weights of each row and head and the inverse of their sums.
  void (*compute_tile)(const ScoreTile& tile);
  // Adds the normalised rows of a computed tile, in order, to the scores of this KV head; the
  // query heads of one row are summed first, in ascending order.
  void (*add_tile)(const ScoreTile& tile, float* score, int64_t score_block_stride);
  // Noise of one row for positions [num_keys, padded to whole chunks]: gumbel, or exponential
  // draws.
  void (*fill_noise)(RowKey row, const int32_t* positions, int64_t num_keys, bool gumbel,
                     float* noise);
  // Leaves the logits of keys [begin, end) in `row.logits` and the range's share of the attention
  // in `result`. `weights` is scratch [num_heads, kRangeKeys].
  void (*attend_range)(const AttendRow& row, int64_t begin, int64_t end, const RangeResult& result,
                       float* weights);
  // Merges the ranges of one query head and writes its output, rounded to the element type. Unless
  // `audit` is nullptr, it gets the share of the front in the attention, the squared norm of what
  // the output would change by without the front, and its own squared norm.
  void (*merge_ranges)(const AttendRow& row, int64_t head, float* results, char* output,
                       float* audit);
  // Turns the logits of one query head into its normalised weights. `key` is nullptr for a row
  // without noise.
  void (*weigh_head)(const AttendRow& row, int64_t head, float tau, const RowKey* key);
  // Adds the weights of all query heads, summed in ascending order, to the scores of the KV head.
  void (*add_heads)(const AttendRow& row, float* score, int64_t score_block_stride);
};

namespace baseline {
const IsaKernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const IsaKernels& kernels();
}
namespace avx512 {
const IsaKernels& kernels();
}
namespace avx512bf16 {
const IsaKernels& kernels();
}
#endif

enum class Isa : int32_t { kAuto = 0, kBaseline = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Bf16 = 4 };

#if defined(__x86_64__)
// Asked for directly: not every compiler knows this name in __builtin_cpu_supports.
inline bool cpu_has_bf16_products() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1u) != 0;
}
#endif

inline bool cpu_has(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16) return cpu_has(Isa::kAvx512) && cpu_has_bf16_products();
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  // Every CPU with AVX2 and FMA also converts half precision (F16C).
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == Isa::kBaseline || isa == Isa::kAuto;
}

inline const IsaKernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAuto) {
    if (cpu_has(Isa::kAvx512Bf16)) return avx512bf16::kernels();
    if (cpu_has(Isa::kAvx512)) return avx512::kernels();
    if (cpu_has(Isa::kAvx2)) return avx2::kernels();
  }
  if (isa == Isa::kAvx512Bf16) return avx512bf16::kernels();
  if (isa == Isa::kAvx512) return avx512::kernels();
  if (isa == Isa::kAvx2) return avx2::kernels();
#endif
  return baseline::kernels();
}

}  // namespace keyformer
