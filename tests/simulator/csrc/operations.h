// Operations that run the kernels of the CPU.
#pragma once

namespace simulator {

// Register all operators that have a kernel for the CPU. Without this, the composite kernels of PyTorch would be
// preferred over the fallback, and would compute different bits than the kernels of the CPU.
void register_kernels_of_cpu();

}  // namespace simulator
