// SPDX-License-Identifier: Apache-2.0
// score_keys: plans tiles of query rows and runs them on a thread pool. The scores come out the
// same for any number of threads: tiles of one KV head are computed in any order, but added in the
// order of their rows, each waiting for its turn.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "checks.h"
#include "isa.h"
#include "paged_cache.h"
#include "task_pool.h"

namespace keyformer {

struct ScoreKeysArgs {
  const char* query;  // [num_tokens, num_query_heads, head_size]
  ElementType element_type;
  int64_t query_token_stride;  // elements
  int64_t query_head_stride;
  int64_t num_tokens;
  int64_t num_query_heads;
  PagedCache cache;  // one layer
  SideView<float> score;
  SideView<const int32_t> position;
  SideView<const int32_t> place;  // no data: the bias is taken from `position`
  RequestBatch requests;
  int64_t max_blocks;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int64_t* query_positions;  // [num_tokens] logical
  const float* tau;                // [num_tokens], <= 0: not scored
  const int64_t* noise_keys;       // [num_reqs], 0: no noise
  const float* alibi_slopes;       // [num_query_heads], nullptr: no bias
  const float* sinks;              // [num_query_heads], nullptr: none
  int64_t layer_index;
  int64_t first_query_head;
  float scale;
  float soft_cap;
};

namespace score_keys_detail {

constexpr int64_t kTileBytes = 384 * 1024;  // weights of one tile, to stay in the L2 cache
constexpr int64_t kMaxTileRows = 64;

struct RequestPlan {
  int64_t request;
  int64_t first_scored;  // into Plan::tokens
  int64_t num_scored;
  int64_t row_stride;  // padded keys of the last scored row
  int64_t tile_rows;
  int64_t num_tiles;   // per KV head
  int64_t first_task;  // tasks run KV head by KV head, tile by tile
};

struct Plan {
  std::vector<int32_t> tokens;  // scored query tokens
  std::vector<RequestPlan> requests;
  std::unique_ptr<std::atomic<int32_t>[]> turns;  // [requests, num_kv_heads] tiles added so far
  int64_t num_turns = 0;
  int64_t num_tasks = 0;
  int64_t max_weights = 0;
  int64_t max_vectors = 0;
  int64_t max_keys = 0;
};

// Query rows [begin, end) of a request.
struct RowRange {
  int64_t begin;
  int64_t end;
};

inline RowRange checked_rows(const ScoreKeysArgs& args, int64_t request) {
  const int64_t begin = args.query_start_loc[request];
  const int64_t end = args.query_start_loc[request + 1];
  check_value(begin >= 0 && begin <= end, "query_start_loc: must not fall", request, begin);
  check_value(end <= args.num_tokens, "query_start_loc: beyond the query", request, end);
  return {begin, end};
}

// Length of a request's cache, which must hold its rows and lie in blocks that exist.
inline int64_t checked_kv_len(const ScoreKeysArgs& args, int64_t request, const RowRange& rows) {
  const int64_t kv_len = args.requests.kv_lens[request];
  check_value(kv_len >= rows.end - rows.begin, "kv_lens: shorter than the request's queries",
              request, kv_len);
  check_blocks(args.requests, request, kv_len, args.max_blocks, args.cache.block_size,
               args.cache.num_blocks);
  return kv_len;
}

inline int64_t visible_keys(const ScoreKeysArgs& args, int64_t request, int64_t token) {
  return args.requests.kv_lens[request] - args.query_start_loc[request + 1] + token + 1;
}

// A query is the last of the keys that it sees.
inline int32_t query_bias_position(const ScoreKeysArgs& args, int64_t request, int64_t token) {
  return static_cast<int32_t>(args.place.data != nullptr ? visible_keys(args, request, token) - 1
                                                         : args.query_positions[token]);
}

// Where noise and bias find what they are functions of; one buffer where both use the same.
struct KeyPositions {
  int32_t* noise;
  int32_t* bias;
};

// Copies what is needed of keys [begin, end) of a request, whole chunks; `begin` starts one.
inline void gather_positions(const ScoreKeysArgs& args, int64_t request, int64_t kv_head,
                             int64_t begin, int64_t end, const KeyPositions& keys) {
  const int32_t* block_table =
      args.requests.block_table + request * args.requests.block_table_stride;
  const int64_t block_size = args.cache.block_size;
  const auto gather = [&](const SideView<const int32_t>& side, int32_t* target) {
    for (int64_t j = begin; j < end; j += kKeyChunk) {
      const int32_t* source = side.at(0, block_table[j / block_size], kv_head);
      std::copy_n(source + j % block_size, kKeyChunk, target + j);
    }
  };
  const bool has_bias = args.alibi_slopes != nullptr;
  const bool by_place = args.place.data != nullptr;
  if (args.noise_keys[request] != 0 || (has_bias && !by_place)) gather(args.position, keys.noise);
  if (has_bias && by_place) gather(args.place, keys.bias);
}

// Rows of a tile: as many as the scratch allows, tiles of about equal size, and no half-empty
// product but the last.
inline int64_t tile_rows(int64_t num_rows, int64_t row_bytes, int64_t group,
                         int64_t product_vectors) {
  const int64_t step = product_vectors / std::gcd(product_vectors, group);
  int64_t most = std::clamp<int64_t>(kTileBytes / row_bytes, 1, kMaxTileRows);
  if (most > step) most -= most % step;
  const int64_t num_tiles = (num_rows + most - 1) / most;
  const int64_t rows = (num_rows + num_tiles - 1) / num_tiles;
  return std::min(most, (rows + step - 1) / step * step);
}

inline void make_plan(const ScoreKeysArgs& args, const IsaKernels& kernels, Plan* plan) {
  const int64_t group = args.num_query_heads / args.cache.num_kv_heads;
  plan->tokens.clear();
  plan->requests.clear();
  plan->num_tasks = plan->max_weights = plan->max_vectors = plan->max_keys = 0;
  for (int64_t request = 0; request < args.requests.num_reqs; ++request) {
    const RowRange rows = checked_rows(args, request);
    RequestPlan item{};
    item.request = request;
    item.first_scored = static_cast<int64_t>(plan->tokens.size());
    for (int64_t token = rows.begin; token < rows.end; ++token) {
      if (args.tau[token] > 0.0f) plan->tokens.push_back(static_cast<int32_t>(token));
    }
    item.num_scored = static_cast<int64_t>(plan->tokens.size()) - item.first_scored;
    if (item.num_scored == 0) continue;
    checked_kv_len(args, request, rows);
    const int64_t keys = visible_keys(args, request, plan->tokens.back());
    item.row_stride = (keys + kKeyChunk - 1) / kKeyChunk * kKeyChunk;
    const int64_t row_bytes = item.row_stride * group * static_cast<int64_t>(sizeof(float));
    item.tile_rows = tile_rows(item.num_scored, row_bytes, group, kernels.product_vectors);
    item.num_tiles = (item.num_scored + item.tile_rows - 1) / item.tile_rows;
    item.first_task = plan->num_tasks;
    plan->num_tasks += item.num_tiles * args.cache.num_kv_heads;
    const int64_t vectors = item.tile_rows * group;
    plan->max_vectors = std::max(plan->max_vectors, vectors);
    plan->max_weights = std::max(plan->max_weights, vectors * item.row_stride);
    plan->max_keys = std::max(plan->max_keys, item.row_stride);
    plan->requests.push_back(item);
  }
  const int64_t num_turns = static_cast<int64_t>(plan->requests.size()) * args.cache.num_kv_heads;
  if (num_turns > plan->num_turns) {
    plan->turns = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(num_turns));
    plan->num_turns = num_turns;
  }
  for (int64_t i = 0; i < num_turns; ++i) plan->turns[i].store(0, std::memory_order_relaxed);
}

// Buffers of one thread, kept for the next call.
struct WorkerScratch {
  Scratch<float> weights;
  Scratch<float> inverse_sums;
  Scratch<float> panel;
  Scratch<float> query;
  Scratch<float> tau;
  Scratch<int32_t> visible;
  Scratch<int32_t> query_bias_positions;
  Scratch<int32_t> positions;
  Scratch<int32_t> places;
  Scratch<RowKey> row_keys;
};

class Worker {
 public:
  Worker(const ScoreKeysArgs& args, const IsaKernels& kernels, Plan& plan)
      : args_(args), kernels_(kernels), plan_(plan), scratch_(thread_scratch()) {
    scratch_.weights.reserve(plan.max_weights);
    scratch_.inverse_sums.reserve(plan.max_vectors);
    scratch_.panel.reserve(args.cache.head_size * kKeyChunk);
    scratch_.query.reserve((plan.max_vectors + kernels.product_vectors) * args.cache.head_size);
    scratch_.tau.reserve(kMaxTileRows);
    scratch_.visible.reserve(kMaxTileRows);
    scratch_.query_bias_positions.reserve(kMaxTileRows);
    scratch_.positions.reserve(plan.max_keys);
    if (args.place.data != nullptr) scratch_.places.reserve(plan.max_keys);
    scratch_.row_keys.reserve(plan.max_vectors);
  }

