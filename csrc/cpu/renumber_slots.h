// SPDX-License-Identifier: Apache-2.0
// renumber_slots: the place of every token among those that its KV head holds, in the order of
// their positions. Slots are not sorted: compaction moves survivors into holes.
#pragma once

#include <algorithm>

#include "checks.h"
#include "paged_cache.h"
#include "task_pool.h"

namespace keyformer {

struct RenumberSlotsArgs {
  SideView<int32_t> place;
  SideView<const int32_t> position;
  int64_t num_layers;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;
  RequestBatch requests;
  int64_t max_blocks;
};

namespace renumber_slots_detail {

// Which positions are held, one bit each, and how many are held before each word of bits.
struct HeldPositions {
  Scratch<uint64_t> bits;
  Scratch<int32_t> before;
};

// Calls `step(block, offset)` for the slots of a request, in order.
template <typename Step>
void for_each_slot(const RenumberSlotsArgs& args, int64_t request, const Step& step) {
  const int32_t* block_table =
      args.requests.block_table + request * args.requests.block_table_stride;
  const int64_t kv_len = args.requests.kv_lens[request];
  for (int64_t start = 0; start < kv_len; start += args.block_size) {
    const int64_t end = std::min(args.block_size, kv_len - start);
    for (int64_t offset = 0; offset < end; ++offset) {
      step(block_table[start / args.block_size], offset);
    }
  }
}

// Returns false, and writes nothing, when a position is negative or held twice: then the slots are
// not those of one request.
inline bool renumber_one(const RenumberSlotsArgs& args, int64_t layer, int64_t request,
                         int64_t kv_head, HeldPositions& held) {
  const auto position_at = [&](int64_t block, int64_t offset) {
    return args.position.at(layer, block, kv_head)[offset];
  };
  int32_t smallest = 0;
  int32_t largest = 0;
  for_each_slot(args, request, [&](int64_t block, int64_t offset) {
    smallest = std::min(smallest, position_at(block, offset));
    largest = std::max(largest, position_at(block, offset));
  });
  if (smallest < 0) return false;
  const int64_t num_words = largest / 64 + 1;
  uint64_t* bits = held.bits.reserve(num_words);
  int32_t* before = held.before.reserve(num_words);
  std::fill_n(bits, num_words, 0);
  for_each_slot(args, request, [&](int64_t block, int64_t offset) {
    const int32_t position = position_at(block, offset);
    bits[position / 64] |= uint64_t{1} << position % 64;
  });
  int32_t count = 0;
  for (int64_t word = 0; word < num_words; ++word) {
    before[word] = count;
    count += __builtin_popcountll(bits[word]);
  }
  if (count != args.requests.kv_lens[request]) return false;
  for_each_slot(args, request, [&](int64_t block, int64_t offset) {
    const int32_t position = position_at(block, offset);
    const uint64_t lower = (uint64_t{1} << position % 64) - 1;
    args.place.at(layer, block, kv_head)[offset] =
        before[position / 64] + __builtin_popcountll(bits[position / 64] & lower);
  });
  return true;
}

}  // namespace renumber_slots_detail

inline void renumber_slots(const RenumberSlotsArgs& args, const ThreadPool& pool) {
  const int64_t num_reqs = args.requests.num_reqs;
  const int64_t num_kv_heads = args.num_kv_heads;
  for (int64_t request = 0; request < num_reqs; ++request) {
    const int64_t kv_len = args.requests.kv_lens[request];
    check_value(kv_len >= 0, "kv_lens: must not be negative", request, kv_len);
    check_blocks(args.requests, request, kv_len, args.max_blocks, args.block_size, args.num_blocks);
  }
  std::atomic<int64_t> failed_request{-1};
  run_tasks(pool, args.num_layers * num_reqs * num_kv_heads, [&] {
    static thread_local renumber_slots_detail::HeldPositions held;
    return [&args, &failed_request, num_reqs, num_kv_heads, &held = held](int64_t task) {
      const int64_t kv_head = task % num_kv_heads;
      const int64_t request = task / num_kv_heads % num_reqs;
      const int64_t layer = task / num_kv_heads / num_reqs;
      if (!renumber_slots_detail::renumber_one(args, layer, request, kv_head, held)) {
        failed_request.store(request, std::memory_order_relaxed);
      }
    };
  });
  const int64_t failed = failed_request.load(std::memory_order_relaxed);
  check_value(failed < 0, "position: negative or held twice by one KV head", failed,
              failed < 0 ? 0 : args.requests.kv_lens[failed]);
}

}  // namespace keyformer
