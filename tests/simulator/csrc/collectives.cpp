// [Note: order of collectives]
// A collective is a task of the backend's own stream, as with NCCL. The task calls gloo on the device's memory and
// blocks until the other ranks take part.
// - All collectives of a process run in the order in which the program called them, in all groups. Otherwise two ranks
//   could run two collectives of different groups in different order, and wait for each other forever.
// - A real device makes progress while its host waits for something else. So a thread runs pending collectives if the
//   process has not used the device for some time. Without it, a rank that waits for a different rank on the CPU could
//   block that rank's collective.
// - A send copies the data and does not block, so two ranks that send to each other do not wait for each other.
#include "collectives.h"
#include "tensors.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <list>
#include <thread>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)  // as in torch/csrc/utils/pybind.h

namespace simulator {
namespace {

using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<Work>;
// Function that runs a collective of gloo on CPU tensors: those that it reads, and those that it writes.
using Transfer = std::function<void(Tensors reads, Tensors writes)>;

constexpr auto kIdleTime = std::chrono::milliseconds(50);

struct LastCollective {
  std::mutex mutex;
  Event event;
};

LastCollective& last_collective() {
  static auto* last = new LastCollective;
  return *last;
}

Event event_of_last_collective() {
  std::lock_guard<std::mutex> lock(last_collective().mutex);
  return last_collective().event;
}

void run_collectives_while_idle() {
  uint64_t before = activity();
  while (true) {
    std::this_thread::sleep_for(kIdleTime);
    const Event event = event_of_last_collective();
    const uint64_t now = activity();
    if (now == before && !has_happened(event)) run_until(event);
    before = now;
  }
}

// The thread starts with the first backend of a process: a process from which ranks are forked must not have threads.
void start_progress_thread() {
  static const bool is_started = [] {
    std::thread(run_collectives_while_idle).detach();
    return true;
  }();
  (void)is_started;
}

class SimulatedWork final : public Work {
 public:
  SimulatedWork(OpType type, const Event& event, int device, Tensors used, Tensors results)
      : Work(-1, type), event_(event), device_(device), used_(std::move(used)), results_(std::move(results)) {
    const auto type_of_results = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        type_of_results, std::vector<c10::Device>{{kDevice, static_cast<c10::DeviceIndex>(device)}});
    Stream* before = exchange_stream(event_.stream);  // the future records an event on the current stream
    future_->markCompleted(c10::IValue(results_));
    exchange_stream(before);
  }

