// SPDX-License-Identifier: Apache-2.0
// Checks of tensors for the bindings, on PyTorch's stable ABI. The one header that knows torch:
// only bindings include it. Each message begins with the name of the argument.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Defined by each of the bindings: refuses a tensor that its kernels cannot reach.
void check_device(const char* name, const Tensor& tensor);

// Raises ValueError in Python. Like STD_TORCH_CHECK, without a C++ file name in the message.
template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return "another dtype";
  }
}

inline void check_tensor(const char* name, const Tensor& tensor, ScalarType type, int64_t rank) {
  check_device(name, tensor);
  check(tensor.scalar_type() == type, name, ": dtype must be ", dtype_name(type), ", got ",
        dtype_name(tensor.scalar_type()));
  check(tensor.dim() == rank, name, ": has ", tensor.dim(), " dimensions, expected ", rank);
  check(rank == 0 || tensor.size(rank - 1) <= 1 || tensor.stride(rank - 1) == 1, name,
        ": last dimension must be contiguous, its stride is ", tensor.stride(rank - 1));
}

inline void check_size(const char* name, const Tensor& tensor, int64_t dim, int64_t size) {
  check(tensor.size(dim) == size, name, ": dimension ", dim, " has size ", tensor.size(dim),
        ", expected ", size);
}

template <typename T>
const T* vector_data(const char* name, const Tensor& tensor, ScalarType type, int64_t size) {
  check_tensor(name, tensor, type, 1);
  check_size(name, tensor, 0, size);
  return static_cast<const T*>(tensor.data_ptr());
}

// nullptr where the model has none.
inline const float* per_query_head(const char* name, const std::optional<Tensor>& tensor,
                                   int64_t num_query_heads) {
  if (!tensor.has_value()) return nullptr;
  return vector_data<float>(name, *tensor, ScalarType::Float, num_query_heads);
}

}  // namespace
