// SPDX-License-Identifier: Apache-2.0
// compact_kv: moves the survivors of the freed front into the holes behind it.
//
//   slots   [ freed front: num_evict )[ retained: kv_len - num_evict )
//   keep      . x . . x                 x x . x . x
//                 \    \________________________^
//                  \__________________^
//
// As many survivors sit in the front as there are holes behind it; they pair up by rank. Sources
// and targets are disjoint, so the order of the moves cannot matter. exchange_kv also puts what was
// in a hole where the survivor came from, so that the front holds the others.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
#include "paged_cache.h"
#include "task_pool.h"

namespace keyformer {

struct CompactKvArgs {
  PagedCache cache;  // all layers
  SideView<float> score;
  SideView<int32_t> position;
  RequestBatch requests;  // kv_lens before the eviction
  int64_t max_blocks;
  const int32_t* num_evict;  // [num_reqs]
  const uint8_t* keep;       // [num_layers, num_reqs, num_kv_heads, max_kv_len]
  int64_t max_kv_len;
  bool exchange;  // whether the front gets what it makes room for
};

namespace compact_kv_detail {

struct Move {
  char* source;  // the (layer, block, head) that holds the token
  char* target;
  int64_t source_token;  // within its block
  int64_t target_token;
};

template <bool kExchange, typename T>
void move_values(T* source, T* target, int64_t count) {
  if constexpr (kExchange) {
    std::swap_ranges(source, source + count, target);
  } else {
    std::memcpy(target, source, count * sizeof(T));
  }
}

template <bool kExchange, typename T>
void move_vec(const PagedCache& cache, const Move& move) {
  T* source = reinterpret_cast<T*>(move.source);
  T* target = reinterpret_cast<T*>(move.target);
  const int64_t head_size = cache.head_size;
  const int64_t block_size = cache.block_size;
  for (int64_t d = 0; d < head_size; ++d) {
    move_values<kExchange>(source + d * block_size + move.source_token,
                           target + d * block_size + move.target_token, 1);
  }
  const int64_t values = head_size * block_size;
  move_values<kExchange>(source + values + move.source_token * head_size,
                         target + values + move.target_token * head_size, head_size);
}

// 2-byte elements in pairs. K: groups of 16 tokens, inside them pairs of dimensions. V: groups of
// 16 dimensions, inside them pairs of tokens.
template <bool kExchange>
void move_amx(const PagedCache& cache, const Move& move) {
  const int64_t head_size = cache.head_size;
  const int64_t block_size = cache.block_size;
  const auto key_offset = [head_size](int64_t t) { return t / 16 * 16 * head_size + t % 16 * 2; };
  uint16_t* source = reinterpret_cast<uint16_t*>(move.source);
  uint16_t* target = reinterpret_cast<uint16_t*>(move.target);
  uint16_t* source_key = source + key_offset(move.source_token);
  uint16_t* target_key = target + key_offset(move.target_token);
  for (int64_t pair = 0; pair < head_size / 2; ++pair) {
    move_values<kExchange>(source_key + pair * 32, target_key + pair * 32, 2);
  }
  const auto value_offset = [head_size, block_size](int64_t t) {
    return head_size * block_size + t / 2 * 32 + t % 2;
  };
  uint16_t* source_value = source + value_offset(move.source_token);
  uint16_t* target_value = target + value_offset(move.target_token);
  for (int64_t group = 0; group < head_size / 16; ++group) {
    const int64_t offset = group * 16 * block_size;
    for (int64_t d = 0; d < 16; ++d) {
      move_values<kExchange>(source_value + offset + d * 2, target_value + offset + d * 2, 1);
    }
  }
}

template <bool kExchange>
void move_token(const PagedCache& cache, const Move& move) {
  if (cache.layout == Layout::kAmx) {
    move_amx<kExchange>(cache, move);
  } else if (cache.element_size == 1) {
    move_vec<kExchange, uint8_t>(cache, move);
  } else if (cache.element_size == 2) {
    move_vec<kExchange, uint16_t>(cache, move);
  } else {
    move_vec<kExchange, uint32_t>(cache, move);
  }
}

// Returns false, and moves nothing, when `keep` does not hold exactly the survivors it must.
template <bool kExchange>
bool compact_one(const CompactKvArgs& args, int64_t layer, int64_t request, int64_t kv_head) {
  const PagedCache& cache = args.cache;
  const int64_t kv_len = args.requests.kv_lens[request];
  const int64_t num_evict = args.num_evict[request];
  const uint8_t* keep =
      args.keep +
      ((layer * args.requests.num_reqs + request) * cache.num_kv_heads + kv_head) * args.max_kv_len;
  const auto kept = [](uint8_t flag) { return flag != 0; };
  if (std::count_if(keep, keep + kv_len, kept) != kv_len - num_evict) return false;
  const int32_t* block_table =
      args.requests.block_table + request * args.requests.block_table_stride;
  const int64_t head_offset = layer * cache.layer_stride + kv_head * cache.head_stride;
  int64_t hole = num_evict;
  for (int64_t slot = 0; slot < num_evict; ++slot) {
    if (!kept(keep[slot])) continue;
    while (kept(keep[hole])) ++hole;
    const int64_t source_block = block_table[slot / cache.block_size];
    const int64_t target_block = block_table[hole / cache.block_size];
    const int64_t source_token = slot % cache.block_size;
    const int64_t target_token = hole % cache.block_size;
    ++hole;
    const int64_t source_offset = head_offset + source_block * cache.block_stride;
    const int64_t target_offset = head_offset + target_block * cache.block_stride;
    move_token<kExchange>(
        cache, {cache.data + source_offset * cache.element_size,
                cache.data + target_offset * cache.element_size, source_token, target_token});
    move_values<kExchange>(args.score.at(layer, source_block, kv_head) + source_token,
                           args.score.at(layer, target_block, kv_head) + target_token, 1);
    move_values<kExchange>(args.position.at(layer, source_block, kv_head) + source_token,
                           args.position.at(layer, target_block, kv_head) + target_token, 1);
  }
  return true;
}

}  // namespace compact_kv_detail

inline void compact_kv(const CompactKvArgs& args, const ThreadPool& pool) {
  const int64_t num_reqs = args.requests.num_reqs;
  const int64_t num_kv_heads = args.cache.num_kv_heads;
  for (int64_t request = 0; request < num_reqs; ++request) {
    const int64_t kv_len = args.requests.kv_lens[request];
    check_value(kv_len >= 0 && kv_len <= args.max_kv_len,
                "kv_lens: outside [0, keep's last dimension]", request, kv_len);
    check_value(args.num_evict[request] >= 0 && args.num_evict[request] <= kv_len,
                "num_evict: outside [0, kv_len]", request, args.num_evict[request]);
    check_blocks(args.requests, request, kv_len, args.max_blocks, args.cache.block_size,
                 args.cache.num_blocks);
  }
  std::atomic<int64_t> failed_request{-1};
  run_tasks(pool, args.cache.num_layers * num_reqs * num_kv_heads, [&] {
    return [&args, &failed_request, num_reqs, num_kv_heads](int64_t task) {
      const int64_t kv_head = task % num_kv_heads;
      const int64_t request = task / num_kv_heads % num_reqs;
      const int64_t layer = task / num_kv_heads / num_reqs;
      if (args.num_evict[request] == 0) return;
      const bool done = args.exchange
                            ? compact_kv_detail::compact_one<true>(args, layer, request, kv_head)
                            : compact_kv_detail::compact_one<false>(args, layer, request, kv_head);
      if (!done) {
        failed_request.store(request, std::memory_order_relaxed);
      }
    };
  });
  const int64_t failed = failed_request.load(std::memory_order_relaxed);
  check_value(failed < 0, "keep: number of survivors is not kv_len - num_evict", failed,
              failed < 0 ? 0 : args.num_evict[failed]);
}

}  // namespace keyformer
