// SPDX-License-Identifier: Apache-2.0
// select_keep: which slots of each (layer, request, KV head) survive an eviction. One block of
// threads per problem, thousands of problems per launch.
//
// A candidate's rank is a sequence of 32-bit words, smaller is better: score, position, slot. A
// radix select finds the rank of the last survivor, 11 bits a pass from the top, and stops as soon
// as everything that shares the bits found so far survives; so positions are looked at only where
// scores tie. Scores and positions are read again in each pass: a problem's few KiB stay in the L1
// cache, and no buffer limits the length of a request.
#pragma once

#include "block_scan.cuh"
#include "launch.h"
#include "noise.cuh"

namespace keyformer::cuda {

constexpr int kSelectThreads = 256;
constexpr int kDigitBits = 11;
constexpr int kNumDigits = 1 << kDigitBits;
constexpr int kDigitsPerThread = kNumDigits / kSelectThreads;

template <int kWords>
struct Rank {
  uint32_t words[kWords];
};

// Ascending order of this number: value descending, NaN last.
__device__ inline uint32_t descending(float value) {
  if (value != value) return ~0u;
  const int32_t bits = __float_as_int(__fadd_rn(value, 0.0f));  // -0 equals +0
  return static_cast<uint32_t>(bits < 0 ? bits : ~bits & 0x7FFFFFFF);
}

__device__ inline uint64_t descending(double value) {
  if (value != value) return ~uint64_t{0};
  const int64_t bits = __double_as_longlong(value + 0.0);
  return static_cast<uint64_t>(bits < 0 ? bits : ~bits & 0x7FFFFFFFFFFFFFFF);
}

// The tokens of one (layer, request, KV head).
struct Problem {
  const SelectKeepArgs& args;
  int layer;
  int request;
  int head;
  int kv_len;

  __device__ explicit Problem(const SelectKeepArgs& all)
      : args(all),
        layer(blockIdx.x / all.num_kv_heads / all.requests.num_reqs),
        request(blockIdx.x / all.num_kv_heads % all.requests.num_reqs),
        head(blockIdx.x % all.num_kv_heads),
        kv_len(all.requests.kv_lens[request]) {}

  __device__ int position(int slot) const { return side(args.position, slot); }

  __device__ bool is_pinned(int position) const {
    return position < args.num_sinks[request] || position >= args.recent_start[request];
  }

  // What a candidate is ranked by.
  __device__ float value(int slot, int position) const {
    if (!args.random[request]) return side(args.score, slot);
    return draw_uniform(make_row_key(args.noise_keys[request], args.first_layer + layer,
                                     args.first_kv_head + head, position),
                        position);
  }

  __device__ uint8_t* keep() const {
    const int64_t row =
        (static_cast<int64_t>(layer) * args.requests.num_reqs + request) * args.num_kv_heads + head;
    return args.keep + row * args.max_kv_len;
  }

 private:
  template <typename T>
  __device__ T side(const SideView<T>& view, int slot) const {
    const int64_t block = args.requests.blocks(request)[slot >> args.block_bits];
    return view.at(layer, block, head)[slot & ((1 << args.block_bits) - 1)];
  }
};

// Candidates ranked one by one.
struct TokenRanking {
  static constexpr int kWords = 3;

  const Problem& problem;

  // Calls visit(rank, slot) for each candidate, the threads in step.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) {
    for (int slot = threadIdx.x; slot < problem.kv_len; slot += kSelectThreads) {
      const int position = problem.position(slot);
      if (problem.is_pinned(position)) continue;
      visit(Rank<3>{{descending(problem.value(slot, position)), static_cast<uint32_t>(position),
                     static_cast<uint32_t>(slot)}},
            slot);
    }
  }
};

// Positions whose scores are summed at a time. Two tables in shared memory, 16 KiB each.
constexpr int kWindow = 4096;

// Candidates ranked by the sum over their run of positions [i * run_size, (i + 1) * run_size),
// added in double in ascending position, an absent one as 0. Slots are in no order, so the scores
// are first scattered by position, a window of positions at a time.
struct RunRanking {
  static constexpr int kWords = 4;

