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
  std::vector<uint64_t> ranks;
  std::vector<Run> runs;
};

// Ascending order of this number: score descending, NaN last, then position ascending.
inline uint64_t rank_of(const Candidate& candidate) {
  uint32_t ordered = 0;  // NaN
  if (candidate.score == candidate.score) {
    const float score = candidate.score + 0.0f;  // -0 equals +0
    std::memcpy(&ordered, &score, sizeof(ordered));
    ordered = ordered & 0x80000000u ? ~ordered : ordered | 0x80000000u;
  }
  return (static_cast<uint64_t>(~ordered) << 32) | static_cast<uint32_t>(candidate.position);
}

inline void keep_best_tokens(WorkerScratch& scratch, int64_t count, uint8_t* keep) {
  scratch.ranks.clear();
  for (const Candidate& candidate : scratch.candidates) scratch.ranks.push_back(rank_of(candidate));
  std::nth_element(scratch.ranks.begin(), scratch.ranks.begin() + (count - 1), scratch.ranks.end());
  const uint64_t last = scratch.ranks[count - 1];
  int64_t num_equal = std::count(scratch.ranks.begin(), scratch.ranks.begin() + count, last);
  for (const Candidate& candidate : scratch.candidates) {
    const uint64_t rank = rank_of(candidate);
    if (rank < last || (rank == last && num_equal-- > 0)) keep[candidate.slot] = 1;
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

// Returns false when sinks and recent tokens alone exceed what may stay.
inline bool select_one(const SelectKeepArgs& args, int64_t layer, int64_t request, int64_t kv_head,
                       WorkerScratch& scratch) {
  const int64_t kv_len = args.requests.kv_lens[request];
  uint8_t* keep = args.keep + ((layer * args.requests.num_reqs + request) * args.num_kv_heads +
                               kv_head) * args.max_kv_len;
  if (args.num_evict[request] == 0) {
    std::fill_n(keep, kv_len, uint8_t{1});
    return true;
  }
  const int32_t* block_table =
      args.requests.block_table + request * args.requests.block_table_stride;
  scratch.candidates.clear();
  int64_t count = kv_len - args.num_evict[request];
  for (int64_t start = 0; start < kv_len; start += args.block_size) {
    const int64_t block = block_table[start / args.block_size];
    const float* score = args.score.at(layer, block, kv_head);
    const int32_t* position = args.position.at(layer, block, kv_head);
    const int64_t tokens = std::min(args.block_size, kv_len - start);
    for (int64_t i = 0; i < tokens; ++i) {
      if (position[i] < args.num_sinks[request] || position[i] >= args.recent_start[request]) {
        keep[start + i] = 1;
        --count;
        continue;
      }
      const float value =
          args.random[request]
              ? draw_uniform(
                    make_row_key(args.noise_keys[request], layer, kv_head, position[i]),
                    position[i])
              : score[i];
      scratch.candidates.push_back({position[i], value, start + i});
    }
  }
  if (count < 0) return false;
  if (count == 0) return true;
  if (args.run_size[request] == 1) {
    keep_best_tokens(scratch, count, keep);
  } else {
    keep_best_runs(scratch, count, args.run_size[request], keep);
  }
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
    check_blocks(args.requests, request, kv_len, args.max_blocks, args.block_size,
                 args.num_blocks);
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
