// SPDX-License-Identifier: Apache-2.0
// The operators as PyTorch sees them, on its stable ABI: schemas, argument checks and nothing else.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../schemas.hpp"
#include "../tensor_checks.hpp"
#include "compact_kv.h"
#include "isa.h"
#include "paged_attention_scored.h"
#include "renumber_slots.h"
#include "reset_slots.h"
#include "score_keys.h"
#include "select_keep.h"

namespace {

void check_device(const char* name, const Tensor& tensor) {
  check(tensor.is_cpu(), name, ": must be a CPU tensor");
}

std::atomic<keyformer::Isa> forced_isa{keyformer::Isa::kAuto};

const keyformer::IsaKernels& active_kernels() {
  return keyformer::kernels_for(forced_isa.load(std::memory_order_relaxed));
}

keyformer::ThreadPool torch_pool() {
  // torch's own pool, so that the engine's thread binding holds.
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t num_threads, void (*body)(void*), void* context) {
            torch::stable::parallel_for(0, num_threads, 1,
                                        [&](int64_t, int64_t) { body(context); });
          }};
}

// `offset` is 1 where the tensor has a leading layer dimension.
template <typename T>
keyformer::SideView<T> side_view(const char* name, const Tensor& tensor, ScalarType type,
                                 int64_t offset, const Tensor* like) {
  check_tensor(name, tensor, type, 3 + offset);
  if (like != nullptr) {
    for (int64_t dim = 0; dim < 3 + offset; ++dim) check_size(name, tensor, dim, like->size(dim));
  }
  return {static_cast<T*>(tensor.data_ptr()), offset == 1 ? tensor.stride(0) : 0,
          tensor.stride(offset), tensor.stride(offset + 1)};
}

keyformer::PagedCache paged_cache(const Tensor& cache, int64_t offset, int64_t layout) {
  check_device("kv_cache", cache);
  check(cache.dim() == 4 + offset, "kv_cache: has ", cache.dim(), " dimensions, expected ",
        4 + offset);
  check(layout == 0 || layout == 1, "layout: unknown number ", layout);
  const int64_t block_size = cache.size(offset + 2);
  const int64_t width = cache.size(offset + 3);
  check(block_size > 0 && block_size % keyformer::kKeyChunk == 0,
        "kv_cache: block size must be a multiple of 32, got ", block_size);
  check(width > 0 && width % 32 == 0, "kv_cache: head size must be a multiple of 16, got ",
        width / 2);
  check(cache.stride(offset + 3) == 1 && cache.stride(offset + 2) == width,
        "kv_cache: one (block, head) must be contiguous, strides are ", cache.stride(offset + 2),
        ", ", cache.stride(offset + 3));
  const int64_t element_size = static_cast<int64_t>(cache.element_size());
  check(element_size == 1 || element_size == 2 || element_size == 4,
        "kv_cache: element size must be 1, 2 or 4 bytes, got ", element_size);
  check(layout == 0 || element_size == 2, "layout: amx packs 2-byte elements, kv_cache has ",
        element_size);
  return {static_cast<char*>(cache.data_ptr()),
          element_size,
          offset == 1 ? cache.stride(0) : 0,
          cache.stride(offset),
          cache.stride(offset + 1),
          offset == 1 ? cache.size(0) : 1,
          cache.size(offset),
          cache.size(offset + 1),
          block_size,
          width / 2,
          static_cast<keyformer::Layout>(layout)};
}

void check_side_size(const char* name, const Tensor& side, const Tensor& cache) {
  for (int64_t dim = 0; dim < side.dim(); ++dim) check_size(name, side, dim, cache.size(dim));
}

keyformer::RequestBatch request_batch(const Tensor& block_table, const Tensor& kv_lens) {
  check_tensor("block_table", block_table, ScalarType::Int, 2);
  const int64_t num_reqs = block_table.size(0);
  return {static_cast<const int32_t*>(block_table.data_ptr()), block_table.stride(0),
          vector_data<int32_t>("kv_lens", kv_lens, ScalarType::Int, num_reqs), num_reqs};
}

