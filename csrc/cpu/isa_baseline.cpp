// SPDX-License-Identifier: Apache-2.0
// setup.py gives this file the compiler flags of its instruction set.
#define KEYFORMER_ISA baseline
#include "isa_kernels.h"
