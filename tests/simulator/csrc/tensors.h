// Tensors of the simulated device, as queued tasks see them.
#pragma once

#include "memory.h"

namespace simulator {

// While it exists, operations run plain CPU kernels, without autograd, autocast or Python dispatch modes.
struct CpuDispatch {
  CpuDispatch();

 private:
  c10::impl::ForceDispatchKeyGuard guard_;
};

// Memory, shape and dtype of a tensor. A task owns descriptions instead of tensors: a tensor may be owned by Python, and
// freeing it needs the lock of the interpreter.
struct TensorDescription {
  bool is_defined = false;
  BlockPointer block;  // null for a CPU tensor that is not pinned
  char* storage = nullptr;
  size_t storage_bytes = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  at::Tensor cpu_tensor;  // if there is no block

  // CPU tensor in the same memory.
  at::Tensor alias() const;
  // Access to the bytes from the first element to the last element.
  Use use(bool writes) const;
  int64_t num_spanned_elements() const;
};

inline bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }
TensorDescription describe(const at::Tensor& tensor);
at::Tensor empty_strided_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
// Enlarge the storage if the tensor does not fit.
void fit_storage(const at::Tensor& tensor);

}  // namespace simulator
