// SPDX-License-Identifier: Apache-2.0
// setup.py gives this file the compiler flags of its instruction set.
#if defined(__x86_64__)
#define KEYFORMER_ISA avx512bf16
#include "isa_kernels.h"
#endif
