// The interfaces through which PyTorch uses a device: guard, streams, events, hooks, random number generator.
#include "torch_headers.h"
#include "random.h"
#include "tensors.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>
#include <random>

namespace simulator {
namespace {

// Device index of a generator or a stream; -1 means the current device.
int index_of(int device) { return device < 0 ? current_device() : device; }

c10::Stream to_torch(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, stream->device), stream->id);
}

Stream* from_torch(const c10::Stream& stream) { return find_stream(stream.device_index(), stream.id()); }

Event& event_at(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < device_count()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override { return to_torch(current_stream(index_of(device.index()))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_torch(find_stream(index_of(device.index()), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(capabilities().streams, "The simulated device has one stream.");
    return to_torch(new_stream(index_of(device.index())));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_torch(exchange_stream(from_torch(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return from_torch(stream); }
  bool queryStream(const c10::Stream& stream) const override { return query_event(record_event(from_torch(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_stream(from_torch(stream), "stream.synchronize", Wait::explicitly_requested);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for_device(index_of(device)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    event_at(*event) = record_event(from_torch(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) enqueue_wait(from_torch(stream), event_at(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || query_event(event_at(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for_event(event_at(event), "event.synchronize", Wait::explicitly_requested);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // The number of tasks between the events: tasks take no simulated time.
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return static_cast<double>(event_at(end).position) - static_cast<double>(event_at(begin).position);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Generator with a seed and an offset. Each random operation uses a CPU generator that is seeded from both.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device().is_cpu() && state.numel() == kStateBytes, "The state of a generator has ", kStateBytes,
        " elements and is on the CPU. Received ", state.numel(), " elements on ", state.device(), ".");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    CpuDispatch dispatch;
    at::Tensor state = at::empty({kStateBytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t next_seed() {
    offset_ += 4;  // as CUDA's generator, whose offset is a multiple of 4
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ull + offset_;  // the finalizer of SplitMix64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 31);
  }

 private:
  static constexpr int64_t kStateBytes = 16;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Device getDeviceFromPtr(void*) const override { return Guard().getDevice(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(index_of(device));
  }

  bool isPinnedPtr(const void* data) const override {
    return capabilities().pinned_memory && pinned_block_of(data) != nullptr;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    c10::DataPtr resized = device_allocator().allocate(num_bytes);
    const size_t kept = std::min(num_bytes, impl->nbytes());
    if (kept > 0) {
      const BlockPointer source = block_of(impl->data_ptr());
      const BlockPointer target = block_of(resized);
      const auto end = static_cast<int64_t>(kept);
      auto copy = [source, target, kept] { std::memcpy(target->data, source->data, kept); };
      enqueue(current_stream(source->device), "resize", copy, {{source, 0, end, false}, {target, 0, end, true}});
    }
    impl->set_data_ptr_noswap(std::move(resized));
    impl->set_nbytes(num_bytes);
  }
};

const bool are_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator& default_generator(int device) {
  static auto* mutex = new std::mutex;
  static auto* generators = new std::map<int, at::Generator>;
  std::lock_guard<std::mutex> lock(*mutex);
  const int index = index_of(device);
  auto found = generators->find(index);
  if (found == generators->end()) found = generators->emplace(index, at::make_generator<Generator>(index)).first;
  return found->second;
}

uint64_t next_seed(const std::optional<at::Generator>& generator, int device) {
  at::Generator used = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(used.device().type() == kDevice, "Expected a generator of the simulated device, but found one of ", used.device());
  std::lock_guard<std::mutex> lock(used.mutex());
  return static_cast<Generator*>(used.unsafeGetGeneratorImpl())->next_seed();
}

}  // namespace simulator
