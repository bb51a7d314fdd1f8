// SPDX-License-Identifier: Apache-2.0
// All kernels, compiled for the instruction set of the including file, which defines KEYFORMER_ISA.
#pragma once

#include "attend_kernels.h"
#include "isa.h"
#include "score_tile.h"

namespace keyformer::KEYFORMER_ISA {

#define KEYFORMER_STRINGIZE_(x) #x
#define KEYFORMER_STRINGIZE(x) KEYFORMER_STRINGIZE_(x)

const IsaKernels& kernels() {
  static constexpr IsaKernels kKernels = {KEYFORMER_STRINGIZE(KEYFORMER_ISA),
                                          kTileRows,
                                          load_query,
                                          compute_tile,
                                          add_tile,
                                          fill_noise,
                                          attend_range,
                                          merge_ranges,
                                          weigh_head,
                                          add_heads};
  return kKernels;
}

}  // namespace keyformer::KEYFORMER_ISA
