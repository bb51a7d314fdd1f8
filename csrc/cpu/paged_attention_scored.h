// SPDX-License-Identifier: Apache-2.0
// paged_attention_scored: attention and scores from one pass over K and V.
//
// A unit is one (request, KV head). Usually a thread takes a whole unit. Where there are fewer
// units than would keep the threads busy, they share each one: first its ranges of keys, then its
// query heads. Ranges are cut by the lengths alone, so the result does not depend on the choice.
//
// paged_attention_audited is the same over requests whose first blocks, the front, hold tokens that
// would have been evicted: they are attended, but queries score the others only, as if they were
// alone.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attend_row.h"
#include "score_keys.h"

namespace keyformer {

struct PagedAttentionScoredArgs {
  ScoreKeysArgs inputs;
  char* output;  // [num_tokens, num_query_heads, head_size], element type of the query
  int64_t output_token_stride;  // elements
  int64_t output_head_stride;
  const int32_t* front_blocks;  // [num_reqs]; nullptr: no request has a front
  float* audit;  // [num_tokens, num_query_heads, 3], see IsaKernels; nullptr: not wanted
};

namespace paged_attention_scored_detail {

// Units are shared among threads where there are fewer of them per thread.
constexpr int64_t kUnitsPerThread = 2;

struct RequestPlan {
  int64_t request;
  int64_t first_token;
  int64_t num_rows;
  int64_t kv_len;
  int64_t front;  // slots
};

struct Plan {
  std::vector<RequestPlan> requests;  // longest first, to end together
  int64_t max_keys = 0;               // of one request, padded to whole chunks
  int64_t max_ranges = 0;
  bool single_rows = true;
};

// Slots of a request's front, which must leave every row a key.
inline int64_t checked_front(const PagedAttentionScoredArgs& args, int64_t request, int64_t kv_len,
                             int64_t num_rows) {
  if (args.front_blocks == nullptr) return 0;
  const int64_t num_blocks = args.front_blocks[request];
  const int64_t front = num_blocks * args.inputs.cache.block_size;
  check_value(num_blocks >= 0 && front <= kv_len - num_rows,
              "front_blocks: negative, or beyond the keys before the request's queries", request,
              num_blocks);
  return front;
}

inline Plan make_plan(const PagedAttentionScoredArgs& args) {
  const ScoreKeysArgs& inputs = args.inputs;
  Plan plan;
  for (int64_t request = 0; request < inputs.requests.num_reqs; ++request) {
    const score_keys_detail::RowRange rows = score_keys_detail::checked_rows(inputs, request);
    const int64_t num_rows = rows.end - rows.begin;
    if (num_rows == 0) continue;
    const int64_t kv_len = score_keys_detail::checked_kv_len(inputs, request, rows);
    const int64_t front = checked_front(args, request, kv_len, num_rows);
    plan.requests.push_back({request, rows.begin, num_rows, kv_len, front});
    plan.max_keys = std::max(plan.max_keys, (kv_len + kKeyChunk - 1) / kKeyChunk * kKeyChunk);
    plan.max_ranges = std::max(plan.max_ranges, num_ranges(front) + num_ranges(kv_len - front));
    plan.single_rows = plan.single_rows && num_rows == 1;
  }
  std::stable_sort(plan.requests.begin(), plan.requests.end(),
                   [](const RequestPlan& a, const RequestPlan& b) {
                     return a.num_rows * a.kv_len > b.num_rows * b.kv_len;
                   });
  return plan;
}

// What the passes over one row of one unit hand to each other.
struct UnitBuffers {
  float* logits;                              // [num_heads, max_keys]
  float* results;                             // [max_ranges] x RangeResult
  score_keys_detail::KeyPositions positions;  // [max_keys]
};

class Attention {
 public:
  Attention(const PagedAttentionScoredArgs& args, const IsaKernels& kernels, const Plan& plan)
      : args_(args),
        inputs_(args.inputs),
        kernels_(kernels),
        plan_(plan),
        group_(inputs_.num_query_heads / inputs_.cache.num_kv_heads) {}

  int64_t num_units() const {
    return static_cast<int64_t>(plan_.requests.size()) * inputs_.cache.num_kv_heads;
  }

  void run(const ThreadPool& pool) const {
    const bool share = plan_.single_rows && pool.num_threads > 1 &&
                       num_units() < kUnitsPerThread * pool.num_threads;
    share ? run_shared(pool) : run_whole(pool);
  }

