// SPDX-License-Identifier: Apache-2.0
// The operators on GPU tensors, on PyTorch's stable ABI: argument checks and nothing else. Schemas
// are those of csrc/cpu/torch_bindings.cpp, which must be loaded first. Only shapes, dtypes and
// strides are checked: looking at a value would wait for the device.
//
// Tests compile this file for CPU tensors as well, with KEYFORMER_EMULATE_CUDA and an emulation of
// the launches; then it brings schemas of its own.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(KEYFORMER_EMULATE_CUDA)
#include "../schemas.hpp"
#include "emulated_order.h"
#else
#include <torch/csrc/stable/accelerator.h>
#endif

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../tensor_checks.hpp"
#include "launch.h"

namespace {

#if defined(KEYFORMER_EMULATE_CUDA)

void check_device(const char* name, const Tensor& tensor) {
  check(tensor.is_cpu(), name, ": must be a CPU tensor");
}

class Device {
 public:
  explicit Device(const Tensor&) {}
  void* stream() const { return nullptr; }
};

#else

void check_device(const char* name, const Tensor& tensor) {
  check(tensor.is_cuda(), name, ": must be a CUDA tensor");
}

// Makes the device of a tensor the current one; launches go to its current stream.
class Device {
 public:
  explicit Device(const Tensor& tensor)
      : index_(tensor.get_device_index()), guard_(tensor.get_device_index()) {}

