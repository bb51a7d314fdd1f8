// SPDX-License-Identifier: Apache-2.0
// Counter-based noise, the scalar twin of keyformer_vllm/core/noise.py. Equal to the bit: compile
// without floating-point contraction. The CUDA kernels share these functions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KEYFORMER_NOISE __host__ __device__ inline
#else
#define KEYFORMER_NOISE inline
#endif

namespace keyformer {

constexpr uint32_t kGolden = 0x9E3779B9u;
constexpr uint32_t kMixA = 0x7FEB352Du;
constexpr uint32_t kMixB = 0x846CA68Bu;

KEYFORMER_NOISE uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= kMixA;
  x ^= x >> 15;
  x *= kMixB;
  return x ^ (x >> 16);
}

struct RowKey {
  uint32_t a;
  uint32_t b;
};

// Key of one (request, layer, query head, query position); positions enter modulo 2^32.
KEYFORMER_NOISE RowKey make_row_key(int64_t noise_key, int64_t layer, int64_t query_head,
                                    int64_t query_position) {
  const uint64_t key = static_cast<uint64_t>(noise_key);
  const uint32_t low = static_cast<uint32_t>(key);
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t layer32 = static_cast<uint32_t>(layer);
  const uint32_t head32 = static_cast<uint32_t>(query_head);
  const uint32_t position32 = static_cast<uint32_t>(query_position);
  uint32_t h1 = mix32(low ^ 0x243F6A88u);
  h1 = mix32(h1 + layer32);
  h1 = mix32(h1 ^ head32);
  uint32_t h2 = mix32(high ^ 0x85A308D3u);
  h2 = mix32(h2 ^ layer32);
  h2 = mix32(h2 + head32);
  return {mix32(h1 + position32), mix32(h2 ^ position32)};
}

// 23 uniform bits.
KEYFORMER_NOISE uint32_t draw_bits(RowKey row, int64_t key_position) {
  uint32_t x = row.a + static_cast<uint32_t>(key_position) * kGolden;
  x ^= x >> 16;
  x *= kMixA;
  x ^= row.b;
  x ^= x >> 15;
  x *= kMixB;
  x ^= x >> 16;
  return x >> 9;
}

// Uniform on (0, 1), exact in fp32: odd multiples of 2^-24.
KEYFORMER_NOISE float draw_uniform(RowKey row, int64_t key_position) {
  return static_cast<float>(static_cast<int32_t>(2 * draw_bits(row, key_position) + 1)) * 0x1p-24f;
}

}  // namespace keyformer