 private:
  // Scratch of one thread, kept for the next call.
  struct ThreadScratch {
    Scratch<float> unit;
    Scratch<float> query;
    Scratch<float> weights;
  };

  ThreadScratch& thread_scratch() const {
    static thread_local ThreadScratch scratch;
    scratch.query.reserve(group_ * inputs_.cache.head_size);
    scratch.weights.reserve(group_ * kRangeKeys);
    return scratch;
  }

  int64_t result_floats() const { return RangeResult::num_floats(group_, inputs_.cache.head_size); }

  bool by_place() const { return inputs_.place.data != nullptr; }

  int64_t unit_floats() const {
    const int64_t key_positions = by_place() ? 2 : 1;
    return (group_ + key_positions) * plan_.max_keys + plan_.max_ranges * result_floats();
  }

  UnitBuffers unit_buffers(float* base) const {
    float* results = base + group_ * plan_.max_keys;
    auto* positions = reinterpret_cast<int32_t*>(results + plan_.max_ranges * result_floats());
    return {base, results, {positions, by_place() ? positions + plan_.max_keys : positions}};
  }

  void run_whole(const ThreadPool& pool) const {
    run_tasks(pool, num_units(), [this] {
      ThreadScratch& scratch = thread_scratch();
      const UnitBuffers buffers = unit_buffers(scratch.unit.reserve(unit_floats()));
      return [this, &scratch, buffers](int64_t unit) {
        for (int64_t r = 0; r < request_of(unit).num_rows; ++r) {
          const AttendRow row = make_row(unit, r, buffers);
          for (int64_t range = 0; range < num_ranges(row); ++range) {
            attend_range(row, unit, r, range, buffers, scratch);
          }
          for (int64_t head = 0; head < group_; ++head) finish_head(row, unit, r, head, buffers);
          add_scores(row, unit, r);
        }
      };
    });
  }

  void run_shared(const ThreadPool& pool) const {
    static thread_local Scratch<float> all_units;
    float* base = all_units.reserve(num_units() * unit_floats());
    const auto buffers_of = [this, base](int64_t unit) {
      return unit_buffers(base + unit * unit_floats());
    };
    run_tasks(pool, num_units() * plan_.max_ranges, [&] {
      ThreadScratch& scratch = thread_scratch();
      return [this, &scratch, &buffers_of](int64_t task) {
        const int64_t unit = task / plan_.max_ranges;
        const int64_t range = task % plan_.max_ranges;
        const UnitBuffers buffers = buffers_of(unit);
        const AttendRow row = make_row(unit, 0, buffers);
        if (range < num_ranges(row)) attend_range(row, unit, 0, range, buffers, scratch);
      };
    });
    const auto num_finished =
        std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(num_units()));
    for (int64_t unit = 0; unit < num_units(); ++unit) num_finished[unit].store(0);
    run_tasks(pool, num_units() * group_, [&] {
      return [this, &num_finished, &buffers_of](int64_t task) {
        const int64_t unit = task / group_;
        const UnitBuffers buffers = buffers_of(unit);
        const AttendRow row = make_row(unit, 0, buffers);
        finish_head(row, unit, 0, task % group_, buffers);
        // Whoever finishes the last head adds them all.
        if (num_finished[unit].fetch_add(1) + 1 == group_) add_scores(row, unit, 0);
      };
    });
  }

  const RequestPlan& request_of(int64_t unit) const {
    return plan_.requests[static_cast<size_t>(unit / inputs_.cache.num_kv_heads)];
  }

  int64_t kv_head_of(int64_t unit) const { return unit % inputs_.cache.num_kv_heads; }

