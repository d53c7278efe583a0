// The host's view of a device tensor: the same memory.
#pragma once
#include <ATen/ATen.h>

namespace simulated_npu {

inline at::Tensor host_alias(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

}  // namespace simulated_npu