keyformer::ElementType element_type(const Tensor& tensor, int64_t layout) {
  const ScalarType type = tensor.scalar_type();
  check(layout == 0 || type == ScalarType::BFloat16,
        "layout: amx is scored in bfloat16 only, kv_cache is ", dtype_name(type));
  if (type == ScalarType::Float) return keyformer::ElementType::kFloat32;
  if (type == ScalarType::BFloat16) return keyformer::ElementType::kBFloat16;
  check(type == ScalarType::Half, "kv_cache: dtype must be float32, bfloat16 or float16, got ",
        dtype_name(type));
  return keyformer::ElementType::kFloat16;
}

keyformer::ScoreKeysArgs score_keys_args(
    const Tensor& query, const Tensor& kv_cache, const Tensor& score, const Tensor& position,
    const Tensor& block_table, const Tensor& kv_lens, const Tensor& query_start_loc,
    const Tensor& query_positions, const Tensor& tau, const Tensor& noise_keys,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& place,
    const std::optional<Tensor>& sinks, int64_t layer_index, int64_t first_query_head, double scale,
    double soft_cap, int64_t layout) {
  keyformer::ScoreKeysArgs args{};
  args.cache = paged_cache(kv_cache, 0, layout);
  args.element_type = element_type(kv_cache, layout);
  check_tensor("query", query, kv_cache.scalar_type(), 3);
  check_size("query", query, 2, args.cache.head_size);
  args.query = static_cast<const char*>(query.data_ptr());
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.num_tokens = query.size(0);
  args.num_query_heads = query.size(1);
  check(args.num_query_heads % args.cache.num_kv_heads == 0, "query: ", args.num_query_heads,
        " query heads do not divide among ", args.cache.num_kv_heads, " KV heads");
  args.score = side_view<float>("score", score, ScalarType::Float, 0, nullptr);
  check_side_size("score", score, kv_cache);
  args.position = side_view<const int32_t>("position", position, ScalarType::Int, 0, &score);
  if (place.has_value()) {
    args.place = side_view<const int32_t>("place", *place, ScalarType::Int, 0, &score);
  }
  args.requests = request_batch(block_table, kv_lens);
  args.max_blocks = block_table.size(1);
  const int64_t num_reqs = args.requests.num_reqs;
  args.query_start_loc =
      vector_data<int32_t>("query_start_loc", query_start_loc, ScalarType::Int, num_reqs + 1);
  args.query_positions =
      vector_data<int64_t>("query_positions", query_positions, ScalarType::Long, args.num_tokens);
  args.tau = vector_data<float>("tau", tau, ScalarType::Float, args.num_tokens);
  args.noise_keys = vector_data<int64_t>("noise_keys", noise_keys, ScalarType::Long, num_reqs);
  args.alibi_slopes = per_query_head("alibi_slopes", alibi_slopes, args.num_query_heads);
  args.sinks = per_query_head("sinks", sinks, args.num_query_heads);
  args.layer_index = layer_index;
  args.first_query_head = first_query_head;
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap);
  return args;
}

void score_keys(const Tensor& query, const Tensor& kv_cache, const Tensor& score,
                const Tensor& position, const Tensor& block_table, const Tensor& kv_lens,
                const Tensor& query_start_loc, const Tensor& query_positions, const Tensor& tau,
                const Tensor& noise_keys, const std::optional<Tensor>& alibi_slopes,
                const std::optional<Tensor>& place, const std::optional<Tensor>& sinks,
                int64_t layer_index, int64_t first_query_head, double scale, double soft_cap,
                int64_t layout) {
  const auto args =
      score_keys_args(query, kv_cache, score, position, block_table, kv_lens, query_start_loc,
                      query_positions, tau, noise_keys, alibi_slopes, place, sinks, layer_index,
                      first_query_head, scale, soft_cap, layout);
  keyformer::score_keys(args, active_kernels(), torch_pool());
}

