// SPDX-License-Identifier: Apache-2.0
// select_keep: which slots of each (layer, request, KV head) survive an eviction.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
#include "noise.h"
#include "paged_cache.h"
#include "task_pool.h"

namespace keyformer {

struct SelectKeepArgs {
  SideView<const float> score;
  SideView<const int32_t> position;
  int64_t num_layers;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;
  RequestBatch requests;  // kv_lens before the eviction
  int64_t max_blocks;
  const int32_t* num_evict;     // [num_reqs]
  const int32_t* num_sinks;     // [num_reqs]: positions below it stay
  const int32_t* recent_start;  // [num_reqs]: positions from it on stay
  const int32_t* run_size;      // [num_reqs]: 1, or tokens ranked together
  const uint8_t* random;        // [num_reqs]: rank by noise instead of score
  const int64_t* noise_keys;    // [num_reqs]
  int64_t first_layer;          // in the whole model, for the random draws
  int64_t first_kv_head;
  int64_t max_kv_len;
  uint8_t* keep;  // [num_layers, num_reqs, num_kv_heads, max_kv_len], zeroed
};

namespace select_keep_detail {

struct Candidate {
  int32_t position;
  float score;
  int64_t slot;
};

struct Run {
  double score;
  int64_t begin;  // into the candidates, ordered by position
  int64_t end;
};

struct WorkerScratch {
  std::vector<Candidate> candidates;
  std::vector<Run> runs;
  std::vector<uint64_t> ranks;
  std::vector<uint64_t> undecided;
};

// Ascending order of this number: score descending, NaN last, then position ascending. Without a
// branch, so that the loop over a block is a handful of vector instructions.
inline uint64_t rank_of(float score, int32_t position) {
  const float value = score + 0.0f;  // -0 equals +0
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 31;
  const uint32_t ordered = bits ^ ((0u - sign) | 0x80000000u);
  const uint32_t descending = score == score ? ~ordered : ~0u;
  return (static_cast<uint64_t>(descending) << 32) | static_cast<uint32_t>(position);
}

constexpr uint64_t kPinnedRank = 0;  // before every candidate: +inf alone ranks at 0x007FFFFF

// The rank of the `count`-th smallest of `ranks`, digit by digit from the top. Each pass looks only
// at the ranks whose digits so far are those of the answer, so the work falls off quickly; unlike
// in a quickselect, no branch depends on the comparison of two scores.
inline uint64_t nth_rank(const std::vector<uint64_t>& ranks, int64_t count,
                         std::vector<uint64_t>& undecided) {
  undecided.resize(ranks.size());
  const uint64_t* source = ranks.data();
  int64_t num_left = static_cast<int64_t>(ranks.size());
  for (int shift = 56; shift >= 0 && num_left > 1; shift -= 8) {
    int32_t histogram[256] = {};
    for (int64_t i = 0; i < num_left; ++i) ++histogram[(source[i] >> shift) & 0xFF];
    uint64_t digit = 0;
    while (count > histogram[digit]) count -= histogram[digit++];
    if (histogram[digit] == num_left) continue;
    int64_t num_kept = 0;
    for (int64_t i = 0; i < num_left; ++i) {
      // Never ahead of the read: compaction in place is safe.
      undecided[num_kept] = source[i];
      num_kept += ((source[i] >> shift) & 0xFF) == digit;
    }
    source = undecided.data();
    num_left = num_kept;
  }
  return source[0];
}

// Flags the `count` best slots. Equal ranks (a position held twice) are taken from the front.
inline void keep_best_slots(WorkerScratch& scratch, int64_t count, uint8_t* keep) {
  const uint64_t last = nth_rank(scratch.ranks, count, scratch.undecided);
  const int64_t num_slots = static_cast<int64_t>(scratch.ranks.size());
  int64_t num_kept = 0;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    keep[slot] = scratch.ranks[slot] <= last;
    num_kept += keep[slot];
  }
  for (int64_t slot = num_slots - 1; num_kept > count; --slot) {
    if (scratch.ranks[slot] != last) continue;
    keep[slot] = 0;
    --num_kept;
  }
}

// Whole runs of positions [i * run_size, (i + 1) * run_size) by the sum of their candidates'
// scores. The sum is in double, where adding a few floats is exact in any order.
inline void keep_best_runs(WorkerScratch& scratch, int64_t count, int32_t run_size, uint8_t* keep) {
  std::vector<Candidate>& candidates = scratch.candidates;
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.position != b.position ? a.position < b.position : a.slot < b.slot;
  });
  scratch.runs.clear();
  const int64_t num_candidates = static_cast<int64_t>(candidates.size());
  for (int64_t i = 0; i < num_candidates; ++i) {
    const int64_t run = candidates[i].position / run_size;
    if (i == 0 || run != candidates[i - 1].position / run_size) scratch.runs.push_back({0.0, i, i});
    scratch.runs.back().score += candidates[i].score;
    scratch.runs.back().end = i + 1;
  }
  std::sort(scratch.runs.begin(), scratch.runs.end(), [](const Run& a, const Run& b) {
    const bool a_is_number = a.score == a.score;
    const bool b_is_number = b.score == b.score;
    if (a_is_number != b_is_number) return a_is_number;
    if (a_is_number && a.score != b.score) return a.score > b.score;
    return a.begin < b.begin;
  });
  for (const Run& run : scratch.runs) {
    for (int64_t i = run.begin; i < run.end && count > 0; ++i, --count) {
      keep[candidates[i].slot] = 1;
    }
  }
}