  AttendRow make_row(int64_t unit, int64_t r, const UnitBuffers& buffers) const {
    const PagedCache& cache = inputs_.cache;
    const RequestPlan& item = request_of(unit);
    const int64_t kv_head = kv_head_of(unit);
    AttendRow row{};
    row.head_size = cache.head_size;
    row.block_size = cache.block_size;
    row.num_heads = group_;
    row.num_keys = item.kv_len - item.num_rows + r + 1;
    row.front = item.front;
    row.element_type = inputs_.element_type;
    row.layout = cache.layout;
    row.scale = inputs_.scale;
    row.soft_cap = inputs_.soft_cap;
    row.keys = cache.data + kv_head * cache.head_stride * cache.element_size;
    row.values = row.keys + cache.head_size * cache.block_size * cache.element_size;
    row.block_bytes = cache.block_stride * cache.element_size;
    row.block_table =
        inputs_.requests.block_table + item.request * inputs_.requests.block_table_stride;
    if (inputs_.alibi_slopes != nullptr) row.alibi_slopes = inputs_.alibi_slopes + kv_head * group_;
    if (inputs_.sinks != nullptr) row.sinks = inputs_.sinks + kv_head * group_;
    row.positions = buffers.positions.noise;
    row.bias_positions = buffers.positions.bias;
    row.query_bias_position =
        score_keys_detail::query_bias_position(inputs_, item.request, item.first_token + r);
    row.logits = buffers.logits;
    row.row_stride = plan_.max_keys;
    return row;
  }

  void attend_range(AttendRow row, int64_t unit, int64_t r, int64_t range,
                    const UnitBuffers& buffers, ThreadScratch& scratch) const {
    const PagedCache& cache = inputs_.cache;
    const RequestPlan& item = request_of(unit);
    const int64_t kv_head = kv_head_of(unit);
    row.query = scratch.query.data();
    for (int64_t h = 0; h < group_; ++h) {
      const int64_t offset = (item.first_token + r) * inputs_.query_token_stride +
                             (kv_head * group_ + h) * inputs_.query_head_stride;
      kernels_.load_query(inputs_.query + offset * cache.element_size, inputs_.element_type,
                          cache.head_size, scratch.query.data() + h * cache.head_size, 1);
    }
    const int64_t behind = range - num_ranges(row.front);
    const int64_t begin = behind < 0 ? range * kRangeKeys : row.front + behind * kRangeKeys;
    const int64_t end = std::min(begin + kRangeKeys, behind < 0 ? row.front : row.num_keys);
    score_keys_detail::gather_positions(inputs_, item.request, kv_head, begin, end,
                                        buffers.positions);
    const RangeResult result = RangeResult::at(buffers.results, range, group_, cache.head_size);
    kernels_.attend_range(row, begin, end, result, scratch.weights.data());
  }

  // The output of one query head, and its weights where the row is scored.
  void finish_head(const AttendRow& row, int64_t unit, int64_t r, int64_t head,
                   const UnitBuffers& buffers) const {
    const RequestPlan& item = request_of(unit);
    const int64_t token = item.first_token + r;
    const int64_t query_head = kv_head_of(unit) * group_ + head;
    const int64_t offset =
        token * args_.output_token_stride + query_head * args_.output_head_stride;
    float* audit = args_.audit;
    if (audit != nullptr) audit += (token * inputs_.num_query_heads + query_head) * 3;
    kernels_.merge_ranges(row, head, buffers.results,
                          args_.output + offset * inputs_.cache.element_size, audit);
    if (!is_scored(token)) return;
    const int64_t noise_key = inputs_.noise_keys[item.request];
    const RowKey key =
        make_row_key(noise_key, inputs_.layer_index, inputs_.first_query_head + query_head,
                     inputs_.query_positions[token]);
    kernels_.weigh_head(without_front(row), head, inputs_.tau[token],
                        noise_key != 0 ? &key : nullptr);
  }

  void add_scores(const AttendRow& row, int64_t unit, int64_t r) const {
    if (!is_scored(request_of(unit).first_token + r)) return;
    kernels_.add_heads(without_front(row), inputs_.score.at(0, 0, kv_head_of(unit)),
                       inputs_.score.block_stride);
  }

  // The row as its scores see it.
  static AttendRow without_front(AttendRow row) {
    row.num_keys -= row.front;
    row.block_table += row.front / row.block_size;
    row.positions += row.front;
    row.logits += row.front;
    row.front = 0;
    return row;
  }

  bool is_scored(int64_t token) const { return inputs_.tau[token] > 0.0f; }

  const PagedAttentionScoredArgs& args_;
  const ScoreKeysArgs& inputs_;
  const IsaKernels& kernels_;
  const Plan& plan_;
  const int64_t group_;
};

}  // namespace paged_attention_scored_detail

inline void paged_attention_scored(const PagedAttentionScoredArgs& args, const IsaKernels& kernels,
                                   const ThreadPool& pool) {
  const auto plan = paged_attention_scored_detail::make_plan(args);
  paged_attention_scored_detail::Attention(args, kernels, plan).run(pool);
}

}  // namespace keyformer
