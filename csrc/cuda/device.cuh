// SPDX-License-Identifier: Apache-2.0
// The few things of the CUDA runtime that the kernels use by another name. Compiled as plain C++,
// the tests put an emulation of the execution model in place of the runtime.
#pragma once

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace keyformer::cuda {

// Stops the device: every later call fails, so wrong data cannot go unnoticed. Not inlined, to keep
// the registers of printf out of the kernels.
[[noreturn]] __device__ __noinline__ inline void fail(const char* what, int request, int value) {
  printf("%s (request %d, value %d)\n", what, request, value);
  __trap();
  __builtin_unreachable();
}

// Dynamic shared memory of the block.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(16) char keyformer_shared[];
  return keyformer_shared;
}

// 2^x, about 2 ulp; results below 2^-126 become 0.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error about 2^-22 between 1/2 and 2, relative beyond.
__device__ inline float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, about 1 ulp.
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// c += a * b for a 16 x 16 tile times a 16 x 8 tile, fp32 sums. Fragments as in the PTX manual,
// mma.m16n8k16: lane = 4 * g + t holds rows g and g + 8 of a and c, columns g of b.
template <typename T>
__device__ inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]);

template <>
__device__ inline void multiply_accumulate<BFloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void multiply_accumulate<Float16>(float (&c)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two numbers rounded to T, the first in the low half.
template <typename T>
__device__ inline uint32_t pack(float low, float high);

template <>
__device__ inline uint32_t pack<BFloat16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <>
__device__ inline uint32_t pack<Float16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ inline float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 2-byte elements from shared memory. Lane 8 * j + r names row r of matrix
// j, 16 bytes; lane 4 * g + t gets elements 2 * t and 2 * t + 1 of row g, or of column g.
__device__ inline void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// Starts a copy of 16 bytes into shared memory, past the L1 cache; zeros where `exists` is false.
__device__ inline void copy_async_16(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

__device__ inline void copy_async_4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Closes a group of copies; waiting leaves the `kNewest` last groups of the thread in flight. Other
// threads see the copies behind the next barrier only.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kNewest>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

template <typename Args>
void launch(void (*kernel)(Args), dim3 grid, int num_threads, int shared_bytes, void* stream,
            const Args& args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  cudaError_t status = cudaSuccess;
  constexpr int kDefaultShared = 48 * 1024;
  if (shared_bytes > kDefaultShared) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (status == cudaSuccess) {
    kernel<<<grid, num_threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA launch failed: ") + cudaGetErrorString(status));
  }
}

}  // namespace keyformer::cuda

#else

#include "cuda_emulation.h"

#endif
