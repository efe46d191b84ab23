// Operations that allocate, resize, view or copy tensors of the simulated device.
#include "torch_headers.h"
#include "random.h"
#include "tensors.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

namespace simulator {
namespace {

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

c10::DispatchKeySet keys_above_kernels() {
  using Key = c10::DispatchKey;
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({Key::Python, Key::PythonTLSSnapshot, Key::PreDispatch});
}

int index_or_current(const std::optional<at::Device>& device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided_on(
      index_or_current(device), sizes, strides, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "The simulated device supports strided tensors only.");
  c10::DeviceGuard guard(c10::Device(kDevice, index_or_current(device)));
  return at::detail::empty_generic(
      sizes, &device_allocator(), kDeviceKeys, dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

const at::Tensor& resize_(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  fit_storage(tensor);
  return tensor;
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() != nullptr || sizes.empty()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  fit_storage(tensor);
  return tensor;
}

at::Tensor& set_full_storage(at::Tensor& tensor, at::Storage storage) {
  const auto num_elements = static_cast<int64_t>(storage.nbytes()) / tensor.element_size();
  return set_storage(tensor, std::move(storage), 0, {num_elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true);
  return set_storage(tensor, std::move(storage), 0, {0}, {1});
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

void copy_alias(const TensorDescription& source, const TensorDescription& target) {
  CpuDispatch dispatch;
  target.alias().copy_(source.alias());
}

void copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
  const TensorDescription from = describe(source);
  const TensorDescription to = describe(target);
  Stream* stream = current_stream(source.device().index());
  Stream* stream_of_target = current_stream(target.device().index());
  enqueue_wait(stream, record_event(stream_of_target));
  enqueue(stream, "copy", [from, to] { copy_alias(from, to); }, {from.use(false), to.use(true)});
  enqueue_wait(stream_of_target, record_event(stream));
}

// A copy between host and device is asynchronous only if the tensor of the host is pinned and the copy changes neither
// dtype nor layout. Other copies make the host wait, even if the caller passed non_blocking=True.
bool is_asynchronous(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::Tensor& on_host = is_simulated(source) ? target : source;
  return non_blocking && pinned_block_of(on_host.data_ptr()) != nullptr && on_host.is_contiguous() &&
      source.scalar_type() == target.scalar_type();
}

void copy_asynchronously(Stream* stream, const at::Tensor& source, const at::Tensor& target) {
  const bool is_to_host = is_simulated(source);
  const TensorDescription from = describe(source);
  const TensorDescription to = describe(target);
  const TensorDescription& on_host = is_to_host ? to : from;
  const at::Tensor& host_tensor = is_to_host ? target : source;
  auto* data = static_cast<char*>(host_tensor.data_ptr());
  PinnedCopy pinned(on_host.block, data, host_tensor.nbytes(), is_to_host);
  auto copy = [pinned, from, to] {
    pinned.start();
    copy_alias(from, to);
    pinned.finish();
  };
  enqueue(stream, is_to_host ? "copy to the host" : "copy to the device", copy, {from.use(false), to.use(true)});
}

void copy_and_wait(Stream* stream, const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool is_to_host = is_simulated(source);
  const std::string name = is_to_host ? "copy to the host" : "copy to the device";
  TensorDescription from = describe(source);
  const TensorDescription to = describe(target);
  count_wait(name + (non_blocking ? ", memory not pinned" : ", blocking"), Wait::implicit);
  enqueue(stream, name, [from, to] { copy_alias(from, to); }, {from.use(false), to.use(true)});
  finish_wait(record_event(stream));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (is_simulated(source) && is_simulated(target)) {
    copy_on_devices(source, target);
    return target;
  }
  const at::Tensor& on_host = is_simulated(source) ? target : source;
  const at::Tensor& on_device = is_simulated(source) ? source : target;
  TORCH_CHECK(on_host.is_cpu(), "Copies from ", source.device(), " to ", target.device(), " are not supported.");
  Stream* stream = current_stream(on_device.device().index());
  if (is_asynchronous(source, target, non_blocking)) {
    copy_asynchronously(stream, source, target);
  } else {
    copy_and_wait(stream, source, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  return copy_from(source, target.resize_(source.sizes()), false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait_for_stream(current_stream(tensor.device().index()), "item", Wait::implicit);
  CpuDispatch dispatch;
  return describe(tensor).alias().item();
}

// Without this kernel, Module.to would create new Parameters, and tied weights would no longer be tied.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor&) { return true; }

int64_t choose_math(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

CpuDispatch::CpuDispatch()
    : guard_(c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView), keys_above_kernels()) {}

int64_t TensorDescription::num_spanned_elements() const {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return last + 1;
}

Use TensorDescription::use(bool writes) const {
  const int64_t num_elements = num_spanned_elements();
  if (block == nullptr || num_elements == 0) return {nullptr, 0, 0, writes};
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t begin = (storage - block->data) + offset * element_bytes;
  return {block, begin, begin + num_elements * element_bytes, writes};
}

at::Tensor TensorDescription::alias() const {
  if (block == nullptr) return cpu_tensor;
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage_bytes, at::DataPtr(storage, c10::Device(c10::kCPU)), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

TensorDescription describe(const at::Tensor& tensor) {
  TensorDescription description;
  if (!tensor.defined()) return description;
  description.is_defined = true;
  description.dtype = tensor.scalar_type();
  description.sizes = tensor.sizes().vec();
  description.strides = tensor.strides().vec();
  description.offset = tensor.storage_offset();
  description.storage = static_cast<char*>(const_cast<void*>(tensor.storage().data_ptr().get()));
  description.storage_bytes = tensor.storage().nbytes();
  description.block = is_simulated(tensor) ? block_of(tensor.storage().data_ptr()) : pinned_block_of(description.storage);
  if (description.block == nullptr) description.cpu_tensor = tensor;
  return description;
}

at::Tensor empty_strided_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  c10::DeviceGuard guard(c10::Device(kDevice, device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kDeviceKeys, dtype);
}

void fit_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const int64_t num_elements = describe(tensor).num_spanned_elements() + tensor.storage_offset();
  const size_t num_bytes = num_elements * tensor.element_size();
  if (num_bytes <= tensor.storage().nbytes()) return;
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.unsafeGetTensorImpl()->unsafe_storage(), num_bytes);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("is_set_to", &at::native::is_set_to);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_full_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

}  // namespace simulator

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulator::choose_math)
}  // namespace at::native