  const Problem& problem;
  float* by_position;   // [kWindow]
  uint64_t* run_ranks;  // [kWindow / 2]
  int run_size;
  int max_position;      // of the candidates
  int built_start = -1;  // first position of the window in the tables

  template <typename Visit>
  __device__ void for_each(const Visit& visit) {
    const int window = kWindow / run_size * run_size;
    for (int start = 0; start <= max_position; start += window) {
      if (start != built_start) build(start, window);
      for (int slot = threadIdx.x; slot < problem.kv_len; slot += kSelectThreads) {
        const int position = problem.position(slot);
        if (problem.is_pinned(position) || position < start || position - start >= window) continue;
        const uint64_t rank = run_ranks[(position - start) / run_size];
        visit(Rank<4>{{static_cast<uint32_t>(rank >> 32), static_cast<uint32_t>(rank),
                       static_cast<uint32_t>(position), static_cast<uint32_t>(slot)}},
              slot);
      }
    }
  }

 private:
  __device__ void build(int start, int window) {
    __syncthreads();
    for (int i = threadIdx.x; i < window; i += kSelectThreads) by_position[i] = 0.0f;
    __syncthreads();
    for (int slot = threadIdx.x; slot < problem.kv_len; slot += kSelectThreads) {
      const int position = problem.position(slot);
      if (problem.is_pinned(position) || position < start || position - start >= window) continue;
      by_position[position - start] = problem.value(slot, position);
    }
    __syncthreads();
    for (int run = threadIdx.x; run < window / run_size; run += kSelectThreads) {
      double total = 0.0;
      for (int i = 0; i < run_size; ++i) total += by_position[run * run_size + i];
      run_ranks[run] = descending(total);
    }
    __syncthreads();
    built_start = start;
  }
};

// What a pass of the radix select finds: the digit that holds the `wanted`-th candidate.
struct Digit {
  int digit;
  int num_before;  // candidates with a smaller digit
  int num_equal;
};

__device__ inline Digit find_digit(const int* histogram, int wanted) {
  __shared__ Digit found;
  const int first = threadIdx.x * kDigitsPerThread;
  int sum = 0;
  for (int i = 0; i < kDigitsPerThread; ++i) sum += histogram[first + i];
  int total;
  int before = scan_exclusive<kSelectThreads>(sum, &total);
  if (before < wanted && wanted <= before + sum) {
    int digit = first;
    while (before + histogram[digit] < wanted) before += histogram[digit++];
    found = {digit, before, histogram[digit]};
  }
  __syncthreads();
  return found;
}

// The rank of the `count`-th best candidate, or any between it and the next.
template <typename Ranking>
__device__ Rank<Ranking::kWords> find_last_kept(Ranking& ranking, int count) {
  constexpr int kWords = Ranking::kWords;
  __shared__ int histogram[kNumDigits];
  Rank<kWords> last;
  for (int word = 0; word < kWords; ++word) last.words[word] = ~0u;
#pragma unroll  // a rank stays in registers
  for (int word = 0; word < kWords; ++word) {
    uint32_t found = 0;
    for (int high = 32; high > 0; high -= kDigitBits) {  // bits [low, high) of the word
      const int low = high > kDigitBits ? high - kDigitBits : 0;
      for (int i = threadIdx.x; i < kNumDigits; i += kSelectThreads) histogram[i] = 0;
      __syncthreads();
      const uint32_t mask = (1u << (high - low)) - 1;
      ranking.for_each([&](const Rank<kWords>& rank, int) {
        for (int i = 0; i < word; ++i) {
          if (rank.words[i] != last.words[i]) return;
        }
        if (high < 32 && (rank.words[word] ^ found) >> high != 0) return;
        atomicAdd(&histogram[(rank.words[word] >> low) & mask], 1);
      });
      __syncthreads();
      const Digit digit = find_digit(histogram, count);
      __syncthreads();
      found |= static_cast<uint32_t>(digit.digit) << low;
      count -= digit.num_before;
      if (digit.num_equal == count) {  // all that share these bits survive
        last.words[word] = found | ((1u << low) - 1);
        return last;
      }
    }
    last.words[word] = found;
  }
  return last;
}