// Ranks a candidate where the policy chooses at random; a draw that never changes.
inline float random_value(const SelectKeepArgs& args, int64_t layer, int64_t request,
                          int64_t kv_head, int32_t position) {
  return draw_uniform(make_row_key(args.noise_keys[request], args.first_layer + layer,
                                   args.first_kv_head + kv_head, position),
                      position);
}

// Side data lies in the tails of pages far apart, so a sweep over a request waits for memory unless
// it asks for the blocks to come.
constexpr int64_t kBlocksAhead = 8;

inline void prefetch_side_data(const SelectKeepArgs& args, int64_t layer, int64_t block,
                               int64_t kv_head) {
  constexpr int64_t kLineValues = 16;
  const float* score = args.score.at(layer, block, kv_head);
  const int32_t* position = args.position.at(layer, block, kv_head);
  for (int64_t i = 0; i < args.block_size; i += kLineValues) {
    __builtin_prefetch(score + i);
    __builtin_prefetch(position + i);
  }
}

// Ranks of all slots, pinned ones in front; returns how many are pinned.
inline int64_t rank_slots(const SelectKeepArgs& args, int64_t layer, int64_t request,
                          int64_t kv_head, std::vector<uint64_t>& ranks) {
  const int64_t kv_len = args.requests.kv_lens[request];
  const int32_t* block_table =
      args.requests.block_table + request * args.requests.block_table_stride;
  const int32_t num_sinks = args.num_sinks[request];
  const int32_t recent_start = args.recent_start[request];
  const bool random = args.random[request];
  ranks.resize(kv_len);
  const int64_t num_blocks = (kv_len + args.block_size - 1) / args.block_size;
  for (int64_t i = 0; i < std::min(kBlocksAhead, num_blocks); ++i) {
    prefetch_side_data(args, layer, block_table[i], kv_head);
  }
  int64_t num_pinned = 0;
  for (int64_t index = 0; index < num_blocks; ++index) {
    if (index + kBlocksAhead < num_blocks) {
      prefetch_side_data(args, layer, block_table[index + kBlocksAhead], kv_head);
    }
    const int64_t block = block_table[index];
    const int64_t start = index * args.block_size;
    const float* score = args.score.at(layer, block, kv_head);
    const int32_t* position = args.position.at(layer, block, kv_head);
    const int64_t tokens = std::min(args.block_size, kv_len - start);
    uint64_t* rank = ranks.data() + start;
    for (int64_t i = 0; i < tokens; ++i) {
      const bool pinned = (position[i] < num_sinks) | (position[i] >= recent_start);
      const float value =
          random ? random_value(args, layer, request, kv_head, position[i]) : score[i];
      rank[i] = pinned ? kPinnedRank : rank_of(value, position[i]);
      num_pinned += pinned;
    }
  }
  return num_pinned;
}

