// Every operation that tensors.cpp does not define: a queued task runs the kernel of the CPU on the device's memory.
//
// [Note: predicted results]
// The host must know shape, strides and dtype of the results before the kernel runs. Meta kernels describe the kernels
// of CUDA, which sometimes return different strides and dtypes. Later kernels would compute different bits than on the
// CPU. So the first call with a signature runs the CPU kernel on blank tensors, and later calls reuse its result
// metadata.
#include "operations.h"
#include "random.h"
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>

namespace simulator {
namespace {

using torch::jit::Stack;

struct Argument {
  enum class Kind { value, tensor, tensors, optional_tensors };
  Kind kind = Kind::value;
  c10::IValue value;
  std::vector<TensorDescription> tensors;
  bool is_written = false;

  // The argument with CPU tensors in the memory of the device.
  c10::IValue alias() const {
    if (kind == Kind::value) return value;
    if (kind == Kind::tensor) return tensors[0].alias();
    if (kind == Kind::tensors) {
      c10::List<at::Tensor> list;
      for (const auto& each : tensors) list.push_back(each.alias());
      return list;
    }
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : tensors) list.push_back(each.is_defined ? std::optional(each.alias()) : std::nullopt);
    return list;
  }
};

// Call of an operation, as a task stores it.
struct Call {
  c10::OperatorHandle operation;
  std::string name;
  int device;
  std::vector<Argument> arguments;
  std::optional<size_t> generator_argument;
  uint64_t seed = 0;
};

// Metadata of a tensor.
struct Shape {
  bool is_defined = false;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::kFloat;
};

struct Prediction {
  std::vector<std::vector<Shape>> results;    // for each return of the operation; a single tensor is a list of one
  std::vector<std::optional<Shape>> written;  // for each argument: the shape of a written tensor after the call
};

bool is_tensor_type(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::TensorType ||
         (type->kind() == c10::TypeKind::ListType && type->containedType(0)->kind() == c10::TypeKind::TensorType);
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) visit(tensor.value_or(at::Tensor()));
  }
}

int device_of(const std::string& name, at::ArrayRef<c10::IValue> values) {
  std::optional<int> device;
  for (const c10::IValue& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!is_simulated(tensor)) return;
      TORCH_CHECK(!device || *device == tensor.device().index(), "Expected all tensors to be on the same device, but ",
                  name, " received tensors on simulated:", *device, " and ", tensor.device(), ".");
      device = tensor.device().index();
    });
    if (!device && value.isDevice() && value.toDevice().type() == kDevice && value.toDevice().has_index()) {
      device = value.toDevice().index();
    }
  }
  return device.value_or(current_device());
}

// Description of a tensor argument. As on other devices, CPU tensors are accepted as scalars and as indices. The device
// receives their values, for which the host waits unless the scalar was a Python number.
TensorDescription describe_tensor(const Call& call, const at::Tensor& tensor, bool is_index) {
  TensorDescription description = describe(tensor);
  if (!tensor.defined() || is_simulated(tensor)) return description;
  TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || is_index), "Expected all tensors to be on the same device, but ",
              call.name, " received tensors on simulated:", call.device, " and ", tensor.device(), ".");
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!is_number) wait_for_stream(current_stream(call.device), "CPU tensor in " + call.name, Wait::implicit);
  CpuDispatch dispatch;
  description.block = nullptr;
  description.cpu_tensor = tensor.clone();
  if (is_number) description.cpu_tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return description;
}

Argument describe_argument(const Call& call, const c10::Argument& formal, const c10::IValue& value) {
  Argument argument;
  argument.is_written = is_written(formal);
  argument.value = value;
  if (value.isTensor()) argument.kind = Argument::Kind::tensor;
  if (value.isTensorList()) argument.kind = Argument::Kind::tensors;
  if (value.isOptionalTensorList()) argument.kind = Argument::Kind::optional_tensors;
  if (value.isDevice()) argument.value = c10::Device(c10::kCPU);
  if (value.isGenerator() || argument.kind != Argument::Kind::value) argument.value = c10::IValue();
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    argument.tensors.push_back(describe_tensor(call, tensor, value.isOptionalTensorList()));
  });
  return argument;
}

