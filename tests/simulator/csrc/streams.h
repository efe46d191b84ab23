// Streams of the simulated device: queues of tasks that run as late as the schedule allows.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulator {

struct Stream;
using Lock = std::unique_lock<std::mutex>;

// Vector clock: for each stream (by Stream::slot), the number of its tasks that are ordered before a point in time.
using Clock = std::vector<uint64_t>;

// Point in a stream: the tasks enqueued so far, and all tasks ordered before them.
struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
};

// Access to the bytes [begin, end) of a block by a task.
struct Access {
  const Stream* stream;
  uint64_t position;
  int64_t begin;
  int64_t end;
  bool writes;
  std::string task;
};

// Memory that tasks access: memory of the device, or pinned memory of the host. A task owns its blocks, so memory that
// the program frees remains valid until the tasks that use it have run.
struct Block {
  char* data = nullptr;
  size_t num_bytes = 0;
  std::vector<Access> accesses;

  // Of device memory only.
  int device = -1;
  size_t counted_bytes = 0;
  Stream* home = nullptr;         // the stream that was current when the block was allocated
  std::vector<Stream*> recorded;  // streams passed to record_stream

  // Of pinned memory only.
  uint64_t num_writes = 0;  // enqueued copies from the device
  int64_t num_pending = 0;  // enqueued copies that have not run
  int64_t num_pending_writes = 0;

  ~Block();
};
using BlockPointer = std::shared_ptr<Block>;

// Use of a block by a task that is enqueued.
struct Use {
  BlockPointer block;
  int64_t begin;
  int64_t end;
  bool writes;
};

// Either a function, or a wait for a position of a different stream.
struct Task {
  std::string name;
  std::function<void()> function;
  Stream* awaited = nullptr;
  uint64_t awaited_position = 0;
};

struct Stream {
  int device;
  int64_t id;
  size_t slot;
  std::deque<Task> tasks;
  uint64_t num_enqueued = 0;
  uint64_t num_done = 0;
  bool is_running = false;                                         // a thread runs a task of this stream
  Clock clock;                                                     // tasks ordered before the next task of this stream
  std::vector<std::pair<BlockPointer, std::vector<Event>>> freed;  // blocks that the next allocation may reuse
  uint64_t last_reuse = 0;                                         // position of the last task that reuses blocks
};

enum class Schedule { late = 0, others_first = 1, immediate = 2 };
enum class Forbidden { none = 0, implicit = 1, all = 2 };
enum class Wait { implicit, explicitly_requested };

Stream* find_stream(int device, int64_t id);
Stream* new_stream(int device);
Stream* current_stream(int device);
Stream* exchange_stream(Stream* stream);

void enqueue(Stream* stream, const std::string& name, std::function<void()> function, const std::vector<Use>& uses);
// Order `stream` after `event`. Without `with_clock`, the race check ignores the order.
void enqueue_wait(Stream* stream, const Event& event, bool with_clock = true);
Event record_event(Stream* stream);
bool has_happened(const Event& event);  // does not run tasks
// Return whether the task of `access` is ordered before `event`.
bool is_before(const Access& access, const Event& event);

// Waits of the host. `kind` is the name under which the wait is counted.
void wait_for_stream(Stream* stream, const std::string& kind, Wait wait);
void wait_for_event(const Event& event, const std::string& kind, Wait wait);
void wait_for_device(int device);
// Wait after count_wait.
void finish_wait(const Event& event);
// Return true if all tasks have run. Otherwise run them and return false, so a loop that polls ends.
bool query_event(const Event& event);

// Run tasks without counting a wait.
void run_until(const Event& event);
void run_stream(Stream* stream);
void run_all();
void count_wait(const std::string& kind, Wait wait);
// Number that changes whenever a task is enqueued or has run.
uint64_t activity();

// Rules that the tests set, and counts that they read.
void set_schedule(Schedule schedule);
void set_forbidden(Forbidden forbidden);
void exempt_this_thread(bool is_exempt);
void report_race(std::string text);
std::vector<std::string> races();
std::map<std::string, int64_t> host_waits();
int64_t num_tasks();
void clear_counts();

}  // namespace simulator
