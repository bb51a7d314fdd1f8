// SPDX-License-Identifier: Apache-2.0
// The CUDA execution model on one CPU thread, so that tests can run the kernels without a GPU.
//
// The threads of a block are fibers (fibers.h) that run one at a time and give way at barriers and
// warp operations. Blocks run one after the other. Shared memory starts as garbage (NaN as a float)
// in each block and ends in a guard. Whoever forgets a barrier gets another result when the fibers
// run in the other order: tests run both.
//
// It shows what a kernel computes, not that it compiles for a GPU, and neither speed nor the exact
// rounding of the tensor cores: products are exact and added one by one in fp32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __noinline__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// Blocks do not overlap in time, so one copy is enough.
#define __shared__ static

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct alignas(8) float2 {
  float x;
  float y;
};

struct alignas(16) float4 {
  float x;
  float y;
  float z;
  float w;
};

struct alignas(16) uint4 {
  unsigned x;
  unsigned y;
  unsigned z;
  unsigned w;
};

#define threadIdx (keyformer::emulation::block().thread_index())
#define blockIdx (keyformer::emulation::block().index)
#define gridDim (keyformer::emulation::block().grid)

namespace keyformer::emulation {

constexpr int kWarpSize = 32;
constexpr size_t kSharedBytes = 227 * 1024;  // the most a block can have on sm_90

class Block {
 public:
  dim3 grid;
  dim3 index;
  char* shared;
  int num_threads = 0;

  dim3 thread_index() const { return {static_cast<unsigned>(Fibers::instance().current()), 0, 0}; }

  void sync() { Fibers::instance().wait_for_block(); }

  // Every lane gives `size` bytes; returns those of all lanes, valid until the lane's next call.
  template <typename T>
  const T* exchange(const T& own) {
    static_assert(sizeof(T) <= kLaneBytes, "more bytes than a lane's place");
    const int thread = Fibers::instance().current();
    const int warp = thread / kWarpSize;
    // Two buffers in turn: who enters the next exchange may still be read in this one.
    char* buffer = lanes_[warp][turn_[thread] ^= 1];
    std::memcpy(buffer + thread % kWarpSize * sizeof(T), &own, sizeof(T));
    Fibers::instance().wait_for_warp();
    return reinterpret_cast<const T*>(buffer);
  }

 private:
  static constexpr size_t kLaneBytes = 24;
  static constexpr int kMaxWarps = Fibers::kMaxFibers / kWarpSize;
  alignas(16) char lanes_[kMaxWarps][2][kWarpSize * kLaneBytes];
  unsigned char turn_[Fibers::kMaxFibers] = {};
};

// Copies into shared memory that a thread has started. They happen as late as they may, or at once
// where the threads run in the other order: so a missing wait shows in one, and a buffer that is
// still read in the other.
class AsyncCopies {
 public:
  static AsyncCopies& of_thread() { return threads()[Fibers::instance().current()]; }

  // What a thread that failed has left.
  static void forget_all() {
    for (int i = 0; i < Fibers::kMaxFibers; ++i) threads()[i] = AsyncCopies();
  }

  void start(void* to, const void* from, size_t size, bool exists) {
    const Copy copy{to, from, size, exists};
    if (Fibers::instance().is_reversed()) {
      perform(copy);
    } else {
      open_.push_back(copy);
    }
  }

  void close() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }

  void wait(size_t newest) {
    while (groups_.size() > newest) {
      for (const Copy& copy : groups_.front()) perform(copy);
      groups_.erase(groups_.begin());
    }
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t size;
    bool exists;
  };

  static AsyncCopies* threads() {
    static AsyncCopies instances[Fibers::kMaxFibers];
    return instances;
  }

  static void perform(const Copy& copy) {
    if (copy.exists) {
      std::memcpy(copy.to, copy.from, copy.size);
    } else {
      std::memset(copy.to, 0, copy.size);
    }
  }

  std::vector<Copy> open_;
  std::vector<std::vector<Copy>> groups_;
};

inline Block& block() {
  static Block instance;
  return instance;
}

inline float bits_to_float(uint16_t bits, bool is_bfloat16) {
  if (is_bfloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  const int exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  float value = exponent == 0 ? std::ldexp(mantissa, -24)
                              : std::ldexp(mantissa + 1024.0f, exponent - 25);
  if (exponent == 31) value = mantissa == 0 ? INFINITY : NAN;
  return bits & 0x8000 ? -value : value;
}

// Rounded to nearest, ties to even.
inline uint16_t float_to_bits(float value, bool is_bfloat16) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000;
  if (value != value) return 0x7FFF;
  if (is_bfloat16) return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);
  // Numbers of an exponent lie 2^(exponent - 10) apart, those below 2^-14 as far as there.
  const int exponent = std::max(std::ilogb(std::max(magnitude, 0x1p-14f)), -14);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // A step into the next exponent carries over in the sum.
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + steps));
}

}  // namespace keyformer::emulation

using std::min;
using std::max;

