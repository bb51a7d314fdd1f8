// SPDX-License-Identifier: Apache-2.0
// Vectorised noise. Every operation of ln_fixed is rounded on its own, in the order that
// keyformer_vllm/core/noise.py spells out, so all instruction sets agree to the bit.
#pragma once

#include "noise.h"
#include "vec.h"

namespace keyformer::KEYFORMER_ISA {
namespace {

// Positive normal numbers only.
inline VecF ln_fixed(VecF x) {
  const VecI bits = bit_cast<VecI>(x);
  const VecI exponent = (bits - 0x3F3504F3) >> 23;
  const VecF t = bit_cast<VecF>(bits - (exponent << 23)) - 1.0f;
  const VecF z = t * t;
  VecF p = splat(0x1.204376p-4f);
  p = p * t;
  p = p + -0x1.d7a370p-4f;
  p = p * t;
  p = p + 0x1.de4a34p-4f;
  p = p * t;
  p = p + -0x1.fcba9ep-4f;
  p = p * t;
  p = p + 0x1.23d37ep-3f;
  p = p * t;
  p = p + -0x1.555ca0p-3f;
  p = p * t;
  p = p + 0x1.999d58p-3f;
  p = p * t;
  p = p + -0x1.fffff8p-3f;
  p = p * t;
  p = p + 0x1.555554p-2f;
  p = p * t;
  p = p * z;
  const VecF f = __builtin_convertvector(exponent, VecF);
  VecF q = f * -0x1.bd0106p-13f;
  p = p + q;
  q = z * 0.5f;
  p = p - q;
  p = t + p;
  q = f * 0.693359375f;
  return p + q;
}

// Exponential(1) draws of one query row for the keys at `positions`.
inline VecF draw_exponential(RowKey row, const int32_t* positions) {
  VecU x = row.a + load<VecU>(positions) * kGolden;
  x ^= x >> 16;
  x *= kMixA;
  x ^= row.b;
  x ^= x >> 15;
  x *= kMixB;
  x ^= x >> 16;
  const VecI odd = bit_cast<VecI>(((x >> 9) << 1) + 1u);
  const VecF uniform = __builtin_convertvector(odd, VecF) * 0x1p-24f;
  return -ln_fixed(uniform);
}

// Standard Gumbel noise from an exponential draw.
inline VecF gumbel_from_exponential(VecF exponential) { return -ln_fixed(exponential); }

}  // namespace
}  // namespace keyformer::KEYFORMER_ISA
