// SPDX-License-Identifier: Apache-2.0
// Checks of values that only the data can break; each message names the argument and the value.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "paged_cache.h"

namespace keyformer {

inline void check_value(bool ok, const char* what, int64_t request, int64_t value) {
  if (ok) return;
  throw std::invalid_argument(std::string(what) + " (request " + std::to_string(request) +
                              ", value " + std::to_string(value) + ")");
}

// Every block that `kv_len` tokens of `request` touch must exist.
inline void check_blocks(const RequestBatch& batch, int64_t request, int64_t kv_len,
                         int64_t max_blocks, int64_t block_size, int64_t num_blocks) {
  const int64_t used = (kv_len + block_size - 1) / block_size;
  check_value(used <= max_blocks, "kv_lens: needs more blocks than block_table has columns",
              request, kv_len);
  const int32_t* row = batch.block_table + request * batch.block_table_stride;
  for (int64_t i = 0; i < used; ++i) {
    check_value(row[i] >= 0 && row[i] < num_blocks, "block_table: block outside the cache", request,
                row[i]);
  }
}

}  // namespace keyformer