// PyTorch calls these operators for devices other than its own. The CPU's operators have the same arguments, except
// that the backward pass also receives the sizes of the bias.
void replace_convolution(Call& call) {
  auto find = [](const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); };
  if (call.name == "aten::convolution_overrideable") call.operation = find("aten::convolution");
  if (call.name == "aten::convolution_backward_overrideable") {
    call.operation = find("aten::convolution_backward");
    const bool is_transposed = call.arguments.at(6).value.toBool();
    const auto& weight = call.arguments.at(2).tensors.at(0).sizes;
    Argument bias_sizes;
    bias_sizes.value =
        std::vector<int64_t>{is_transposed ? weight.at(1) * call.arguments.at(8).value.toInt() : weight.at(0)};
    call.arguments.insert(call.arguments.begin() + 3, bias_sizes);
  }
}

Call describe_call(const c10::OperatorHandle& operation, at::ArrayRef<c10::IValue> values) {
  const c10::FunctionSchema& schema = operation.schema();
  const std::string name = c10::toString(schema.operator_name());
  Call call{operation, name, device_of(name, values)};
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isGenerator()) generator = values[i].toGenerator();
    if (schema.arguments()[i].name() == "generator") call.generator_argument = i;
    call.arguments.push_back(describe_argument(call, schema.arguments()[i], values[i]));
  }
  if (call.generator_argument) call.seed = next_seed(generator, call.device);
  replace_convolution(call);
  return call;
}

Stack run_kernel_of_cpu(const Call& call) {
  CpuDispatch dispatch;
  Stack stack;
  for (const Argument& argument : call.arguments) stack.push_back(argument.alias());
  if (call.generator_argument) stack[*call.generator_argument] = at::detail::createCPUGenerator(call.seed);
  call.operation.callBoxed(stack);
  return stack;
}

// Tensor of the CPU with the shape of a device tensor. Zero is a valid index, and one a valid weight or probability.
at::Tensor blank(const TensorDescription& description) {
  if (!description.is_defined) return {};
  if (description.cpu_tensor.defined()) return description.cpu_tensor;
  at::Tensor tensor = at::empty_strided(description.sizes, description.strides, at::TensorOptions(description.dtype));
  return tensor.fill_(at::isFloatingType(description.dtype) ? 1 : 0);
}

Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

Prediction run_on_blank_tensors(Call call) {
  CpuDispatch dispatch;
  for (Argument& argument : call.arguments) {
    for (TensorDescription& each : argument.tensors) {
      each.cpu_tensor = blank(each);
      each.block = nullptr;
    }
  }
  const Stack results = run_kernel_of_cpu(call);
  Prediction prediction;
  const auto& returns = call.operation.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    prediction.results.emplace_back();
    if (returns[i].alias_info()) continue;
    for_each_tensor(results[i], [&](const at::Tensor& tensor) { prediction.results[i].push_back(shape_of(tensor)); });
  }
  for (const Argument& argument : call.arguments) {
    const bool is_tensor =
        argument.is_written && argument.kind == Argument::Kind::tensor && argument.tensors[0].is_defined;
    prediction.written.push_back(is_tensor ? std::optional(shape_of(argument.tensors[0].cpu_tensor)) : std::nullopt);
  }
  return prediction;
}

class Signature {
 public:
  explicit Signature(const Call& call) {
    add(call.name);
    const auto& returns = call.operation.schema().returns();
    // The learning rate of an in-place update changes in each step, and no shape depends on it.
    const bool only_writes =
        std::all_of(returns.begin(), returns.end(), [](const auto& each) { return is_written(each); });
    with_numbers_ = !only_writes || call.operation.schema().overload_name().find("out") != std::string::npos;
    for (const Argument& argument : call.arguments) {
      text_ += static_cast<char>(argument.kind);
      if (argument.kind == Argument::Kind::value) add(argument.value);
      for (const TensorDescription& each : argument.tensors) add(each);
    }
  }
  const std::string& text() const { return text_; }

