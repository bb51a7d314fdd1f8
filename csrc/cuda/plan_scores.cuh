// SPDX-License-Identifier: Apache-2.0
// First kernel of score_keys: lists the rows that score and counts the tiles of each request. One
// block of threads; its few microseconds are those of a launch.
#pragma once

#include "block_scan.cuh"
#include "score_plan.cuh"

namespace keyformer::cuda {

constexpr int kPlanThreads = 1024;

__global__ void __launch_bounds__(kPlanThreads)
    plan_scores_kernel(const __grid_constant__ ScoreKeysArgs args) {
  const ScorePlan& plan = args.plan;
  const int num_reqs = args.requests.num_reqs;
  const int group = args.num_query_heads / args.cache.num_kv_heads;
  int num_scored = 0;
  for (int start = 0; start < args.num_tokens; start += kPlanThreads) {
    const int token = start + threadIdx.x;
    const bool scored = token < args.num_tokens && args.tau[token] > 0.0f;
    int total;
    const int rank = num_scored + scan_exclusive<kPlanThreads>(scored, &total);
    if (token < args.num_tokens) plan.ranks[token] = rank;
    if (scored) plan.tokens[rank] = token;
    num_scored += total;
  }
  if (threadIdx.x == 0) plan.ranks[args.num_tokens] = num_scored;
  __syncthreads();
  int row_tiles = 0;
  int key_tiles = 0;
  for (int start = 0; start < num_reqs; start += kPlanThreads) {
    const int request = start + threadIdx.x;
    int own_row_tiles = 0;
    int own_key_tiles = 0;
    if (request < num_reqs) {
      const int begin = plan.ranks[args.query_start_loc[request]];
      const int end = plan.ranks[args.query_start_loc[request + 1]];
      // A request without scored rows is not looked at.
      if (end > begin) {
        own_row_tiles = ((end - begin) * group + kTile - 1) / kTile;
        own_key_tiles = (visible_keys(args, request, plan.tokens[end - 1]) + kTile - 1) / kTile;
      }
    }
    int total;
    const int rows_before = row_tiles + scan_exclusive<kPlanThreads>(own_row_tiles, &total);
    row_tiles += total;
    const int keys_before = key_tiles + scan_exclusive<kPlanThreads>(own_key_tiles, &total);
    key_tiles += total;
    if (request < num_reqs) {
      plan.row_tiles[request] = rows_before;
      plan.key_tiles[request] = keys_before;
    }
  }
  if (threadIdx.x == 0) {
    plan.row_tiles[num_reqs] = row_tiles;
    plan.key_tiles[num_reqs] = key_tiles;
  }
}

}  // namespace keyformer::cuda
