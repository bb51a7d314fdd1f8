// SPDX-License-Identifier: Apache-2.0
#include "emulated_order.h"

#include "fibers.h"

namespace keyformer::cuda {

void set_reversed(bool reversed) { emulation::Fibers::instance().set_reversed(reversed); }

}  // namespace keyformer::cuda