// Completes the arguments of the kernel and runs it.
void attend(keyformer::PagedAttentionScoredArgs args, const Tensor& output, const Tensor& query) {
  check_tensor("output", output, query.scalar_type(), 3);
  for (int64_t dim = 0; dim < 3; ++dim) check_size("output", output, dim, query.size(dim));
  args.output = static_cast<char*>(output.data_ptr());
  args.output_token_stride = output.stride(0);
  args.output_head_stride = output.stride(1);
  keyformer::paged_attention_scored(args, active_kernels(), torch_pool());
}

void paged_attention_scored(const Tensor& output, const Tensor& query, const Tensor& kv_cache,
                            const Tensor& score, const Tensor& position, const Tensor& block_table,
                            const Tensor& kv_lens, const Tensor& query_start_loc,
                            const Tensor& query_positions, const Tensor& tau,
                            const Tensor& noise_keys, const std::optional<Tensor>& alibi_slopes,
                            const std::optional<Tensor>& place, const std::optional<Tensor>& sinks,
                            int64_t layer_index, int64_t first_query_head, double scale,
                            double soft_cap, int64_t layout) {
  keyformer::PagedAttentionScoredArgs args{};
  args.inputs =
      score_keys_args(query, kv_cache, score, position, block_table, kv_lens, query_start_loc,
                      query_positions, tau, noise_keys, alibi_slopes, place, sinks, layer_index,
                      first_query_head, scale, soft_cap, layout);
  attend(args, output, query);
}

void paged_attention_audited(const Tensor& output, const Tensor& audit, const Tensor& query,
                             const Tensor& kv_cache, const Tensor& score, const Tensor& position,
                             const Tensor& block_table, const Tensor& kv_lens,
                             const Tensor& query_start_loc, const Tensor& query_positions,
                             const Tensor& tau, const Tensor& noise_keys,
                             const Tensor& front_blocks, const std::optional<Tensor>& alibi_slopes,
                             const std::optional<Tensor>& sinks, int64_t layer_index,
                             int64_t first_query_head, double scale, double soft_cap,
                             int64_t layout) {
  keyformer::PagedAttentionScoredArgs args{};
  args.inputs =
      score_keys_args(query, kv_cache, score, position, block_table, kv_lens, query_start_loc,
                      query_positions, tau, noise_keys, alibi_slopes, std::nullopt, sinks,
                      layer_index, first_query_head, scale, soft_cap, layout);
  args.front_blocks = vector_data<int32_t>("front_blocks", front_blocks, ScalarType::Int,
                                           args.inputs.requests.num_reqs);
  check_tensor("audit", audit, ScalarType::Float, 3);
  check(audit.is_contiguous(), "audit: must be contiguous");
  check_size("audit", audit, 0, args.inputs.num_tokens);
  check_size("audit", audit, 1, args.inputs.num_query_heads);
  check_size("audit", audit, 2, 3);
  args.audit = static_cast<float*>(audit.data_ptr());
  attend(args, output, query);
}

void reset_slots(const Tensor& score, const Tensor& position, const Tensor& slot_mapping,
                 const Tensor& positions) {
  keyformer::ResetSlotsArgs args{};
  args.score = side_view<float>("score", score, ScalarType::Float, 1, nullptr);
  args.position = side_view<int32_t>("position", position, ScalarType::Int, 1, &score);
  args.num_layers = score.size(0);
  args.num_blocks = score.size(1);
  args.num_kv_heads = score.size(2);
  args.block_size = score.size(3);
  args.num_tokens = slot_mapping.numel();
  args.slot_mapping =
      vector_data<int64_t>("slot_mapping", slot_mapping, ScalarType::Long, args.num_tokens);
  args.positions = vector_data<int64_t>("positions", positions, ScalarType::Long, args.num_tokens);
  keyformer::reset_slots(args, torch_pool());
}