 private:
  void add(const std::string& value) { text_ += value + '\0'; }
  void add(int64_t value) { text_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void add(const std::vector<int64_t>& values) {
    add(static_cast<int64_t>(values.size()));
    for (int64_t value : values) add(value);
  }
  void add(const TensorDescription& tensor) {
    if (!tensor.is_defined) return add(-1);
    add(static_cast<int64_t>(tensor.dtype));
    add(static_cast<int64_t>(tensor.cpu_tensor.defined() &&
                             tensor.cpu_tensor.unsafeGetTensorImpl()->is_wrapped_number()));
    add(tensor.sizes);
    add(tensor.strides);
  }
  void add(const c10::IValue& value) {
    if (value.isNone()) return add(-1);
    if (value.isInt()) return add(value.toInt());
    if (value.isBool()) return add(static_cast<int64_t>(value.toBool()));
    if (value.isIntList()) return add(value.toIntVector());
    const bool is_number = value.isDouble() || value.isDoubleList() || value.isList();
    if (is_number && !with_numbers_) return;
    std::ostringstream stream;
    stream << value;
    add(stream.str());
  }

  bool with_numbers_ = true;
  std::string text_;
};

const Prediction& predict(const Call& call) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::unordered_map<std::string, Prediction>;
  const Signature signature(call);
  {
    std::lock_guard<std::mutex> lock(*mutex);
    const auto found = known->find(signature.text());
    if (found != known->end()) return found->second;
  }
  Prediction prediction = run_on_blank_tensors(call);
  std::lock_guard<std::mutex> lock(*mutex);
  return known->emplace(signature.text(), std::move(prediction)).first->second;
}

// Return true if the host must wait because shape or type of the results depend on the values of the arguments.
bool depends_on_data(const Call& call) {
  for (const auto& each : call.operation.schema().returns()) {
    if (!each.alias_info() && !is_tensor_type(each.type())) return true;
  }
  for (const Argument& argument : call.arguments) {
    if (argument.kind != Argument::Kind::optional_tensors) continue;
    // Indexing waits for masks only, although torch tags it as data-dependent.
    return std::any_of(argument.tensors.begin(), argument.tensors.end(), [](const TensorDescription& each) {
      return each.is_defined && (each.dtype == at::kBool || each.dtype == at::kByte);
    });
  }
  return call.operation.hasTag(at::Tag::dynamic_output_shape) || call.operation.hasTag(at::Tag::data_dependent_output);
}

c10::IValue written_argument(const c10::Argument& result, const Call& call, at::ArrayRef<c10::IValue> values) {
  const auto& arguments = call.operation.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(arguments[i]) && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
      return values[i];
  }
  TORCH_CHECK(false, "No argument of ", call.name, " corresponds to its result.");
}

// Wait for the arguments, and run the kernel immediately.
void run_now(const Call& call, at::ArrayRef<c10::IValue> values, Stack& results) {
  finish_wait(record_event(current_stream(call.device)));
  const Stack computed = run_kernel_of_cpu(call);  // before the wait is counted: an invalid call raises its own error
  count_wait(call.name, Wait::implicit);
  auto to_device = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    at::Tensor result = empty_strided_on(call.device, tensor.sizes(), tensor.strides(), tensor.scalar_type());
    CpuDispatch dispatch;
    describe(result).alias().copy_(tensor);
    return result;
  };
  const auto& returns = call.operation.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (returns[i].alias_info()) {
      results.push_back(written_argument(returns[i], call, values));
    } else if (computed[i].isTensor()) {
      results.push_back(to_device(computed[i].toTensor()));
    } else if (computed[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : computed[i].toTensorList()) list.push_back(to_device(tensor));
      results.push_back(list);
    } else {
      results.push_back(computed[i]);
    }
  }
}

// Give arguments such as `out` the shape that the kernel will give them.
void resize_written_arguments(Call& call, at::ArrayRef<c10::IValue> values, const Prediction& prediction) {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& shape = prediction.written[i];
    if (!shape || !values[i].isTensor() || !is_simulated(values[i].toTensor())) continue;
    const at::Tensor& tensor = values[i].toTensor();
    if (tensor.sizes() == at::IntArrayRef(shape->sizes)) continue;
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape->sizes, shape->strides);
    fit_storage(tensor);
    call.arguments[i].tensors[0] = describe(tensor);
  }
}

using Outputs = std::vector<std::vector<TensorDescription>>;

