// SPDX-License-Identifier: Apache-2.0
// Fibers that run one at a time, round and round, each until it waits for the others of its block
// or of its warp. They are entered once through a context of their own and then switched with
// setjmp and longjmp, which unlike swapcontext need no system call.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

namespace keyformer::emulation {

class Fibers {
 public:
  static constexpr int kMaxFibers = 1024;

  static Fibers& instance() {
    static Fibers fibers;
    return fibers;
  }

  int current() const { return current_; }

  // From the last fiber to the first, to show what depends on the order.
  void set_reversed(bool reversed) { reversed_ = reversed; }
  bool is_reversed() const { return reversed_; }

  // Runs `body` once in each of `count` fibers; an exception ends all of them.
  void run(int count, const std::function<void()>& body) {
    if (count > kMaxFibers || count % kWarpSize != 0) throw std::runtime_error("not whole warps");
    body_ = &body;
    count_ = num_alive_ = count;
    num_waiting_ = 0;
    error_ = nullptr;
    fibers_.resize(static_cast<size_t>(count));
    warp_waiting_.assign(static_cast<size_t>(count / kWarpSize), 0);
    for (Fiber& fiber : fibers_) {
      fiber.state = State::kNew;
      if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    }
    while (num_alive_ > 0 && !error_) {
      bool has_moved = false;
      for (int i = 0; i < count && !error_; ++i) {
        current_ = reversed_ ? count - 1 - i : i;
        const State state = fibers_[static_cast<size_t>(current_)].state;
        if (state != State::kNew && state != State::kReady) continue;
        has_moved = true;
        enter(fibers_[static_cast<size_t>(current_)]);
        release();
      }
      if (!has_moved) throw std::runtime_error("deadlock: not all threads reach a barrier");
    }
    if (error_) std::rethrow_exception(error_);
  }

  void wait_for_block() {
    ++num_waiting_;
    wait(State::kAtBlock);
  }

  void wait_for_warp() {
    ++warp_waiting_[static_cast<size_t>(current_ / kWarpSize)];
    wait(State::kAtWarp);
  }

 private:
  enum class State { kNew, kReady, kAtBlock, kAtWarp, kDone };

  struct Fiber {
    State state = State::kNew;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    jmp_buf resume;
  };

  static constexpr int kWarpSize = 32;
  static constexpr size_t kStackBytes = 64 * 1024;

  void enter(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.state == State::kReady) _longjmp(fiber.resume, 1);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Fibers::start, 0);
    setcontext(&fiber.context);
  }

  static void start() {
    Fibers& self = instance();
    try {
      (*self.body_)();
    } catch (...) {
      self.error_ = std::current_exception();
    }
    self.fibers_[static_cast<size_t>(self.current_)].state = State::kDone;
    --self.num_alive_;
    _longjmp(self.scheduler_, 1);
  }

  void wait(State state) {
    Fiber& fiber = fibers_[static_cast<size_t>(current_)];
    fiber.state = state;
    if (_setjmp(fiber.resume) == 0) _longjmp(scheduler_, 1);
  }

  // Lets go who has waited for the fiber that ran last. A thread that has returned counts as
  // arrived at the barrier of its block, as on a GPU.
  void release() {
    if (num_waiting_ > 0 && num_waiting_ == num_alive_) {
      num_waiting_ = 0;
      wake(0, count_, State::kAtBlock);
    }
    const int warp = current_ / kWarpSize;
    if (warp_waiting_[static_cast<size_t>(warp)] == kWarpSize) {
      warp_waiting_[static_cast<size_t>(warp)] = 0;
      wake(warp * kWarpSize, (warp + 1) * kWarpSize, State::kAtWarp);
    }
  }

  void wake(int begin, int end, State state) {
    for (int i = begin; i < end; ++i) {
      Fiber& fiber = fibers_[static_cast<size_t>(i)];
      if (fiber.state == state) fiber.state = State::kReady;
    }
  }

  const std::function<void()>* body_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<int> warp_waiting_;
  jmp_buf scheduler_;
  std::exception_ptr error_;
  int count_ = 0;
  int num_alive_ = 0;
  int num_waiting_ = 0;
  int current_ = 0;
  bool reversed_ = false;
};

}  // namespace keyformer::emulation