void renumber_slots(const Tensor& place, const Tensor& position, const Tensor& block_table,
                    const Tensor& kv_lens) {
  keyformer::RenumberSlotsArgs args{};
  args.place = side_view<int32_t>("place", place, ScalarType::Int, 1, nullptr);
  args.position = side_view<const int32_t>("position", position, ScalarType::Int, 1, &place);
  args.num_layers = place.size(0);
  args.num_blocks = place.size(1);
  args.num_kv_heads = place.size(2);
  args.block_size = place.size(3);
  args.requests = request_batch(block_table, kv_lens);
  args.max_blocks = block_table.size(1);
  keyformer::renumber_slots(args, torch_pool());
}

Tensor select_keep(const Tensor& score, const Tensor& position, const Tensor& block_table,
                   const Tensor& kv_lens, const Tensor& num_evict, const Tensor& num_sinks,
                   const Tensor& recent_start, const Tensor& run_size, const Tensor& random,
                   const Tensor& noise_keys, int64_t max_kv_len, int64_t first_layer,
                   int64_t first_kv_head) {
  keyformer::SelectKeepArgs args{};
  args.score = side_view<const float>("score", score, ScalarType::Float, 1, nullptr);
  args.position = side_view<const int32_t>("position", position, ScalarType::Int, 1, &score);
  args.num_layers = score.size(0);
  args.num_blocks = score.size(1);
  args.num_kv_heads = score.size(2);
  args.block_size = score.size(3);
  args.requests = request_batch(block_table, kv_lens);
  args.max_blocks = block_table.size(1);
  const int64_t num_reqs = args.requests.num_reqs;
  args.num_evict = vector_data<int32_t>("num_evict", num_evict, ScalarType::Int, num_reqs);
  args.num_sinks = vector_data<int32_t>("num_sinks", num_sinks, ScalarType::Int, num_reqs);
  args.recent_start = vector_data<int32_t>("recent_start", recent_start, ScalarType::Int, num_reqs);
  args.run_size = vector_data<int32_t>("run_size", run_size, ScalarType::Int, num_reqs);
  const ScalarType flag = random.scalar_type();
  check(flag == ScalarType::Bool || flag == ScalarType::Byte,
        "random: dtype must be bool or uint8, got ", dtype_name(flag));
  args.random = vector_data<uint8_t>("random", random, flag, num_reqs);
  args.noise_keys = vector_data<int64_t>("noise_keys", noise_keys, ScalarType::Long, num_reqs);
  args.first_layer = first_layer;
  args.first_kv_head = first_kv_head;
  args.max_kv_len = max_kv_len;
  check(max_kv_len >= 0, "max_kv_len: must not be negative, got ", max_kv_len);
  const std::vector<int64_t> size = {args.num_layers, num_reqs, args.num_kv_heads, max_kv_len};
  Tensor keep = torch::stable::new_zeros(score, size, ScalarType::Bool);
  args.keep = static_cast<uint8_t*>(keep.data_ptr());
  keyformer::select_keep(args, torch_pool());
  return keep;
}

void move_survivors(bool exchange, const Tensor& kv_cache, const Tensor& score,
                    const Tensor& position, const Tensor& block_table, const Tensor& kv_lens,
                    const Tensor& num_evict, const Tensor& keep, int64_t layout) {
  keyformer::CompactKvArgs args{};
  args.cache = paged_cache(kv_cache, 1, layout);
  args.score = side_view<float>("score", score, ScalarType::Float, 1, nullptr);
  check_side_size("score", score, kv_cache);
  args.position = side_view<int32_t>("position", position, ScalarType::Int, 1, &score);
  args.requests = request_batch(block_table, kv_lens);
  args.max_blocks = block_table.size(1);
  const int64_t num_reqs = args.requests.num_reqs;
  args.num_evict = vector_data<int32_t>("num_evict", num_evict, ScalarType::Int, num_reqs);
  check_tensor("keep", keep, ScalarType::Bool, 4);
  check(keep.is_contiguous(), "keep: must be contiguous");
  check_size("keep", keep, 0, args.cache.num_layers);
  check_size("keep", keep, 1, num_reqs);
  check_size("keep", keep, 2, args.cache.num_kv_heads);
  args.keep = static_cast<const uint8_t*>(keep.data_ptr());
  args.max_kv_len = keep.size(3);
  args.exchange = exchange;
  keyformer::compact_kv(args, torch_pool());
}

