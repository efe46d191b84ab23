#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

namespace simulator {
namespace {

constexpr size_t kMaxRaces = 1000;

// All objects with static lifetime are leaked: threads may use them while the process exits.
struct State {
  std::mutex mutex;
  std::condition_variable task_done;
  std::vector<Stream*> streams;
  std::map<std::pair<int, int64_t>, Stream*> stream_of_id;
  int64_t next_id = 1;
  Clock host_clock;  // tasks that a host thread has waited for
  Schedule schedule = Schedule::late;
  Forbidden forbidden = Forbidden::none;
  std::map<std::string, int64_t> host_waits;
  std::vector<std::string> races;
  int64_t num_tasks = 0;
  std::exception_ptr first_error;
  std::atomic<uint64_t> activity{0};
};

State& state() {
  static auto* state = new State;
  return *state;
}

thread_local bool thread_is_exempt = false;

std::map<int, Stream*>& current_streams() {
  thread_local std::map<int, Stream*> streams;
  return streams;
}

void merge(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

uint64_t at_slot(const Clock& clock, size_t slot) { return slot < clock.size() ? clock[slot] : 0; }

std::string describe(const Access& access) {
  return access.task + (access.writes ? " (writes, stream " : " (reads, stream ") + std::to_string(access.stream->id) +
         ")";
}

// Record an access, and report each earlier access that conflicts with it and is not ordered before it.
void check_access(const Access& access, std::vector<Access>& earlier) {
  const Clock& clock = access.stream->clock;
  bool is_ordered = true;
  for (const Access& each : earlier) {
    if (each.stream == access.stream || !(each.writes || access.writes)) continue;
    if (each.end <= access.begin || access.end <= each.begin) continue;
    if (at_slot(clock, each.stream->slot) >= each.position) continue;
    is_ordered = false;
    if (state().races.size() < kMaxRaces)
      state().races.push_back(describe(access) + " is not ordered after " + describe(each));
  }
  // A later access that is ordered after a write is also ordered after the accesses before this write.
  auto is_obsolete = [&](const Access& each) {
    const bool is_covered = access.begin <= each.begin && each.end <= access.end;
    return is_covered && (each.stream == access.stream ? access.writes || !each.writes : access.writes && is_ordered);
  };
  earlier.erase(std::remove_if(earlier.begin(), earlier.end(), is_obsolete), earlier.end());
  earlier.push_back(access);
}

// Advance the clock of the stream by one task.
void advance(Stream* stream) {
  merge(stream->clock, state().host_clock);
  ++stream->num_enqueued;
  if (stream->clock.size() <= stream->slot) stream->clock.resize(stream->slot + 1, 0);
  stream->clock[stream->slot] = stream->num_enqueued;
  ++state().activity;
}

// Run the tasks of `stream` up to `position`, and the tasks of other streams that they wait for. The lock is released
// while a task runs: a collective waits for other ranks, and must not stop the other threads of this process.
void run_until(Lock& lock, Stream* stream, uint64_t position) {
  while (stream->num_done < position) {
    if (stream->is_running) {
      state().task_done.wait(lock);
      continue;
    }
    Task& next = stream->tasks.front();
    if (next.awaited != nullptr && next.awaited->num_done < next.awaited_position) {
      run_until(lock, next.awaited, next.awaited_position);
      continue;
    }
    Task task = std::move(next);
    stream->tasks.pop_front();
    if (task.function) {
      std::exception_ptr error;
      stream->is_running = true;
      lock.unlock();
      try {
        task.function();
      } catch (...) {
        error = std::current_exception();
      }
      task = Task();  // what the task owns is freed without the lock
      lock.lock();
      stream->is_running = false;
      if (error && !state().first_error) state().first_error = error;
    }
    ++stream->num_done;
    ++state().activity;
    state().task_done.notify_all();
  }
}

void run_others_first(Lock& lock, const Stream* stream) {
  if (state().schedule != Schedule::others_first) return;
  for (size_t i = 0; i < state().streams.size(); ++i) {
    Stream* other = state().streams[i];
    if (other != stream) run_until(lock, other, other->num_enqueued);
  }
}

// An error of a task is raised at the next point where the host waits, as on a real device.
void raise_first_error() {
  if (!state().first_error) return;
  std::exception_ptr error = std::exchange(state().first_error, nullptr);
  std::rethrow_exception(error);
}

void count_wait(Lock&, const std::string& kind, Wait wait) {
  if (thread_is_exempt) return;
  ++state().host_waits[kind];
  const Forbidden forbidden = state().forbidden;
  const bool is_forbidden = forbidden == Forbidden::all || (forbidden == Forbidden::implicit && wait == Wait::implicit);
  TORCH_CHECK(!is_forbidden, "The host waits for the simulated device (", kind, ") where waits are forbidden.");
}

Stream* find_stream(Lock&, int device, int64_t id) {
  Stream*& stream = state().stream_of_id[{device, id}];
  if (stream == nullptr) {
    stream = new Stream{device, id, state().streams.size()};
    state().streams.push_back(stream);
  }
  return stream;
}

}  // namespace

Block::~Block() { std::free(data); }

Stream* find_stream(int device, int64_t id) {
  Lock lock(state().mutex);
  return find_stream(lock, device, id);
}

Stream* new_stream(int device) {
  Lock lock(state().mutex);
  return find_stream(lock, device, state().next_id++);
}

Stream* current_stream(int device) {
  const auto& streams = current_streams();
  const auto found = streams.find(device);
  return found == streams.end() ? find_stream(device, 0) : found->second;
}

Stream* exchange_stream(Stream* stream) {
  Stream* before = current_stream(stream->device);
  current_streams()[stream->device] = stream;
  return before;
}

void enqueue(Stream* stream, const std::string& name, std::function<void()> function, const std::vector<Use>& uses) {
  Lock lock(state().mutex);
  ++state().num_tasks;
  advance(stream);
  for (const Use& use : uses) {
    if (use.block == nullptr) continue;
    check_access({stream, stream->num_enqueued, use.begin, use.end, use.writes, name}, use.block->accesses);
  }
  stream->tasks.push_back({name, std::move(function)});
  if (state().schedule == Schedule::immediate) {
    run_until(lock, stream, stream->num_enqueued);
    raise_first_error();
  }
}

void enqueue_wait(Stream* stream, const Event& event, bool with_clock) {
  Lock lock(state().mutex);
  if (event.stream == nullptr || event.stream == stream) return;
  if (with_clock) merge(stream->clock, event.clock);
  advance(stream);
  stream->tasks.push_back({"wait", nullptr, event.stream, event.position});
  if (state().schedule == Schedule::immediate) run_until(lock, stream, stream->num_enqueued);
}

Event record_event(Stream* stream) {
  Lock lock(state().mutex);
  return {stream, stream->num_enqueued, stream->clock};
}

bool has_happened(const Event& event) {
  Lock lock(state().mutex);
  return event.stream == nullptr || event.stream->num_done >= event.position;
}

bool is_before(const Access& access, const Event& event) {
  return at_slot(event.clock, access.stream->slot) >= access.position;
}

void wait_for_stream(Stream* stream, const std::string& kind, Wait wait) {
  wait_for_event(record_event(stream), kind, wait);
}

void wait_for_event(const Event& event, const std::string& kind, Wait wait) {
  count_wait(kind, wait);
  finish_wait(event);
}

void finish_wait(const Event& event) {
  Lock lock(state().mutex);
  if (event.stream != nullptr) {
    run_others_first(lock, event.stream);
    run_until(lock, event.stream, event.position);
    merge(state().host_clock, event.clock);
  }
  raise_first_error();
}

void wait_for_device(int device) {
  Lock lock(state().mutex);
  count_wait(lock, "device.synchronize", Wait::explicitly_requested);
  for (size_t i = 0; i < state().streams.size(); ++i) {
    Stream* stream = state().streams[i];
    if (stream->device != device) continue;
    const Clock clock = stream->clock;
    run_until(lock, stream, stream->num_enqueued);
    merge(state().host_clock, clock);
  }
  raise_first_error();
}

bool query_event(const Event& event) {
  Lock lock(state().mutex);
  if (event.stream == nullptr) return true;
  if (event.stream->num_done >= event.position) {
    merge(state().host_clock, event.clock);
    return true;
  }
  run_until(lock, event.stream, event.position);
  return false;
}

void run_until(const Event& event) {
  Lock lock(state().mutex);
  if (event.stream != nullptr) run_until(lock, event.stream, event.position);
}

void run_stream(Stream* stream) { run_until(record_event(stream)); }

void run_all() {
  Lock lock(state().mutex);
  for (size_t i = 0; i < state().streams.size(); ++i)
    run_until(lock, state().streams[i], state().streams[i]->num_enqueued);
}

void count_wait(const std::string& kind, Wait wait) {
  Lock lock(state().mutex);
  count_wait(lock, kind, wait);
}

uint64_t activity() { return state().activity; }

void set_schedule(Schedule schedule) {
  run_all();
  Lock lock(state().mutex);
  state().schedule = schedule;
}

void set_forbidden(Forbidden forbidden) {
  Lock lock(state().mutex);
  state().forbidden = forbidden;
}

void exempt_this_thread(bool is_exempt) { thread_is_exempt = is_exempt; }

void report_race(std::string text) {
  Lock lock(state().mutex);
  if (state().races.size() < kMaxRaces) state().races.push_back(std::move(text));
}

std::vector<std::string> races() {
  Lock lock(state().mutex);
  return state().races;
}

std::map<std::string, int64_t> host_waits() {
  Lock lock(state().mutex);
  return state().host_waits;
}

int64_t num_tasks() {
  Lock lock(state().mutex);
  return state().num_tasks;
}

void clear_counts() {
  Lock lock(state().mutex);
  state().races.clear();
  state().host_waits.clear();
  state().num_tasks = 0;
  state().first_error = nullptr;
}

}  // namespace simulator
