#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace simulator {
namespace {

constexpr size_t kRounding = 512;  // as the caching allocator of CUDA
constexpr size_t kAlignment = 64;
constexpr int kPoison = 0xFF;                          // NaN in all floating-point types
constexpr size_t kMaxUnusedBytes = size_t(512) << 20;  // freed memory that waits for tasks

struct State {
  std::mutex mutex;
  int device_count = 1;
  size_t limit = size_t(8) << 30;
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats;
  std::atomic<size_t> unused_bytes{0};
  std::atomic<int64_t> num_runs_for_memory{0};
  std::map<const char*, BlockPointer> pinned;
};

State& state() {
  static auto* state = new State;
  return *state;
}

thread_local int device_of_thread = 0;

BlockPointer new_block(size_t num_bytes) {
  auto block = std::make_shared<Block>();
  void* data = nullptr;
  const size_t reserved = std::max(num_bytes, kAlignment);
  TORCH_CHECK(posix_memalign(&data, kAlignment, reserved) == 0, "The host has no memory for ", num_bytes, " bytes.");
  block->data = static_cast<char*>(data);
  block->num_bytes = reserved;
  return block;
}

void count_bytes(const Block& block, bool is_allocated) {
  auto& stats = state().stats[block.device];
  auto change = [&](auto& stat, int64_t amount) { is_allocated ? stat[0].increase(amount) : stat[0].decrease(amount); };
  change(stats.allocation, 1);
  change(stats.active, 1);
  change(stats.allocated_bytes, block.counted_bytes);
  change(stats.active_bytes, block.counted_bytes);
  change(stats.requested_bytes, block.counted_bytes);
  auto& reserved = stats.reserved_bytes[0];  // a cache without fragmentation
  reserved.current = std::max(reserved.current, stats.allocated_bytes[0].current);
  reserved.peak = std::max(reserved.peak, reserved.current);
}

void free_device_memory(void* context) {
  std::unique_ptr<BlockPointer> owner(static_cast<BlockPointer*>(context));
  BlockPointer block = *owner;
  std::vector<Event> last_uses;
  for (Stream* stream : block->recorded) last_uses.push_back(record_event(stream));
  Lock lock(state().mutex);
  count_bytes(*block, false);
  if (block->counted_bytes == 0) return;
  block->home->freed.emplace_back(block, std::move(last_uses));
  state().unused_bytes += block->num_bytes;
}

// [Note: reuse of memory]
// A caching allocator gives freed memory to the next allocation on the stream where the memory was allocated, without
// waiting for the device. Here, the next allocation on this stream may reuse all freed blocks, so a task overwrites
// them. A task of a different stream that still uses a block is a race, unless the program called record_stream. A
// block with recorded streams is not reused until their tasks have run, and no task waits for them. The accesses before
// these tasks are over, including accesses of other streams that the recorded streams waited for. A new block may have
// the memory of all blocks that were reused before, so a task of a different stream that uses the new block must be
// ordered after the task that overwrites them.
void reuse_freed_blocks(Stream* stream) {
  std::vector<BlockPointer> reused;
  {
    Lock lock(state().mutex);
    std::vector<std::pair<BlockPointer, std::vector<Event>>> kept;
    for (auto& [block, last_uses] : stream->freed) {
      if (std::all_of(last_uses.begin(), last_uses.end(), has_happened)) {
        auto is_over = [&](const Access& access) {
          return std::any_of(last_uses.begin(), last_uses.end(), [&](const Event& event) {
            return is_before(access, event);
          });
        };
        auto& accesses = block->accesses;
        accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_over), accesses.end());
        reused.push_back(block);
      } else {
        kept.emplace_back(block, last_uses);
      }
    }
    stream->freed = std::move(kept);
  }
  for (const BlockPointer& block : reused) {
    auto overwrite = [block] {
      std::memset(block->data, kPoison, block->num_bytes);
      state().unused_bytes -= block->num_bytes;
    };
    const Use use{block, 0, static_cast<int64_t>(block->num_bytes), true};
    enqueue(stream, "reuse of freed memory", overwrite, {use});
  }
  if (!reused.empty()) {
    const uint64_t position = record_event(stream).position;
    Lock lock(state().mutex);
    stream->last_reuse = position;
  }
  if (state().unused_bytes > kMaxUnusedBytes) {
    ++state().num_runs_for_memory;
    run_all();
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const int device = current_device();
    Stream* stream = current_stream(device);
    reuse_freed_blocks(stream);
    const size_t counted = (num_bytes + kRounding - 1) / kRounding * kRounding;
    Lock lock(state().mutex);
    const size_t allocated = state().stats[device].allocated_bytes[0].current;
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + counted <= state().limit,
                     "simulated out of memory. Tried to allocate ", num_bytes, " bytes. Device ", device,
                     " has a capacity of ", state().limit, " bytes, of which ", allocated, " are allocated.");
    BlockPointer block = new_block(counted);
    std::memset(block->data, kPoison, block->num_bytes);
    block->device = device;
    block->counted_bytes = counted;
    block->home = stream;
    if (stream->last_reuse > 0)
      block->accesses.push_back({stream, stream->last_reuse, 0, static_cast<int64_t>(block->num_bytes), true,
                                 "reuse of freed memory"});
    count_bytes(*block, true);
    void* data = num_bytes == 0 ? nullptr : block->data;
    return {data, new BlockPointer(block), &free_device_memory, c10::Device(kDevice, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    run_all();
    std::memcpy(target, source, num_bytes);
  }

  bool initialized() override { return capabilities().memory_statistics; }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock(state().mutex);
    auto& stats = state().stats[current_device()];
    stats.reserved_bytes[0].current = stats.allocated_bytes[0].current;
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    BlockPointer block = block_of(data);
    Stream* recorded = find_stream(stream.device_index(), stream.id());
    Lock lock(state().mutex);
    if (block != nullptr && recorded != block->home) block->recorded.push_back(recorded);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    return state().stats[device];
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    auto& stats = state().stats[device];
    for (auto* each : all(stats)) (*each)[0].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    auto& stats = state().stats[device];
    for (auto* each : all(stats)) (*each)[0].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    TORCH_CHECK_NOT_IMPLEMENTED(capabilities().memory_statistics, "The simulated device has no memory statistics.");
    Lock lock(state().mutex);
    const size_t reserved = state().stats[device].reserved_bytes[0].current;
    return {state().limit - std::min(reserved, state().limit), state().limit};
  }

 private:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  static std::vector<c10::CachingAllocator::StatArray*> all(Stats& stats) {
    return {&stats.allocation,   &stats.active,         &stats.allocated_bytes,
            &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes};
  }
};