// Flags the pinned slots, collects the others as candidates; returns how many are pinned.
inline int64_t collect_candidates(const SelectKeepArgs& args, int64_t layer, int64_t request,
                                  int64_t kv_head, std::vector<Candidate>& candidates,
                                  uint8_t* keep) {
  const int64_t kv_len = args.requests.kv_lens[request];
  const int32_t* block_table =
      args.requests.block_table + request * args.requests.block_table_stride;
  candidates.clear();
  int64_t num_pinned = 0;
  for (int64_t slot = 0; slot < kv_len; ++slot) {
    const int64_t block = block_table[slot / args.block_size];
    const int64_t offset = slot % args.block_size;
    const int32_t position = args.position.at(layer, block, kv_head)[offset];
    if (position < args.num_sinks[request] || position >= args.recent_start[request]) {
      keep[slot] = 1;
      ++num_pinned;
      continue;
    }
    const float value = args.random[request] ? random_value(args, layer, request, kv_head, position)
                                             : args.score.at(layer, block, kv_head)[offset];
    candidates.push_back({position, value, slot});
  }
  return num_pinned;
}

// Returns false when sinks and recent tokens alone exceed what may stay.
inline bool select_one(const SelectKeepArgs& args, int64_t layer, int64_t request, int64_t kv_head,
                       WorkerScratch& scratch) {
  const int64_t kv_len = args.requests.kv_lens[request];
  const int64_t count = kv_len - args.num_evict[request];
  uint8_t* keep =
      args.keep +
      ((layer * args.requests.num_reqs + request) * args.num_kv_heads + kv_head) * args.max_kv_len;
  if (args.num_evict[request] == 0) {
    std::fill_n(keep, kv_len, uint8_t{1});
    return true;
  }
  if (args.run_size[request] == 1) {
    const int64_t num_pinned = rank_slots(args, layer, request, kv_head, scratch.ranks);
    if (num_pinned > count) return false;
    if (count > 0) keep_best_slots(scratch, count, keep);
    return true;
  }
  const int64_t num_pinned =
      collect_candidates(args, layer, request, kv_head, scratch.candidates, keep);
  if (num_pinned > count) return false;
  keep_best_runs(scratch, count - num_pinned, args.run_size[request], keep);
  return true;
}

}  // namespace select_keep_detail

inline void select_keep(const SelectKeepArgs& args, const ThreadPool& pool) {
  const int64_t num_reqs = args.requests.num_reqs;
  for (int64_t request = 0; request < num_reqs; ++request) {
    const int64_t kv_len = args.requests.kv_lens[request];
    check_value(kv_len >= 0 && kv_len <= args.max_kv_len, "kv_lens: outside [0, max_kv_len]",
                request, kv_len);
    check_value(args.num_evict[request] >= 0 && args.num_evict[request] <= kv_len,
                "num_evict: outside [0, kv_len]", request, args.num_evict[request]);
    check_value(args.run_size[request] >= 1, "run_size: must be at least 1", request,
                args.run_size[request]);
    check_blocks(args.requests, request, kv_len, args.max_blocks, args.block_size, args.num_blocks);
  }
  std::atomic<int64_t> failed_request{-1};
  run_tasks(pool, args.num_layers * num_reqs * args.num_kv_heads, [&] {
    static thread_local select_keep_detail::WorkerScratch scratch;
    return [&args, &failed_request, &own = scratch, num_reqs](int64_t task) {
      const int64_t kv_head = task % args.num_kv_heads;
      const int64_t request = task / args.num_kv_heads % num_reqs;
      const int64_t layer = task / args.num_kv_heads / num_reqs;
      if (!select_keep_detail::select_one(args, layer, request, kv_head, own)) {
        failed_request.store(request, std::memory_order_relaxed);
      }
    };
  });
  const int64_t failed = failed_request.load(std::memory_order_relaxed);
  check_value(failed < 0, "num_evict: sinks and recent tokens exceed what may stay", failed,
              failed < 0 ? 0 : args.num_evict[failed]);
}

}  // namespace keyformer