inline void __syncthreads() { keyformer::emulation::block().sync(); }
inline void __syncwarp(unsigned = ~0u) { keyformer::emulation::block().exchange(0); }

template <typename T>
inline T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % 32;
  const T* lanes = keyformer::emulation::block().exchange(value);
  return lanes[lane >= distance ? lane - distance : lane];
}

template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
  return keyformer::emulation::block().exchange(value)[lane];
}

template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32;
  return keyformer::emulation::block().exchange(value)[lane ^ mask];
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

template <typename To, typename From>
inline To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline int __float_as_int(float value) { return cast_bits<int>(value); }
inline float __int_as_float(int bits) { return cast_bits<float>(bits); }
inline long long __double_as_longlong(double value) { return cast_bits<long long>(value); }

inline int atomicAdd(int* target, int value) {
  const int old = *target;
  *target += value;
  return old;
}

inline unsigned atomicOr(unsigned* target, unsigned bits) {
  const unsigned old = *target;
  *target |= bits;
  return old;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int atomicMin(int* target, int value) {
  const int old = *target;
  *target = std::min(old, value);
  return old;
}

inline int atomicMax(int* target, int value) {
  const int old = *target;
  *target = std::max(old, value);
  return old;
}

namespace keyformer::cuda {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

[[noreturn]] inline void fail(const char* what, int request, int value) {
  throw std::invalid_argument(std::string(what) + " (request " + std::to_string(request) +
                              ", value " + std::to_string(value) + ")");
}

inline char* shared_memory() { return emulation::block().shared; }

inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }

template <typename T>
inline uint32_t pack(float low, float high) {
  constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;
  return emulation::float_to_bits(low, kIsBFloat16) |
         static_cast<uint32_t>(emulation::float_to_bits(high, kIsBFloat16)) << 16;
}

inline float half_to_float(uint16_t bits) { return emulation::bits_to_float(bits, false); }

inline void load_matrices(uint32_t (&to)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  const auto* rows = emulation::block().exchange(static_cast<const char*>(row));
  for (int j = 0; j < 4; ++j) std::memcpy(&to[j], rows[8 * j + lane / 4] + lane % 4 * 4, 4);
}

inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  const auto* rows = emulation::block().exchange(static_cast<const char*>(row));
  for (int j = 0; j < 4; ++j) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      std::memcpy(&pair[i], rows[8 * j + lane % 4 * 2 + i] + lane / 4 * 2, 2);
    }
    to[j] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

inline void copy_async_16(void* to, const void* from, bool exists) {
  emulation::AsyncCopies::of_thread().start(to, from, 16, exists);
}

inline void copy_async_4(void* to, const void* from) {
  emulation::AsyncCopies::of_thread().start(to, from, 4, true);
}

inline void close_copies() { emulation::AsyncCopies::of_thread().close(); }

template <int kNewest>
inline void wait_for_copies() {
  emulation::AsyncCopies::of_thread().wait(kNewest);
}

template <typename T>
inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Fragments {
    uint32_t a[4];
    uint32_t b[2];
  };
  constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;
  Fragments own;
  std::memcpy(own.a, a, sizeof(a));
  std::memcpy(own.b, b, sizeof(b));
  const int lane = threadIdx.x % 32;
  const Fragments* lanes = emulation::block().exchange(own);
  const auto half = [](uint32_t pair, int k) {
    return emulation::bits_to_float(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair), kIsBFloat16);
  };
  // Element (row, k) of a is in lane 4 * (row % 8) + k % 8 / 2, register row / 8 + 2 * (k / 8);
  // element (k, column) of b in lane 4 * column + k % 8 / 2, register k / 8.
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float left = half(lanes[4 * (row % 8) + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k);
      const float right = half(lanes[4 * column + k % 8 / 2].b[k / 8], k);
      c[i] += left * right;
    }
  }
}

template <typename Args>
void launch(void (*kernel)(Args), dim3 grid, int num_threads, int shared_bytes, void*,
            const Args& args) {
  constexpr int kGuardBytes = 64;
  static char memory[emulation::kSharedBytes + kGuardBytes];
  if (static_cast<size_t>(shared_bytes) > emulation::kSharedBytes) {
    throw std::runtime_error("more shared memory than a block can have");
  }
  emulation::Block& block = emulation::block();
  block.grid = grid;
  block.shared = memory + (16 - reinterpret_cast<uintptr_t>(memory) % 16) % 16;
  block.num_threads = num_threads;
  emulation::AsyncCopies::forget_all();
  const unsigned num_blocks = grid.x * grid.y * grid.z;
  for (unsigned i = 0; i < num_blocks; ++i) {
    block.index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    std::memset(memory, 0xFF, sizeof(memory));
    emulation::Fibers::instance().run(num_threads, [&] { kernel(args); });
    for (const char* guard = block.shared + shared_bytes; guard < memory + sizeof(memory);
         ++guard) {
      if (*guard != '\xFF') throw std::runtime_error("written behind the shared memory");
    }
  }
}

}  // namespace keyformer::cuda
