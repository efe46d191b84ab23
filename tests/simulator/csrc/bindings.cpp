// Python module: control of the simulator, and the two functions that PyTorch has no interface for.
#include "torch_headers.h"
#include "collectives.h"
#include "operations.h"
#include "random.h"
#include "tensors.h"

#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using namespace simulator;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  py::module::import("torch.distributed");
  register_kernels_of_cpu();
  module.def("make_backend", &make_backend);
  module.def("default_generator", [](int device) { return default_generator(device); });

  module.def("set_schedule", [](int schedule) { set_schedule(static_cast<Schedule>(schedule)); }, without_gil);
  module.def("set_forbidden", [](int forbidden) { set_forbidden(static_cast<Forbidden>(forbidden)); }, without_gil);
  module.def("exempt_this_thread", &exempt_this_thread);
  module.def("set_memory_limit", &set_memory_limit, without_gil);
  module.def("memory_limit", &memory_limit, without_gil);
  module.def("device_count", &device_count);
  module.def("set_device_count", &set_device_count);
  module.def("remove_capability", [](const std::string& name) {
    if (name == "streams") capabilities().streams = false;
    if (name == "pinned_memory") capabilities().pinned_memory = false;
    if (name == "fused_optimizers") capabilities().fused_optimizers = false;
    if (name == "memory_statistics") capabilities().memory_statistics = false;
  });
  module.def("run_all", &run_all, without_gil);
  module.def("clear_counts", &clear_counts, without_gil);
  module.def("races", &races, without_gil);
  module.def("host_waits", &host_waits, without_gil);
  module.def("num_tasks", &num_tasks, without_gil);
  module.def("num_runs_for_memory", &num_runs_for_memory);
}
