// SPDX-License-Identifier: Apache-2.0
// The operators that every device implements.
#pragma once

namespace {

template <typename Library>
void define_operators(Library& m) {
  m.def(
      "score_keys(Tensor query, Tensor kv_cache, Tensor(a!) score, Tensor position, "
      "Tensor block_table, Tensor kv_lens, Tensor query_start_loc, Tensor query_positions, "
      "Tensor tau, Tensor noise_keys, Tensor? alibi_slopes, Tensor? place, Tensor? sinks, "
      "int layer_index, int first_query_head, float scale, float soft_cap, int layout) -> ()");
  m.def(
      "paged_attention_scored(Tensor(a!) output, Tensor query, Tensor kv_cache, Tensor(b!) score, "
      "Tensor position, Tensor block_table, Tensor kv_lens, Tensor query_start_loc, "
      "Tensor query_positions, Tensor tau, Tensor noise_keys, Tensor? alibi_slopes, Tensor? place, "
      "Tensor? sinks, int layer_index, int first_query_head, float scale, float soft_cap, int "
      "layout) -> ()");
  m.def(
      "paged_attention_audited(Tensor(a!) output, Tensor(b!) audit, Tensor query, "
      "Tensor kv_cache, Tensor(c!) score, Tensor position, Tensor block_table, Tensor kv_lens, "
      "Tensor query_start_loc, Tensor query_positions, Tensor tau, Tensor noise_keys, "
      "Tensor front_blocks, Tensor? alibi_slopes, Tensor? sinks, int layer_index, "
      "int first_query_head, float scale, float soft_cap, int layout) -> ()");
  m.def(
      "reset_slots(Tensor(a!) score, Tensor(b!) position, Tensor slot_mapping, "
      "Tensor positions) -> ()");
  m.def(
      "renumber_slots(Tensor(a!) place, Tensor position, Tensor block_table, Tensor kv_lens) "
      "-> ()");
  m.def(
      "select_keep(Tensor score, Tensor position, Tensor block_table, Tensor kv_lens, "
      "Tensor num_evict, Tensor num_sinks, Tensor recent_start, Tensor run_size, Tensor random, "
      "Tensor noise_keys, int max_kv_len, int first_layer, int first_kv_head) -> Tensor");
  m.def(
      "compact_kv(Tensor(a!) kv_cache, Tensor(b!) score, Tensor(c!) position, Tensor block_table, "
      "Tensor kv_lens, Tensor num_evict, Tensor keep, int layout) -> ()");
  m.def(
      "exchange_kv(Tensor(a!) kv_cache, Tensor(b!) score, Tensor(c!) position, "
      "Tensor block_table, Tensor kv_lens, Tensor num_evict, Tensor keep, int layout) -> ()");
  m.def(
      "draw_noise(Tensor positions, int noise_key, int layer, int query_head, "
      "int query_position, bool gumbel) -> Tensor");
}

}  // namespace
