// SPDX-License-Identifier: Apache-2.0
// The order in which the emulation runs the threads of a block. Apart from the emulation, whose
// macros must not meet torch's headers.
#pragma once

namespace keyformer::cuda {

void set_reversed(bool reversed);

}  // namespace keyformer::cuda