void compact_kv(const Tensor& kv_cache, const Tensor& score, const Tensor& position,
                const Tensor& block_table, const Tensor& kv_lens, const Tensor& num_evict,
                const Tensor& keep, int64_t layout) {
  move_survivors(false, kv_cache, score, position, block_table, kv_lens, num_evict, keep, layout);
}

void exchange_kv(const Tensor& kv_cache, const Tensor& score, const Tensor& position,
                 const Tensor& block_table, const Tensor& kv_lens, const Tensor& num_evict,
                 const Tensor& keep, int64_t layout) {
  move_survivors(true, kv_cache, score, position, block_table, kv_lens, num_evict, keep, layout);
}

// Noise of one row, for tests against its Python twin.
Tensor draw_noise(const Tensor& positions, int64_t noise_key, int64_t layer, int64_t query_head,
                  int64_t query_position, bool gumbel) {
  const int64_t num_keys = positions.numel();
  const int32_t* source = vector_data<int32_t>("positions", positions, ScalarType::Int, num_keys);
  const int64_t padded =
      (num_keys + keyformer::kKeyChunk - 1) / keyformer::kKeyChunk * keyformer::kKeyChunk;
  std::vector<int32_t> keys(source, source + num_keys);
  keys.resize(padded);
  std::vector<float> noise(padded);
  active_kernels().fill_noise(keyformer::make_row_key(noise_key, layer, query_head, query_position),
                              keys.data(), num_keys, gumbel, noise.data());
  const std::vector<int64_t> size = {num_keys};
  Tensor result = torch::stable::new_empty(positions, size, ScalarType::Float);
  std::copy_n(noise.data(), num_keys, static_cast<float*>(result.data_ptr()));
  return result;
}

void set_cpu_isa(int64_t isa) {
  check(isa >= 0 && isa <= static_cast<int64_t>(keyformer::Isa::kAvx512Bf16),
        "isa: unknown number ", isa);
  const auto choice = static_cast<keyformer::Isa>(isa);
  if (!keyformer::cpu_has(choice)) {
    throw std::runtime_error("isa: this CPU lacks " +
                             std::string(keyformer::kernels_for(choice).name));
  }
  forced_isa.store(choice, std::memory_order_relaxed);
}

bool has_cpu_isa(int64_t isa) { return keyformer::cpu_has(static_cast<keyformer::Isa>(isa)); }

std::string cpu_isa() { return active_kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY(keyformer, m) {
  define_operators(m);
  m.def("set_cpu_isa(int isa) -> ()");
  m.def("has_cpu_isa(int isa) -> bool");
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(keyformer, CPU, m) {
  m.impl("score_keys", TORCH_BOX(&score_keys));
  m.impl("paged_attention_scored", TORCH_BOX(&paged_attention_scored));
  m.impl("paged_attention_audited", TORCH_BOX(&paged_attention_audited));
  m.impl("reset_slots", TORCH_BOX(&reset_slots));
  m.impl("renumber_slots", TORCH_BOX(&renumber_slots));
  m.impl("select_keep", TORCH_BOX(&select_keep));
  m.impl("compact_kv", TORCH_BOX(&compact_kv));
  m.impl("exchange_kv", TORCH_BOX(&exchange_kv));
  m.impl("draw_noise", TORCH_BOX(&draw_noise));
}

// No tensor argument to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(keyformer, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("has_cpu_isa", TORCH_BOX(&has_cpu_isa));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}

// Importing the module registers the operators; it holds nothing itself.
extern "C" PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