  void* stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return stream;
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

#endif

constexpr int64_t kRowLayout = 2;  // after those of the CPU
constexpr int64_t kAccessBytes = 16;

int32_t block_bits(const char* name, int64_t block_size) {
  int32_t bits = 0;
  while (bits < 30 && (int64_t{1} << bits) < block_size) ++bits;
  check((int64_t{1} << bits) == block_size, name, ": block size must be a power of two, got ",
        block_size);
  return bits;
}

// `offset` is 1 where the tensor has a leading layer dimension.
template <typename T>
keyformer::cuda::SideView<T> side_view(const char* name, const Tensor& tensor, ScalarType type,
                                       int64_t offset, const Tensor* like) {
  check_tensor(name, tensor, type, 3 + offset);
  if (like != nullptr) {
    for (int64_t dim = 0; dim < 3 + offset; ++dim) check_size(name, tensor, dim, like->size(dim));
  }
  return {static_cast<T*>(tensor.data_ptr()), offset == 1 ? tensor.stride(0) : 0,
          tensor.stride(offset), tensor.stride(offset + 1)};
}

// Rows are read 16 bytes at a time: whatever is added to an address must be a multiple of that.
void check_alignment(const char* name, const Tensor& tensor, int64_t row_bytes) {
  const int64_t element_size = static_cast<int64_t>(tensor.element_size());
  check(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAccessBytes == 0, name,
        ": must start at a multiple of 16 bytes");
  check(row_bytes % kAccessBytes == 0, name, ": rows must be multiples of 16 bytes, got ",
        row_bytes);
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    check(tensor.size(dim) <= 1 || tensor.stride(dim) * element_size % kAccessBytes == 0, name,
          ": stride ", dim, " must be a multiple of 16 bytes, got ",
          tensor.stride(dim) * element_size);
  }
}

keyformer::cuda::RowCache row_cache(const Tensor& cache, int64_t offset, int64_t layout) {
  check_device("kv_cache", cache);
  check(cache.dim() == 4 + offset, "kv_cache: has ", cache.dim(), " dimensions, expected ",
        4 + offset);
  check(layout == kRowLayout, "layout: on a GPU it must be nhd or hnd, got number ", layout);
  const int64_t width = cache.size(offset + 3);
  const int64_t element_size = static_cast<int64_t>(cache.element_size());
  check(width > 0 && width % 2 == 0, "kv_cache: last dimension must hold K and V, got ", width);
  check(cache.stride(offset + 3) == 1, "kv_cache: last dimension must be contiguous, stride is ",
        cache.stride(offset + 3));
  check_alignment("kv_cache", cache, width / 2 * element_size);
  return {static_cast<char*>(cache.data_ptr()),
          element_size,
          offset == 1 ? cache.stride(0) : 0,
          cache.stride(offset),
          cache.stride(offset + 1),
          cache.stride(offset + 2),
          static_cast<int32_t>(offset == 1 ? cache.size(0) : 1),
          static_cast<int32_t>(cache.size(offset + 1)),
          block_bits("kv_cache", cache.size(offset + 2)),
          static_cast<int32_t>(width / 2)};
}

void check_side_size(const char* name, const Tensor& side, const Tensor& cache) {
  for (int64_t dim = 0; dim < side.dim(); ++dim) check_size(name, side, dim, cache.size(dim));
}

keyformer::cuda::RequestBatch request_batch(const Tensor& block_table, const Tensor& kv_lens) {
  check_tensor("block_table", block_table, ScalarType::Int, 2);
  const int64_t num_reqs = block_table.size(0);
  return {static_cast<const int32_t*>(block_table.data_ptr()), block_table.stride(0),
          vector_data<int32_t>("kv_lens", kv_lens, ScalarType::Int, num_reqs),
          static_cast<int32_t>(num_reqs), static_cast<int32_t>(block_table.size(1))};
}

keyformer::cuda::ElementType element_type(const Tensor& cache) {
  const ScalarType type = cache.scalar_type();
  check(type == ScalarType::BFloat16 || type == ScalarType::Half,
        "kv_cache: dtype must be bfloat16 or float16, got ", dtype_name(type));
  return type == ScalarType::BFloat16 ? keyformer::cuda::ElementType::kBFloat16
                                      : keyformer::cuda::ElementType::kFloat16;
}

keyformer::cuda::ScoreKeysArgs score_keys_args(
    const Tensor& query, const Tensor& kv_cache, const Tensor& score, const Tensor& position,
    const Tensor& block_table, const Tensor& kv_lens, const Tensor& query_start_loc,
    const Tensor& query_positions, const Tensor& tau, const Tensor& noise_keys,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& place,
    const std::optional<Tensor>& sinks, int64_t layer_index, int64_t first_query_head, double scale,
    double soft_cap, int64_t layout) {
  keyformer::cuda::ScoreKeysArgs args{};
  args.cache = row_cache(kv_cache, 0, layout);
  args.element_type = element_type(kv_cache);
  const int64_t head_size = args.cache.head_size;
  check(keyformer::cuda::scores_head_size(head_size),
        "kv_cache: head size must be 64, 80, 96, 128 or 256, got ", head_size);
  check_tensor("query", query, kv_cache.scalar_type(), 3);
  check_size("query", query, 2, head_size);
  check_alignment("query", query, head_size * static_cast<int64_t>(query.element_size()));
  args.query = static_cast<const char*>(query.data_ptr());
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.num_tokens = static_cast<int32_t>(query.size(0));
  args.num_query_heads = static_cast<int32_t>(query.size(1));
  check(args.num_query_heads % args.cache.num_kv_heads == 0, "query: ", args.num_query_heads,
        " query heads do not divide among ", args.cache.num_kv_heads, " KV heads");
  args.score = side_view<float>("score", score, ScalarType::Float, 0, nullptr);
  check_side_size("score", score, kv_cache);
  args.position = side_view<const int32_t>("position", position, ScalarType::Int, 0, &score);
  if (place.has_value()) {
    args.place = side_view<const int32_t>("place", *place, ScalarType::Int, 0, &score);
  }
  args.requests = request_batch(block_table, kv_lens);
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

// Scratch of the plan, all in one tensor, which must live until the launches are queued.
Tensor make_plan(const Tensor& query, keyformer::cuda::ScoreKeysArgs& args) {
  const int64_t num_tokens = args.num_tokens;
  const int64_t num_reqs = args.requests.num_reqs;
  const std::vector<int64_t> size = {2 * num_tokens + 1 + 2 * (num_reqs + 1)};
  Tensor scratch = torch::stable::new_empty(query, size, ScalarType::Int);
  args.plan.tokens = static_cast<int32_t*>(scratch.data_ptr());
  args.plan.ranks = args.plan.tokens + num_tokens;
  args.plan.row_tiles = args.plan.ranks + num_tokens + 1;
  args.plan.key_tiles = args.plan.row_tiles + num_reqs + 1;
  return scratch;
}

// Scratch of a call, kept for the next one: a step allocates nothing. A captured graph goes
// on using what it was captured with, so an outgrown buffer is kept as well; each is twice as large
// as the one before, so that together they are hardly more than the last two. Launches of one
// stream run one after the other and share it.
void* kept_scratch(const Tensor& like, int64_t num_bytes, void* stream) {
  static std::mutex mutex;
  static std::map<std::pair<int32_t, void*>, std::vector<Tensor>> kept;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& buffers = kept[{like.get_device_index(), stream}];
  const int64_t last = buffers.empty() ? 0 : buffers.back().numel();
  if (buffers.empty() || last < num_bytes) {
    const std::vector<int64_t> size = {
        std::max(num_bytes, std::min(2 * last, keyformer::cuda::kMaxScratchBytes))};
    buffers.push_back(torch::stable::new_empty(like, size, ScalarType::Byte));
  }
  return buffers.back().data_ptr();
}

void score_keys(const Tensor& query, const Tensor& kv_cache, const Tensor& score,
                const Tensor& position, const Tensor& block_table, const Tensor& kv_lens,
                const Tensor& query_start_loc, const Tensor& query_positions, const Tensor& tau,
                const Tensor& noise_keys, const std::optional<Tensor>& alibi_slopes,
                const std::optional<Tensor>& place, const std::optional<Tensor>& sinks,
                int64_t layer_index, int64_t first_query_head, double scale, double soft_cap,
                int64_t layout) {
  auto args = score_keys_args(query, kv_cache, score, position, block_table, kv_lens,
                              query_start_loc, query_positions, tau, noise_keys, alibi_slopes,
                              place, sinks, layer_index, first_query_head, scale, soft_cap, layout);
  const Device device(query);
  const Tensor plan = make_plan(query, args);
  const int64_t num_bytes = keyformer::cuda::score_scratch_bytes(args);
  void* scratch = kept_scratch(query, num_bytes, device.stream());
  keyformer::cuda::launch_score_keys(args, scratch, device.stream());
}

void paged_attention_scored(const Tensor& output, const Tensor& query, const Tensor& kv_cache,
                            const Tensor& score, const Tensor& position, const Tensor& block_table,
                            const Tensor& kv_lens, const Tensor& query_start_loc,
                            const Tensor& query_positions, const Tensor& tau,
                            const Tensor& noise_keys, const std::optional<Tensor>& alibi_slopes,
                            const std::optional<Tensor>& place, const std::optional<Tensor>& sinks,
                            int64_t layer_index, int64_t first_query_head, double scale,
                            double soft_cap, int64_t layout) {
  keyformer::cuda::PagedAttentionScoredArgs args{};
  args.inputs =
      score_keys_args(query, kv_cache, score, position, block_table, kv_lens, query_start_loc,
                      query_positions, tau, noise_keys, alibi_slopes, place, sinks, layer_index,
                      first_query_head, scale, soft_cap, layout);
  check(args.inputs.cache.block_bits >= 4, "kv_cache: block size must be at least 16");
  check_tensor("output", output, query.scalar_type(), 3);
  for (int64_t dim = 0; dim < 3; ++dim) check_size("output", output, dim, query.size(dim));
  args.output = static_cast<char*>(output.data_ptr());
  args.output_token_stride = output.stride(0);
  args.output_head_stride = output.stride(1);
  const Device device(query);
  const int64_t num_bytes = keyformer::cuda::attention_scratch_bytes(args.inputs);
  void* scratch = kept_scratch(query, num_bytes, device.stream());
  keyformer::cuda::launch_paged_attention_scored(args, scratch, device.stream());
}

void renumber_slots(const Tensor& place, const Tensor& position, const Tensor& block_table,
                    const Tensor& kv_lens) {
  keyformer::cuda::RenumberSlotsArgs args{};
  args.place = side_view<int32_t>("place", place, ScalarType::Int, 1, nullptr);
  args.position = side_view<const int32_t>("position", position, ScalarType::Int, 1, &place);
  args.num_layers = static_cast<int32_t>(place.size(0));
  args.num_kv_heads = static_cast<int32_t>(place.size(2));
  args.block_bits = block_bits("place", place.size(3));
  args.requests = request_batch(block_table, kv_lens);
  const Device device(place);
  keyformer::cuda::launch_renumber_slots(args, device.stream());
}

void reset_slots(const Tensor& score, const Tensor& position, const Tensor& slot_mapping,
                 const Tensor& positions) {
  keyformer::cuda::ResetSlotsArgs args{};
  args.score = side_view<float>("score", score, ScalarType::Float, 1, nullptr);
  args.position = side_view<int32_t>("position", position, ScalarType::Int, 1, &score);
  args.num_layers = static_cast<int32_t>(score.size(0));
  args.num_kv_heads = static_cast<int32_t>(score.size(2));
  args.block_bits = block_bits("score", score.size(3));
  args.num_tokens = slot_mapping.numel();
  args.slot_mapping =
      vector_data<int64_t>("slot_mapping", slot_mapping, ScalarType::Long, args.num_tokens);
  args.positions = vector_data<int64_t>("positions", positions, ScalarType::Long, args.num_tokens);
  const Device device(score);
  keyformer::cuda::launch_reset_slots(args, device.stream());
}

Tensor select_keep(const Tensor& score, const Tensor& position, const Tensor& block_table,
                   const Tensor& kv_lens, const Tensor& num_evict, const Tensor& num_sinks,
                   const Tensor& recent_start, const Tensor& run_size, const Tensor& random,
                   const Tensor& noise_keys, int64_t max_kv_len, int64_t first_layer,
                   int64_t first_kv_head) {
  keyformer::cuda::SelectKeepArgs args{};
  args.score = side_view<const float>("score", score, ScalarType::Float, 1, nullptr);
  args.position = side_view<const int32_t>("position", position, ScalarType::Int, 1, &score);
  args.num_layers = static_cast<int32_t>(score.size(0));
  args.num_kv_heads = static_cast<int32_t>(score.size(2));
  args.block_bits = block_bits("score", score.size(3));
  args.requests = request_batch(block_table, kv_lens);
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
  const Device device(score);
  const std::vector<int64_t> size = {score.size(0), num_reqs, score.size(2), max_kv_len};
  Tensor keep = torch::stable::new_empty(score, size, ScalarType::Bool);
  args.keep = static_cast<uint8_t*>(keep.data_ptr());
  keyformer::cuda::launch_select_keep(args, device.stream());
  return keep;
}

void compact_kv(const Tensor& kv_cache, const Tensor& score, const Tensor& position,
                const Tensor& block_table, const Tensor& kv_lens, const Tensor& num_evict,
                const Tensor& keep, int64_t layout) {
  keyformer::cuda::CompactKvArgs args{};
  args.cache = row_cache(kv_cache, 1, layout);
  args.score = side_view<float>("score", score, ScalarType::Float, 1, nullptr);
  check_side_size("score", score, kv_cache);
  args.position = side_view<int32_t>("position", position, ScalarType::Int, 1, &score);
  args.requests = request_batch(block_table, kv_lens);
  const int64_t num_reqs = args.requests.num_reqs;
  args.num_evict = vector_data<int32_t>("num_evict", num_evict, ScalarType::Int, num_reqs);
  check_tensor("keep", keep, ScalarType::Bool, 4);
  check(keep.is_contiguous(), "keep: must be contiguous");
  check_size("keep", keep, 0, args.cache.num_layers);
  check_size("keep", keep, 1, num_reqs);
  check_size("keep", keep, 2, args.cache.num_kv_heads);
  args.keep = static_cast<const uint8_t*>(keep.data_ptr());
  args.max_kv_len = keep.size(3);
  const Device device(kv_cache);
  keyformer::cuda::launch_compact_kv(args, device.stream());
}

// Noise of one row, for tests against its Python twin.
Tensor draw_noise(const Tensor& positions, int64_t noise_key, int64_t layer, int64_t query_head,
                  int64_t query_position, bool gumbel) {
  const int64_t num_keys = positions.numel();
  const int32_t* keys = vector_data<int32_t>("positions", positions, ScalarType::Int, num_keys);
  const Device device(positions);
  const std::vector<int64_t> size = {num_keys};
  Tensor noise = torch::stable::new_empty(positions, size, ScalarType::Float);
  keyformer::cuda::launch_draw_noise({keys, num_keys, noise_key, layer, query_head, query_position,
                                      gumbel, static_cast<float*>(noise.data_ptr())},
                                     device.stream());
  return noise;
}

template <typename Library>
void register_kernels(Library& m) {
  m.impl("draw_noise", TORCH_BOX(&draw_noise));
  m.impl("score_keys", TORCH_BOX(&score_keys));
  m.impl("paged_attention_scored", TORCH_BOX(&paged_attention_scored));
  m.impl("renumber_slots", TORCH_BOX(&renumber_slots));
  m.impl("reset_slots", TORCH_BOX(&reset_slots));
  m.impl("select_keep", TORCH_BOX(&select_keep));
  m.impl("compact_kv", TORCH_BOX(&compact_kv));
}

}  // namespace

#if defined(KEYFORMER_EMULATE_CUDA)

STABLE_TORCH_LIBRARY(keyformer_emulated, m) {
  define_operators(m);
  m.def("set_reversed(bool reversed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(keyformer_emulated, CPU, m) { register_kernels(m); }

STABLE_TORCH_LIBRARY_IMPL(keyformer_emulated, CompositeExplicitAutograd, m) {
  m.impl("set_reversed", TORCH_BOX(&keyformer::cuda::set_reversed));
}

#else

STABLE_TORCH_LIBRARY_IMPL(keyformer, CUDA, m) { register_kernels(m); }

// Importing the module registers the operators; it holds nothing itself.
extern "C" PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

#endif