Outputs allocate_results(const Call& call, at::ArrayRef<c10::IValue> values, const Prediction& prediction,
                         Stack& results) {
  Outputs outputs(prediction.results.size());
  const auto& returns = call.operation.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (returns[i].alias_info()) {
      results.push_back(written_argument(returns[i], call, values));
      continue;
    }
    c10::List<at::Tensor> tensors;
    for (const Shape& shape : prediction.results[i]) {
      tensors.push_back(shape.is_defined ? empty_strided_on(call.device, shape.sizes, shape.strides, shape.dtype)
                                         : at::Tensor());
      outputs[i].push_back(describe(tensors.get(tensors.size() - 1)));
    }
    if (returns[i].type()->kind() == c10::TypeKind::TensorType) {
      results.push_back(tensors.get(0));
    } else {
      results.push_back(tensors);
    }
  }
  return outputs;
}

void store_results(const std::string& name, const Stack& computed, const Outputs& outputs) {
  CpuDispatch dispatch;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].empty()) continue;
    size_t k = 0;
    for_each_tensor(computed[i], [&](const at::Tensor& tensor) {
      const TensorDescription& output = outputs[i].at(k++);
      if (!output.is_defined) return;
      TORCH_CHECK(
          tensor.defined() && tensor.sizes() == at::IntArrayRef(output.sizes) && tensor.scalar_type() == output.dtype,
          "The prediction for ", name, " was ", output.sizes, " ", output.dtype, ", but the result is ", tensor.sizes(),
          " ", tensor.scalar_type(), ".");
      output.alias().copy_(tensor);
    });
  }
}

void check_capability(const std::string& name) {
  const bool is_supported = capabilities().fused_optimizers || name.rfind("aten::_fused_", 0) != 0;
  TORCH_CHECK_NOT_IMPLEMENTED(is_supported, "The simulated device has no fused optimizers: ", name,
                              " is not implemented.");
}

void run_operation(const c10::OperatorHandle& operation, Stack* stack) {
  const size_t num_arguments = operation.schema().arguments().size();
  const std::vector<c10::IValue> values = torch::jit::last(*stack, num_arguments).vec();
  torch::jit::drop(*stack, num_arguments);
  Call call = describe_call(operation, values);
  check_capability(call.name);
  for (const auto& each : operation.schema().returns()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!each.alias_info() || is_written(each),
                                "The simulated device has no kernel for the view ", call.name, ".");
  }
  c10::DeviceGuard guard(c10::Device(kDevice, call.device));
  if (depends_on_data(call)) return run_now(call, values, *stack);
  const Prediction* prediction = nullptr;
  try {
    prediction = &predict(call);
  } catch (const c10::Error&) {
    return run_now(call, values, *stack);  // the call is invalid, or invalid for blank tensors only
  }
  resize_written_arguments(call, values, *prediction);
  Outputs outputs = allocate_results(call, values, *prediction, *stack);
  std::vector<Use> uses;
  for (const Argument& argument : call.arguments) {
    for (const TensorDescription& each : argument.tensors) {
      if (each.block != nullptr) uses.push_back(each.use(argument.is_written));
    }
  }
  for (const auto& list : outputs) {
    for (const TensorDescription& each : list) uses.push_back(each.use(true));
  }
  const std::string name = call.name;
  auto task = [call = std::move(call), outputs = std::move(outputs)] {
    store_results(call.name, run_kernel_of_cpu(call), outputs);
  };
  enqueue(current_stream(guard.current_device().index()), name, std::move(task), uses);
}

// The kernel of the CPU uses its default generator, but a program may use this generator while a thread runs tasks. The
// operations of this kernel accept a generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_dropout", &native_dropout);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_operation>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_operation>());
}

void register_kernels_of_cpu() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto operation = c10::Dispatcher::singleton().findSchema(name);
    if (!operation || !operation->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (operation->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto& returns = operation->schema().returns();
    const bool is_view = std::any_of(returns.begin(), returns.end(),
                                     [](const auto& each) { return each.alias_info() && !is_written(each); });
    if (is_view) continue;
    const std::string full_name = c10::toString(name);
    library->impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operation>());
  }
}

TORCH_LIBRARY(simulated, library) {
  // The schema that torch infers for at::Generator is optional.
  library.def("default_generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operation>());
}

}  // namespace simulator
