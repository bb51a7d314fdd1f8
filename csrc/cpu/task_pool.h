// SPDX-License-Identifier: Apache-2.0
// Tasks pulled one by one by the threads of a pool that the caller provides, and scratch memory
// that stays with its thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace keyformer {

// Starts `body(context)` on up to `num_threads` threads and returns when all have returned.
struct ThreadPool {
  int64_t num_threads;
  void (*launch)(int64_t num_threads, void (*body)(void*), void* context);
};

// Each participating thread calls `start_worker()` once and then the worker it returned with
// the next task number until none is left. `start_worker` is where scratch is allocated: a thread
// that cannot have its scratch takes no task.
template <typename StartWorker>
void run_tasks(const ThreadPool& pool, int64_t num_tasks, const StartWorker& start_worker) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t num_tasks;
    const StartWorker* start_worker;
  } shared;
  shared.num_tasks = num_tasks;
  shared.start_worker = &start_worker;
  const auto body = [](void* context) {
    Shared& shared = *static_cast<Shared*>(context);
    auto worker = (*shared.start_worker)();
    for (;;) {
      const int64_t task = shared.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= shared.num_tasks) return;
      worker(task);
    }
  };
  const int64_t num_threads = num_tasks < pool.num_threads ? num_tasks : pool.num_threads;
  if (num_tasks == 0) return;
  if (num_threads <= 1) return body(&shared);
  pool.launch(num_threads, body, &shared);
}

// Grow-only array of plain values, aligned for the widest vectors; contents are not kept.
template <typename T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  T* reserve(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      data_ = nullptr;
      capacity_ = 0;
      const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = count;
    }
    return data_;
  }

  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace keyformer