  void operator()(int64_t task) const {
    auto found = std::upper_bound(
        plan_.requests.begin(), plan_.requests.end(), task,
        [](int64_t value, const RequestPlan& item) { return value < item.first_task; });
    const RequestPlan& item = *--found;
    const int64_t kv_head = (task - item.first_task) / item.num_tiles;
    const int64_t tile_index = (task - item.first_task) % item.num_tiles;
    const int64_t unit = (found - plan_.requests.begin()) * args_.cache.num_kv_heads + kv_head;

    const ScoreTile tile = load_tile(item, kv_head, tile_index);
    kernels_.compute_tile(tile);
    // The tile before this one was taken earlier and its thread waits for nothing later, so the
    // turn always comes.
    std::atomic<int32_t>& turn = plan_.turns[unit];
    while (turn.load(std::memory_order_acquire) != tile_index) std::this_thread::yield();
    kernels_.add_tile(tile, args_.score.at(0, 0, kv_head), args_.score.block_stride);
    turn.store(static_cast<int32_t>(tile_index + 1), std::memory_order_release);
  }

 private:
  static WorkerScratch& thread_scratch() {
    static thread_local WorkerScratch scratch;
    return scratch;
  }

  ScoreTile load_tile(const RequestPlan& item, int64_t kv_head, int64_t tile_index) const {
    const PagedCache& cache = args_.cache;
    const int64_t group = args_.num_query_heads / cache.num_kv_heads;
    const int64_t first = tile_index * item.tile_rows;
    const int64_t num_rows = std::min(item.tile_rows, item.num_scored - first);
    const int32_t* tokens = plan_.tokens.data() + item.first_scored + first;
    const int64_t noise_key = args_.noise_keys[item.request];
    for (int64_t r = 0; r < num_rows; ++r) {
      scratch_.tau.data()[r] = args_.tau[tokens[r]];
      scratch_.visible.data()[r] =
          static_cast<int32_t>(visible_keys(args_, item.request, tokens[r]));
      scratch_.query_bias_positions.data()[r] = query_bias_position(args_, item.request, tokens[r]);
      for (int64_t h = 0; h < group; ++h) {
        const int64_t query_head = kv_head * group + h;
        const int64_t offset =
            tokens[r] * args_.query_token_stride + query_head * args_.query_head_stride;
        const int64_t vector = r * group + h;
        const int64_t lane = vector % kernels_.product_vectors;
        kernels_.load_query(args_.query + offset * cache.element_size, args_.element_type,
                            cache.head_size,
                            scratch_.query.data() + (vector - lane) * cache.head_size + lane,
                            kernels_.product_vectors);
        if (noise_key == 0) continue;
        scratch_.row_keys.data()[vector] =
            make_row_key(noise_key, args_.layer_index, args_.first_query_head + query_head,
                         args_.query_positions[tokens[r]]);
      }
    }
    const int32_t* block_table =
        args_.requests.block_table + item.request * args_.requests.block_table_stride;
    int32_t* positions = scratch_.positions.data();
    int32_t* bias_positions = args_.place.data != nullptr ? scratch_.places.data() : positions;
    gather_positions(args_, item.request, kv_head, 0, scratch_.visible.data()[num_rows - 1],
                     {positions, bias_positions});
    ScoreTile tile{};
    tile.head_size = cache.head_size;
    tile.block_size = cache.block_size;
    tile.num_heads = group;
    tile.num_rows = num_rows;
    tile.element_type = args_.element_type;
    tile.layout = cache.layout;
    tile.scale = args_.scale;
    tile.soft_cap = args_.soft_cap;
    tile.keys = cache.data + kv_head * cache.head_stride * cache.element_size;
    tile.block_bytes = cache.block_stride * cache.element_size;
    tile.block_table = block_table;
    tile.query = scratch_.query.data();
    tile.visible = scratch_.visible.data();
    tile.tau = scratch_.tau.data();
    tile.row_keys = noise_key != 0 ? scratch_.row_keys.data() : nullptr;
    if (args_.alibi_slopes != nullptr) tile.alibi_slopes = args_.alibi_slopes + kv_head * group;
    if (args_.sinks != nullptr) tile.sinks = args_.sinks + kv_head * group;
    tile.positions = positions;
    tile.bias_positions = bias_positions;
    tile.query_bias_positions = scratch_.query_bias_positions.data();
    tile.weights = scratch_.weights.data();
    tile.inverse_sums = scratch_.inverse_sums.data();
    tile.row_stride = item.row_stride;
    tile.panel = scratch_.panel.data();
    return tile;
  }

  const ScoreKeysArgs& args_;
  const IsaKernels& kernels_;
  Plan& plan_;
  WorkerScratch& scratch_;
};

}  // namespace score_keys_detail

inline void score_keys(const ScoreKeysArgs& args, const IsaKernels& kernels,
                       const ThreadPool& pool) {
  static thread_local score_keys_detail::Plan plan;
  score_keys_detail::Plan& shared_plan = plan;
  score_keys_detail::make_plan(args, kernels, &shared_plan);
  run_tasks(pool, shared_plan.num_tasks,
            [&] { return score_keys_detail::Worker(args, kernels, shared_plan); });
}

}  // namespace keyformer
