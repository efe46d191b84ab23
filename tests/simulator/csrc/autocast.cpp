// Autocast, with the lists of operations that PyTorch defines for CUDA.
#include "torch_headers.h"
#include "memory.h"

namespace simulator {
namespace {

using at::autocast::cached_cast;
using at::autocast::is_eligible;
using torch::jit::Stack;

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  }
}

void cast_arguments(c10::ArrayRef<c10::Argument> arguments, Stack* stack, at::ScalarType dtype) {
  for (size_t i = stack->size() - arguments.size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = cached_cast(dtype, value.toTensor(), kDevice);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(cached_cast(dtype, tensor, kDevice));
      value = list;
    }
  }
}

void run_in_lower_precision(const c10::OperatorHandle& operation, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  cast_arguments(operation.schema().arguments(), stack, at::autocast::get_autocast_dtype(kDevice));
  operation.callBoxed(*stack);
}

void run_in_fp32(const c10::OperatorHandle& operation, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  cast_arguments(operation.schema().arguments(), stack, at::kFloat);
  operation.callBoxed(*stack);
}

// Operations such as sum, which compute in fp32 and convert the input themselves if `dtype` is set.
void run_with_dtype_fp32(const c10::OperatorHandle& operation, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = operation.schema().arguments();
  c10::IValue* values = stack->data() + stack->size() - arguments.size();
  if (values[0].isTensor() && is_eligible(values[0].toTensor(), kDevice)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && values[i].isNone()) values[i] = static_cast<int64_t>(at::kFloat);
    }
  }
  operation.callBoxed(*stack);
}

void run_in_widest_dtype(const c10::OperatorHandle& operation, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = operation.schema().arguments();
  at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  for (const c10::IValue& value : torch::jit::last(*stack, arguments.size())) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { dtype = at::autocast::prioritize(dtype, tensor, kDevice); });
  }
  cast_arguments(arguments, stack, dtype);
  operation.callBoxed(*stack);
}

// Operator name from the arguments of the lists' macros, such as "conv1d" or "_convolution, deprecated".
std::string operator_name(std::string arguments) {
  const size_t comma = arguments.find(", ");
  return comma == std::string::npos ? arguments : arguments.replace(comma, 2, ".");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
#define REGISTER(kernel, ...) \
  library.impl(operator_name(#__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
#define LOWER_PRECISION(...) REGISTER(run_in_lower_precision, __VA_ARGS__)
#define FP32(...) REGISTER(run_in_fp32, __VA_ARGS__)
#define DTYPE_FP32(...) REGISTER(run_with_dtype_fp32, __VA_ARGS__)
#define WIDEST(...) REGISTER(run_in_widest_dtype, __VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(DTYPE_FP32)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace simulator
