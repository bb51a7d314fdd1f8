// SPDX-License-Identifier: Apache-2.0
// Vectorised noise. Every operation of minus_ln_fixed is rounded on its own, in the order that
// keyformer_vllm/core/noise.py spells out, so all instruction sets agree to the bit.
#pragma once

#include "noise.h"
#include "vec.h"

namespace keyformer::KEYFORMER_ISA {
namespace {

// A quotient whose division has not been done yet.
struct Fraction {
  VecF numerator;
  VecF denominator;
};

// -ln(x) for positive normal numbers. Its bits are those of the rounded quotient.
inline Fraction minus_ln_fixed(VecF x) {
  const VecI bits = bit_cast<VecI>(x);
  const VecI exponent = (bits - 0x3F3504F3) & static_cast<int32_t>(0xFF800000u);
  const VecF s = 1.0f - bit_cast<VecF>(bits - exponent);
  const VecF z = s * s;
  VecF n = s * -0x1.54d830p+4f;
  n = n + 0x1.e6cb92p+4f;
  n = n + z;
  n = n * s;
  VecF d = s * -0x1.241e86p+5f;
  d = d + 0x1.e6cb92p+4f;
  VecF q = z * 0x1.23b4a4p+3f;
  d = d + q;
  q = __builtin_convertvector(exponent, VecF) * -0x1.62e430p-24f;
  q = q * d;
  return {n + q, d};
}

inline VecF value(Fraction fraction) { return fraction.numerator / fraction.denominator; }

// Uniform draws of one query row for the keys at `positions`.
inline VecF draw_uniform(RowKey row, const int32_t* positions) {
  VecU x = row.a + load<VecU>(positions) * kGolden;
  x ^= x >> 16;
  x *= kMixA;
  // The same as x ^= row.b; x ^= x >> 15: a shift distributes over the exclusive or.
  x = xor_three(x, x >> 15, VecU{} + (row.b ^ (row.b >> 15)));
  x *= kMixB;
  // 23 bits of x ^ (x >> 16) as a mantissa give 1 + 2 r / 2^24; the difference is exact.
  return bit_cast<VecF>(xor_or(x >> 9, x >> 25, VecU{} + 0x3F800000u)) - 0x1.fffffep-1f;
}

// Noise is drawn in short passes over a stretch of keys that stays in the L1 cache. One pass per
// step keeps the dependency chains short: a single loop over hash, logarithm and exponential runs
// at half the speed, because the CPU's schedulers hold too few of its iterations.
constexpr int64_t kNoiseStretch = 256;

// Uniform draws for `count` keys, whole vectors, at most kNoiseStretch.
inline void draw_uniforms(RowKey row, const int32_t* positions, int64_t count, float* noise) {
  for (int64_t j = 0; j < count; j += kLanes) store(noise + j, draw_uniform(row, positions + j));
}

// Replaces uniform draws by Exponential(1) draws, as fractions.
inline void uniforms_to_fractions(int64_t count, float* noise, float* denominators) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const Fraction exponential = minus_ln_fixed(load<VecF>(noise + j));
    store(noise + j, exponential.numerator);
    store(denominators + j, exponential.denominator);
  }
}

// Replaces numbers by their -ln: uniform draws by Exponential(1) draws.
inline void replace_by_minus_ln(int64_t count, float* noise) {
  for (int64_t j = 0; j < count; j += kLanes) {
    store(noise + j, value(minus_ln_fixed(load<VecF>(noise + j))));
  }
}

}  // namespace
}  // namespace keyformer::KEYFORMER_ISA