template <int kWords>
__device__ inline bool is_not_after(const Rank<kWords>& rank, const Rank<kWords>& last) {
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    if (rank.words[word] != last.words[word]) return rank.words[word] < last.words[word];
  }
  return true;
}

template <typename Ranking>
__device__ void keep_best(Ranking& ranking, int count, uint8_t* keep) {
  if (count == 0) return;
  const auto last = find_last_kept(ranking, count);
  ranking.for_each([&](const Rank<Ranking::kWords>& rank, int slot) {
    if (is_not_after(rank, last)) keep[slot] = 1;
  });
}

struct PinnedCount {
  int num_pinned;
  int max_candidate;  // position, -1 if there is no candidate
};

// Writes the whole row of flags, 1 where a token is pinned.
__device__ inline PinnedCount flag_pinned(const Problem& problem, bool keeps_all, uint8_t* keep) {
  __shared__ int max_candidate;
  if (threadIdx.x == 0) max_candidate = -1;
  __syncthreads();
  int own = 0;
  int furthest = -1;
  for (int slot = threadIdx.x; slot < problem.args.max_kv_len; slot += kSelectThreads) {
    bool pinned = false;
    if (slot < problem.kv_len) {
      const int position = keeps_all ? 0 : problem.position(slot);
      pinned = keeps_all || problem.is_pinned(position);
      if (!pinned && position > furthest) furthest = position;
    }
    keep[slot] = pinned;
    own += pinned;
  }
  if (furthest >= 0) atomicMax(&max_candidate, furthest);
  int num_pinned;
  scan_exclusive<kSelectThreads>(own, &num_pinned);
  return {num_pinned, max_candidate};
}

// Flags the pinned tokens; returns how many candidates stay, -1 where that is an error.
__device__ inline int begin_problem(const Problem& problem, PinnedCount* pinned) {
  const SelectKeepArgs& args = problem.args;
  const int num_evict = args.num_evict[problem.request];
  *pinned = flag_pinned(problem, num_evict == 0, problem.keep());
  const int count = problem.kv_len - num_evict - pinned->num_pinned;
  if (count < 0 && threadIdx.x == 0) {
    fail("num_evict: sinks and recent tokens exceed what may stay", problem.request, num_evict);
  }
  return count;
}

// Each of the two kernels leaves the requests of the other alone: how a request is ranked is known
// to the device only.
__global__ void __launch_bounds__(kSelectThreads)
    select_tokens_kernel(const __grid_constant__ SelectKeepArgs args) {
  const Problem problem(args);
  if (args.run_size[problem.request] > 1) return;
  PinnedCount pinned;
  const int count = begin_problem(problem, &pinned);
  if (count <= 0) return;
  TokenRanking ranking{problem};
  keep_best(ranking, count, problem.keep());
}

// Three blocks to a multiprocessor: bounded to four by its own choice, the compiler spills.
__global__ void __launch_bounds__(kSelectThreads, 3)
    select_runs_kernel(const __grid_constant__ SelectKeepArgs args) {
  __shared__ float by_position[kWindow];
  __shared__ uint64_t run_ranks[kWindow / 2];
  const Problem problem(args);
  const int run_size = args.run_size[problem.request];
  if (run_size <= 1) return;
  if (run_size > kWindow && threadIdx.x == 0) {
    fail("run_size: must be at most 4096", problem.request, run_size);
  }
  PinnedCount pinned;
  const int count = begin_problem(problem, &pinned);
  if (count <= 0) return;
  RunRanking ranking{problem, by_position, run_ranks, run_size, pinned.max_candidate};
  keep_best(ranking, count, problem.keep());
}

}  // namespace keyformer::cuda
