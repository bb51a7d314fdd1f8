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
