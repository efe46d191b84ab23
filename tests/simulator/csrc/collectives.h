// Collectives of the simulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulator {

// Backend for tensors of the simulated device. `gloo` transfers the data.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo);

}  // namespace simulator
