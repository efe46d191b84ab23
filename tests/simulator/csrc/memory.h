// Memory of the simulated device and pinned memory of the host.
#pragma once

#include "streams.h"

namespace simulator {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Optional capabilities, which tests can remove.
struct Capabilities {
  bool streams = true;
  bool pinned_memory = true;
  bool fused_optimizers = true;
  bool memory_statistics = true;
};
Capabilities& capabilities();

int device_count();
void set_device_count(int count);
int current_device();
void set_current_device(int device);

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
void set_memory_limit(size_t num_bytes);
size_t memory_limit();
// Number of times that all tasks ran because freed memory of this process waited for them.
int64_t num_runs_for_memory();

// Block of a storage of the simulated device.
BlockPointer block_of(const c10::DataPtr& data);
// Pinned block that contains the address, or null.
BlockPointer pinned_block_of(const void* address);

// Asynchronous copy from or to pinned memory. Shows errors of the host, which the vector clocks do not see: the source of
// a copy that changes before the copy has run, and a target that is read too early.
class PinnedCopy {
 public:
  // Call when the copy is enqueued. A target is overwritten, so a host that reads it too early sees NaN.
  PinnedCopy(BlockPointer block, char* data, size_t num_bytes, bool writes);
  // Call when the copy starts. Reports a race if the host changed the source.
  void start() const;
  // Call when the copy has completed.
  void finish() const;

 private:
  BlockPointer block_;
  char* data_;
  size_t num_bytes_;
  bool writes_;
  uint64_t version_ = 0;
  std::optional<uint64_t> checksum_;
};

}  // namespace simulator