  bool isCompleted() override { return query_event(event_); }
  bool isSuccess() const override { return true; }
  // The current stream waits. Only a barrier makes the host wait, as with NCCL.
  void synchronize() override {
    enqueue_wait(current_stream(device_), event_);
    used_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    if (retrieveOpType() == OpType::BARRIER) wait_for_event(event_, "barrier", Wait::explicitly_requested);
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Event event_;
  int device_;
  Tensors used_;  // their memory must not be reused before a stream waits for the collective
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors flat;
  for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

// Divide tensors into lists of `size` tensors.
std::vector<Tensors> group(const Tensors& flat, size_t size) {
  std::vector<Tensors> lists;
  for (size_t i = 0; size > 0 && i < flat.size(); i += size)
    lists.emplace_back(flat.begin() + i, flat.begin() + i + size);
  return lists;
}

// Gloo does not average.
template <typename Options>
Options with_sum(Options options) {
  if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
  return options;
}

class SimulatedBackend final : public c10d::Backend {
 public:
  explicit SimulatedBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    start_progress_thread();
  }

  const std::string getBackendName() const override { return "simulated_ccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(OpType::BROADCAST, "broadcast", tensors, tensors,
               [gloo = gloo_, options](Tensors, Tensors writes) { gloo->broadcast(writes, options)->wait(); });
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, "all_reduce", tensors, tensors, [gloo = gloo_, options](Tensors, Tensors writes) {
      gloo->allreduce(writes, with_sum(options))->wait();
      if (options.reduceOp == c10d::ReduceOp::AVG) divide(writes, gloo->getSize());
    });
  }

  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return for_each(tensors, [&](at::Tensor& tensor) {
      Tensors one{tensor};
      return allreduce(one, options);
    });
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(OpType::REDUCE, "reduce", tensors, tensors, [gloo = gloo_, options](Tensors, Tensors writes) {
      gloo->reduce(writes, with_sum(options))->wait();
      const bool is_root = gloo->getRank() == options.rootRank;
      if (is_root && options.reduceOp == c10d::ReduceOp::AVG) divide(writes, gloo->getSize());
    });
  }

  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override {
    const size_t size = outputs.at(0).size();
    return run(OpType::ALLGATHER, "all_gather", inputs, flatten(outputs),
               [=, gloo = gloo_](Tensors reads, Tensors writes) {
                 auto lists = group(writes, size);
                 gloo->allgather(lists, reads, options)->wait();
               });
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output},
               [=, gloo = gloo_](Tensors reads, Tensors writes) {
                 at::Tensor sent = reads[0].clone();  // the input may be a part of the output
                 gloo->_allgather_base(writes[0], sent, options)->wait();
               });
  }

  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    size_t i = 0;
    return for_each(outputs, [&](at::Tensor& output) { return _allgather_base(output, inputs.at(i++), options); });
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    const size_t size = inputs.at(0).size();
    return run(OpType::REDUCE_SCATTER, "reduce_scatter", flatten(inputs), outputs,
               [=, gloo = gloo_](Tensors reads, Tensors writes) {
                 auto lists = group(reads, size);
                 gloo->reduce_scatter(writes, lists, with_sum(options))->wait();
                 if (options.reduceOp == c10d::ReduceOp::AVG) divide(writes, gloo->getSize());
               });
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    return run(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output},
               [=, gloo = gloo_](Tensors reads, Tensors writes) {
                 at::Tensor sent = reads[0].clone();  // the output may be a part of the input
                 gloo->_reduce_scatter_base(writes[0], sent, with_sum(options))->wait();
                 if (options.reduceOp == c10d::ReduceOp::AVG) divide(writes, gloo->getSize());
               });
  }

  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    size_t i = 0;
    return for_each(outputs, [&](at::Tensor& output) { return _reduce_scatter_base(output, inputs.at(i++), options); });
  }

  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const size_t size = outputs.empty() ? 0 : outputs[0].size();
    return run(OpType::GATHER, "gather", inputs, flatten(outputs), [=, gloo = gloo_](Tensors reads, Tensors writes) {
      auto lists = group(writes, size);
      gloo->gather(lists, reads, options)->wait();
    });
  }

  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const size_t size = inputs.empty() ? 0 : inputs[0].size();
    return run(OpType::SCATTER, "scatter", flatten(inputs), outputs, [=, gloo = gloo_](Tensors reads, Tensors writes) {
      auto lists = group(reads, size);
      gloo->scatter(writes, lists, options)->wait();
    });
  }

  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return run(OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output},
               [gloo = gloo_, options, output_sizes, input_sizes](Tensors reads, Tensors writes) mutable {
                 gloo->alltoall_base(writes[0], reads[0], output_sizes, input_sizes, options)->wait();
               });
  }

  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return run(OpType::ALLTOALL, "all_to_all", inputs, outputs,
               [=, gloo = gloo_](Tensors reads, Tensors writes) { gloo->alltoall(writes, reads, options)->wait(); });
  }

  WorkPointer send(Tensors& tensors, int target, int tag) override {
    auto transfer = [sends = sends_, gloo = gloo_, target, tag](Tensors reads, Tensors) {
      sends->remove_if([](auto& each) { return each.first->isCompleted(); });
      Tensors copies;
      for (const at::Tensor& tensor : reads) copies.push_back(tensor.clone(at::MemoryFormat::Contiguous));
      sends->emplace_back(gloo->send(copies, target, tag), copies);
    };
    if (!is_coalescing_) return run(OpType::SEND, "send", tensors, {}, transfer);
    coalesced_sends_.push_back({tensors, transfer});
    return finished_work(tensors);
  }

  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    auto transfer = [gloo = gloo_, source, tag](Tensors, Tensors writes) { gloo->recv(writes, source, tag)->wait(); };
    if (!is_coalescing_) return run(OpType::RECV, "recv", {}, tensors, transfer);
    coalesced_receives_.push_back({tensors, transfer});
    return finished_work(tensors);
  }

  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    const int device = options.device_ids.empty() ? current_device() : static_cast<int>(options.device_ids[0]);
    return run_on(device, OpType::BARRIER, "barrier", {}, {},
                  [gloo = gloo_](Tensors, Tensors) { gloo->barrier()->wait(); });
  }

  // Sends come first, so no rank waits for a message before it has sent its own messages.
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPointer endCoalescing() override {
    is_coalescing_ = false;
    WorkPointer last = std::exchange(last_coalesced_, nullptr);
    for (auto& [tensors, transfer] : std::exchange(coalesced_sends_, {}))
      last = run(OpType::SEND, "send", tensors, {}, transfer);
    for (auto& [tensors, transfer] : std::exchange(coalesced_receives_, {}))
      last = run(OpType::RECV, "recv", {}, tensors, transfer);
    return last;
  }

 private:
  static void divide(Tensors& tensors, int num_ranks) {
    for (at::Tensor& tensor : tensors) tensor.div_(num_ranks);
  }

  // The last work completes after all others.
  static WorkPointer for_each(Tensors& tensors, const std::function<WorkPointer(at::Tensor&)>& start) {
    WorkPointer last;
    for (at::Tensor& tensor : tensors) last = start(tensor);
    return last;
  }

  static WorkPointer finished_work(const Tensors& tensors) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors));
    return Work::create_from_future(future);
  }

  WorkPointer run(OpType type, const char* name, const Tensors& reads, const Tensors& writes, Transfer transfer) {
    for (const Tensors& tensors : {reads, writes}) {
      for (const at::Tensor& tensor : tensors) {
        TORCH_CHECK(is_simulated(tensor), name, " of simulated_ccl received a tensor on ", tensor.device(), ".");
      }
    }
    const at::Tensor& first = reads.empty() ? writes.at(0) : reads[0];
    return run_on(first.device().index(), type, name, reads, writes, std::move(transfer));
  }

  WorkPointer run_on(int device, OpType type, const char* name, const Tensors& reads, const Tensors& writes,
                     Transfer transfer) {
    std::lock_guard<std::mutex> lock(last_collective().mutex);
    Event& last = last_collective().event;
    Stream*& stream = streams_[device];
    if (stream == nullptr) stream = new_stream(device);
    enqueue_wait(stream, record_event(current_stream(device)));
    enqueue_wait(stream, last, /*with_clock=*/false);  // only the simulator guarantees this order

    std::vector<TensorDescription> sources;
    std::vector<TensorDescription> targets;
    std::vector<Use> uses;
    for (const at::Tensor& tensor : reads) uses.push_back(sources.emplace_back(describe(tensor)).use(false));
    for (const at::Tensor& tensor : writes) uses.push_back(targets.emplace_back(describe(tensor)).use(true));
    auto task = [sources, targets, transfer = std::move(transfer)] {
      CpuDispatch dispatch;
      Tensors cpu_reads;
      Tensors cpu_writes;
      for (const auto& each : sources) cpu_reads.push_back(each.alias());
      for (const auto& each : targets) cpu_writes.push_back(each.alias());
      transfer(cpu_reads, cpu_writes);
    };
    enqueue(stream, name, task, uses);
    last = record_event(stream);
    Tensors used(reads);
    used.insert(used.end(), writes.begin(), writes.end());
    WorkPointer work = c10::make_intrusive<SimulatedWork>(type, last, device, std::move(used), writes);
    if (is_coalescing_) last_coalesced_ = work;  // a work that is kept longer would keep its results allocated
    return work;
  }

  struct PointToPoint {
    Tensors tensors;
    Transfer transfer;
  };

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, Stream*> streams_;
  // Gloo reads the copies of a send until the receiver has them.
  std::shared_ptr<std::list<std::pair<WorkPointer, Tensors>>> sends_ =
      std::make_shared<std::list<std::pair<WorkPointer, Tensors>>>();
  bool is_coalescing_ = false;
  std::vector<PointToPoint> coalesced_sends_;
  std::vector<PointToPoint> coalesced_receives_;
  WorkPointer last_coalesced_;
};

}  // namespace

void define_make_backend(pybind11::module& module) {
  pybind11::module::import("torch.distributed");  // defines the Python class of the argument and of the result
  module.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimulatedBackend>(std::move(gloo));
  });
}

}  // namespace simulator