struct PinnedAllocator final : c10::Allocator {
  // The tasks that use the block keep it alive.
  static void free_pinned(void* data) {
    BlockPointer block;
    Lock lock(state().mutex);
    const auto found = state().pinned.find(static_cast<const char*>(data));
    block = found->second;
    state().pinned.erase(found);
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    BlockPointer block = new_block(num_bytes);
    Lock lock(state().mutex);
    state().pinned[block->data] = block;
    return {block->data, block->data, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }

  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

uint64_t checksum(const char* data, size_t num_bytes) {
  uint64_t sum = num_bytes;
  size_t i = 0;
  for (; i + sizeof(uint64_t) <= num_bytes; i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, data + i, sizeof(word));
    sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
    sum ^= sum >> 29;
  }
  for (; i < num_bytes; ++i) sum = (sum ^ static_cast<unsigned char>(data[i])) * 0x9E3779B97F4A7C15ull;
  return sum;
}

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
const bool is_registered = [] {
  c10::SetAllocator(kDevice, &the_device_allocator);
  return true;
}();

}  // namespace

Capabilities& capabilities() {
  static auto* capabilities = new Capabilities;
  return *capabilities;
}

int device_count() { return state().device_count; }

void set_device_count(int count) { state().device_count = count; }

int current_device() { return device_of_thread; }

void set_current_device(int device) {
  if (device < 0) return;  // torch passes -1 for "the current device"
  TORCH_CHECK(device < device_count(), "simulated:", device, " does not exist. The process has ", device_count(),
              " devices.");
  device_of_thread = device;
}

c10::DeviceAllocator& device_allocator() { return the_device_allocator; }

c10::Allocator& pinned_allocator() {
  TORCH_CHECK_NOT_IMPLEMENTED(capabilities().pinned_memory, "The simulated device has no pinned memory.");
  return the_pinned_allocator;
}

void set_memory_limit(size_t num_bytes) {
  Lock lock(state().mutex);
  state().limit = num_bytes;
}

size_t memory_limit() {
  Lock lock(state().mutex);
  return state().limit;
}

int64_t num_runs_for_memory() { return state().num_runs_for_memory; }

BlockPointer block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_device_memory) return nullptr;
  return *static_cast<BlockPointer*>(data.get_context());
}

BlockPointer pinned_block_of(const void* address) {
  const char* data = static_cast<const char*>(address);
  Lock lock(state().mutex);
  auto next = state().pinned.upper_bound(data);
  if (next == state().pinned.begin()) return nullptr;
  const BlockPointer& block = std::prev(next)->second;
  return data < block->data + block->num_bytes ? block : nullptr;
}

PinnedCopy::PinnedCopy(BlockPointer block, char* data, size_t num_bytes, bool writes)
    : block_(std::move(block)), data_(data), num_bytes_(num_bytes), writes_(writes) {
  Lock lock(state().mutex);
  // Earlier copies that have not run may read the target or write the source.
  if (writes && block_->num_pending == 0) std::memset(data, kPoison, num_bytes);
  if (!writes && block_->num_pending_writes == 0) checksum_ = checksum(data, num_bytes);
  ++block_->num_pending;
  if (writes) {
    ++block_->num_pending_writes;
    ++block_->num_writes;
  }
  version_ = block_->num_writes;
}

void PinnedCopy::start() const {
  Lock lock(state().mutex);
  if (!checksum_ || block_->num_writes != version_) return;
  if (checksum(data_, num_bytes_) == *checksum_) return;
  lock.unlock();
  report_race("The host changed pinned memory before the copy to the device had read it");
}

void PinnedCopy::finish() const {
  Lock lock(state().mutex);
  --block_->num_pending;
  if (writes_) --block_->num_pending_writes;
}

}  // namespace simulator
