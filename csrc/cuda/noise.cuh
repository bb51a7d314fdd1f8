// SPDX-License-Identifier: Apache-2.0
// Noise on the device, equal to the bit to keyformer_vllm/core/noise.py: each product and sum is
// rounded on its own (__fmul_rn and __fadd_rn are never contracted), the division is the IEEE one.
#pragma once

#include "cpu/noise.h"
#include "device.cuh"

namespace keyformer::cuda {

// A quotient whose division has not been done yet.
struct Fraction {
  float numerator;
  float denominator;
};

// -ln(x) for positive normal numbers. Its bits are those of the rounded quotient.
__device__ inline Fraction minus_ln_fixed(float x) {
  const int32_t bits = __float_as_int(x);
  const int32_t exponent = (bits - 0x3F3504F3) & static_cast<int32_t>(0xFF800000u);
  const float s = __fsub_rn(1.0f, __int_as_float(bits - exponent));
  const float z = __fmul_rn(s, s);
  float n = __fmul_rn(s, -0x1.54d830p+4f);
  n = __fadd_rn(n, 0x1.e6cb92p+4f);
  n = __fadd_rn(n, z);
  n = __fmul_rn(n, s);
  float d = __fmul_rn(s, -0x1.241e86p+5f);
  d = __fadd_rn(d, 0x1.e6cb92p+4f);
  float q = __fmul_rn(z, 0x1.23b4a4p+3f);
  d = __fadd_rn(d, q);
  // The exponent as a float, by an exact sum: conversions run at a fraction of the rate. Both it
  // and ln(2) lack the factor 2^23 of the other implementations, which changes no bit of their
  // product.
  const float e = __fsub_rn(__int_as_float((exponent >> 23) + 0x4B400000), 0x1.8p+23f);
  q = __fmul_rn(e, -0x1.62e430p-1f);
  q = __fmul_rn(q, d);
  return {__fadd_rn(n, q), d};
}

__device__ inline float value(Fraction fraction) {
  return __fdiv_rn(fraction.numerator, fraction.denominator);
}

// Uniform on (0, 1): the same number as keyformer::draw_uniform, without a conversion. The 23 bits
// as a mantissa give 1 + 2 r / 2^24; the difference is exact.
__device__ inline float draw_uniform_fast(RowKey row, int32_t key_position) {
  const uint32_t mantissa = draw_bits(row, key_position) | 0x3F800000u;
  return __fsub_rn(__int_as_float(static_cast<int32_t>(mantissa)), 0x1.fffffep-1f);
}

__device__ inline Fraction draw_exponential(RowKey row, int32_t key_position) {
  return minus_ln_fixed(draw_uniform_fast(row, key_position));
}

__device__ inline float draw_gumbel(RowKey row, int32_t key_position) {
  return value(minus_ln_fixed(value(draw_exponential(row, key_position))));
}

// The same but for the last bits of the outer logarithm, which is the hardware's.
__device__ inline float draw_gumbel_fast(RowKey row, int32_t key_position) {
  const Fraction exponential = draw_exponential(row, key_position);
  const float quotient = exponential.numerator * fast_reciprocal(exponential.denominator);
  return -0x1.62e430p-1f * fast_log2(quotient);
}

// A row key whose second word has had its share of the shift that follows it, so that a draw is one
// instruction shorter.
struct FoldedRowKey {
  uint32_t a;
  uint32_t b;
};

__device__ inline FoldedRowKey fold(RowKey row) { return {row.a, row.b ^ (row.b >> 15)}; }

// log2(ln 2)
constexpr float kLog2Ln2 = -0x1.0eba78p-1f;

// log2(E / ln 2) of the exponential draw E. The draw is the generator's own, its logarithms are the
// hardware's: E is within 2^-15 of the exact one. Next to 1 the hardware's logarithm has no digit
// left, just where a key weighs most; there two terms of the series take its place.
__device__ inline float log2_exponential_fast(FoldedRowKey row, int32_t key_position) {
  uint32_t x = row.a + static_cast<uint32_t>(key_position) * kGolden;
  x ^= x >> 16;
  x *= kMixA;
  x = x ^ (x >> 15) ^ row.b;
  x *= kMixB;
  const uint32_t mantissa = ((x >> 9) ^ (x >> 25)) | 0x3F800000u;
  const float u = __fsub_rn(__int_as_float(static_cast<int32_t>(mantissa)), 0x1.fffffep-1f);
  const float rest = __fsub_rn(1.0f, u);
  const float series = rest * fmaf(rest, 0x1.715476p-1f, 0x1.715476p+0f);
  return fast_log2(fabsf(rest < 0x1p-7f ? series : fast_log2(u)));
}

}  // namespace keyformer::cuda
