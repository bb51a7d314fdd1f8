// SPDX-License-Identifier: Apache-2.0
// Vectors of the instruction set this translation unit is compiled for. One source serves them all;
// only the fused multiply-add and the fp16 conversion name an instruction. Include after defining
// KEYFORMER_ISA. Everything sits in an unnamed namespace: code of two instruction sets must never
// be merged by the linker, so this header also keeps away from the templates of the library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__F16C__)
#include <immintrin.h>
#endif

#include "paged_cache.h"

namespace keyformer::KEYFORMER_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kTileRows = 6;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 6;
#endif

constexpr int kLanes = kVectorBytes / 4;
static_assert(kKeyChunk % (2 * kLanes) == 0, "a key chunk is whole pairs of vectors");

typedef float VecF __attribute__((vector_size(kVectorBytes)));
typedef int32_t VecI __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VecU __attribute__((vector_size(kVectorBytes)));
typedef uint16_t VecHalf __attribute__((vector_size(kVectorBytes / 2)));

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Vec, typename Scalar>
inline Vec load(const Scalar* source) {
  Vec value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

template <typename Vec, typename Scalar>
inline void store(Scalar* target, Vec value) {
  std::memcpy(target, &value, sizeof(value));
}

inline VecF splat(float value) { return value - VecF{}; }

// Fused where the instruction set has it. Never used for noise, which must not depend on it.
inline VecF multiply_add(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512BF16__)
// Products of bf16 run on pairs of dimensions that share a 32-bit word.
constexpr bool kHasPairs = true;

// Both products of each pair of bf16 added to the sum in fp32; subnormal numbers count as 0.
inline VecF multiply_add_pairs(VecU a, VecU b, VecF c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool kHasPairs = false;

inline VecF multiply_add_pairs(VecU, VecU, VecF c) { return c; }  // named, never called
#endif

// Adds the product of one word of a query vector, a number or a pair, with those of the keys.
template <bool kPairs>
inline VecF add_product(float query, VecF keys, VecF sum) {
  if constexpr (kPairs) {
    return multiply_add_pairs(VecU{} + bit_cast<uint32_t>(query), bit_cast<VecU>(keys), sum);
  } else {
    return multiply_add(splat(query), keys, sum);
  }
}

inline VecU xor_three(VecU a, VecU b, VecU c) {
#if defined(__AVX512F__)
  return (VecU)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// (a ^ b) | c
inline VecU xor_or(VecU a, VecU b, VecU c) {
#if defined(__AVX512F__)
  return (VecU)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xBE);
#else
  return (a ^ b) | c;
#endif
}

// The larger of each lane; where `a` is NaN, `b`: a NaN must be on the right to survive.
inline VecF larger(VecF a, VecF b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  // Rebias the exponent by a multiplication: exact, and right for subnormal halves as well.
  float value = bit_cast<float>(magnitude) * 0x1p112f;
  if (magnitude >= 0x0F800000u) value = bit_cast<float>(magnitude | 0x7F800000u);  // inf, NaN
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

inline VecF load_as_float(const float* source) { return load<VecF>(source); }

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline VecF load_as_float(const BFloat16* source) {
  const VecU wide = __builtin_convertvector(load<VecHalf>(source), VecU);
  return bit_cast<VecF>(wide << 16);
}

#if defined(__AVX512BF16__)
struct InterleaveIndex {
  int16_t low[32] = {};
  int16_t high[32] = {};

  constexpr InterleaveIndex() {
    for (int i = 0; i < 16; ++i) {
      low[2 * i] = static_cast<int16_t>(i);
      low[2 * i + 1] = static_cast<int16_t>(32 + i);
      high[2 * i] = static_cast<int16_t>(16 + i);
      high[2 * i + 1] = static_cast<int16_t>(48 + i);
    }
  }
};
constexpr InterleaveIndex kInterleave;

// 32 numbers of one row and those below them as 32 pairs.
inline void interleave(const BFloat16* first, const BFloat16* second, VecF pairs[2]) {
  const __m512i a = _mm512_loadu_si512(first);
  const __m512i b = _mm512_loadu_si512(second);
  pairs[0] =
      _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, _mm512_loadu_si512(kInterleave.low), b));
  pairs[1] =
      _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, _mm512_loadu_si512(kInterleave.high), b));
}
#else
inline void interleave(const BFloat16*, const BFloat16*, VecF*) {}  // named, never called
#endif

inline VecF load_as_float(const Float16* source) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  VecF value = {};
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = half_to_float(source[lane].bits);
  return value;
#endif
}

inline float max_lane(VecF value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
  return result;
}

inline float sum_lanes(VecF value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; ++lane) result += value[lane];
  return result;
}

// 2^x for x <= 0, also -inf; below 2^-126.5 the result is 0. About 1 ulp.
inline VecF exp2_nonpositive(VecF x) {
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecF clamped = larger(splat(-127.0f), x);
  const VecF shifted = clamped + magic;
  const VecF r = clamped - (shifted - magic);
  VecF p = splat(0x1.5bba14p-10f);
  p = multiply_add(p, r, splat(0x1.3cea88p-7f));
  p = multiply_add(p, r, splat(0x1.c6b752p-5f));
  p = multiply_add(p, r, splat(0x1.ebf9bcp-3f));
  p = multiply_add(p, r, splat(0x1.62e42ap-1f));
  p = multiply_add(p, r, splat(1.0f));
  // An exponent of -127 gives the bits of 0.
  return p * bit_cast<VecF>((bit_cast<VecI>(shifted) << 23) + 0x3F800000);
}

// exp for finite or -inf arguments; below ln(FLT_MIN) the result is 0. About 1 ulp.
inline VecF exp_nonpositive(VecF x) {
  const VecF lowest = splat(-87.3f);
  const VecF clamped = x < lowest ? lowest : x;
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecF shifted = clamped * 1.44269504088896341f + magic;
  const VecF n = shifted - magic;
  VecF r = multiply_add(n, splat(-0.693359375f), clamped);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  VecF p = splat(1.9875691500e-4f);
  p = multiply_add(p, r, splat(1.3981999507e-3f));
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + 1.0f;
  const VecI exponent = bit_cast<VecI>(shifted) - bit_cast<VecI>(magic);
  const VecF power = bit_cast<VecF>((exponent + 127) << 23);
  return x < lowest ? VecF{} : p * power;
}

// cap * tanh(x / cap), the soft cap of logits.
inline VecF soft_cap_logits(VecF x, float cap) {
  const VecF z = x * (1.0f / cap);
  const VecF magnitude = z < 0.0f ? -z : z;
  const VecF decay = exp_nonpositive(-2.0f * magnitude);
  const VecF tanh = (1.0f - decay) / (1.0f + decay);
  return cap * (z < 0.0f ? -tanh : tanh);
}

}  // namespace
}  // namespace keyformer::KEYFORMER_ISA
