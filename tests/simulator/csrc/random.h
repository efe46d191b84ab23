// Random numbers of the simulated device.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace simulator {

at::Generator& default_generator(int device);
// Seed for the next random operation. Uses `generator`, or the default generator of the device.
uint64_t next_seed(const std::optional<at::Generator>& generator, int device);

}  // namespace simulator
