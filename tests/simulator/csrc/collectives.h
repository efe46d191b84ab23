// Collectives of the simulated device.
#pragma once

#include <pybind11/pybind11.h>

namespace simulator {

// Define the Python function make_backend(gloo). It returns a backend for tensors of the simulated device, and `gloo`
// transfers their data.
void define_make_backend(pybind11::module& module);

}  // namespace simulator
