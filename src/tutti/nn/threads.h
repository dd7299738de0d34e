// Threads of the compiled operators. A loop is cut into parts, and each thread takes the next part when it is done with
// one. In contrast to the threads of OpenMP, one that is late because another process has its core is not waited for: the
// others take its parts, so a shared machine slows a loop down by what it takes away, and not by whole time slices. But
// the threads of OpenMP spin for milliseconds after a loop, and would take the cores from these: loops use the pool where
// `own` says so (threads.py), and OpenMP elsewhere.
//
// Operators are compiled into several libraries, which share one pool: a static variable of an inline function is unique
// in a process.

#include <ATen/Parallel.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tutti_threads {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
 public:
  using Body = void (*)(const void*, int64_t);

  static Pool& shared() {
    static Pool* pool = new Pool;  // never deleted: its threads may outlive everything else
    return *pool;
  }

  // How many threads the loops of this thread have in the pool; 0: they use OpenMP.
  int64_t own() const { return reinterpret_cast<intptr_t>(pthread_getspecific(key)); }
  void set_own(int64_t threads) { pthread_setspecific(key, reinterpret_cast<void*>(static_cast<intptr_t>(threads))); }

  // Call body(context, 0) in this thread and body(context, i) in up to `helpers` others, and wait for those that have
  // begun. i: 1 to `helpers`, of which several threads may have the same.
  void run(int64_t helpers, Body body, const void* context) {
    helpers = std::min<int64_t>(helpers, JOINED);
    if (helpers < 1 || busy.exchange(true, std::memory_order_acquire)) return body(context, 0);  // another loop has it
    start(helpers);
    this->body = body, this->context = context;
    wanted.store(helpers, std::memory_order_relaxed);
    state.store((state.load(std::memory_order_relaxed) | OPEN) + NUMBER);
    if (sleeping.load()) state.notify_all();
    body(context, 0);
    state.fetch_and(~OPEN);
    for (int tries = 0; state.load(std::memory_order_acquire) & JOINED; ++tries)
      tries < 4000 ? pause() : std::this_thread::yield();
    busy.store(false, std::memory_order_release);
  }

 private:
  // Parts of the state: how many helpers have joined the loop, whether more may, and the number of the loop.
  static constexpr uint32_t JOINED = (1 << 10) - 1, OPEN = 1 << 10, NUMBER = 1 << 11;
  static constexpr std::chrono::microseconds PATIENCE{100};  // before a helper without work sleeps

  std::atomic<uint32_t> state{0};
  std::atomic<int> sleeping{0};
  std::atomic<int64_t> wanted{0};
  std::atomic<bool> busy{false};
  int64_t started = 0;
  Body body = nullptr;
  const void* context = nullptr;
  pthread_key_t key;

  Pool() {
    pthread_key_create(&key, nullptr);
    pthread_atfork(nullptr, nullptr, [] {  // a child has no threads but the one that forked
      Pool& pool = shared();
      pool.state = 0, pool.sleeping = 0, pool.busy = false, pool.started = 0;
    });
  }

  void start(int64_t helpers) {
    try {
      for (; started < helpers; ++started) std::thread(&Pool::help, this).detach();
    } catch (const std::system_error&) {  // the process may have no more threads: there are fewer helpers
    }
  }

  void help() {
    uint32_t last = 0;
    for (;;) {
      uint32_t now = wait_for_loop(last);
      if (!state.compare_exchange_strong(now, now + 1, std::memory_order_acq_rel)) continue;
      last = now / NUMBER;
      body(context, (now & JOINED) + 1);
      state.fetch_sub(1, std::memory_order_release);
    }
  }

  // The state as it is when a loop other than the last one can be joined.
  uint32_t wait_for_loop(uint32_t last) {
    auto since = std::chrono::steady_clock::now();
    for (int tries = 1;; ++tries) {
      const uint32_t now = state.load(std::memory_order_acquire);
      if (now & OPEN && now / NUMBER != last && (now & JOINED) < wanted.load(std::memory_order_relaxed)) return now;
      pause();
      if (tries % 64 || std::chrono::steady_clock::now() - since < PATIENCE) continue;
      ++sleeping;
      state.wait(now);
      --sleeping;
      since = std::chrono::steady_clock::now();
    }
  }
};

// How many threads a loop has.
inline int64_t threads_here() {
  const int64_t own = Pool::shared().own();
  return at::in_parallel_region() ? 1 : own ? own : at::get_num_threads();
}

// What is left of a thread's share of a loop. It takes parts from the begin, and others from the end.
struct alignas(64) Share {
  std::atomic<uint64_t> both{0};  // begin and end, of 32 bits each
  uint64_t least = 1;             // of a part

  void set(uint64_t begin, uint64_t end) {
    both.store(begin << 32 | end, std::memory_order_relaxed);
    least = std::max<uint64_t>(1, (end - begin) / 16);
  }

  // A quarter of what is left.
  bool take(bool own, int64_t& begin, int64_t& end) {
    uint64_t now = both.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t first = now >> 32, last = now & 0xffffffff;
      if (first >= last) return false;
      const uint64_t some = std::min(last - first, std::max(least, (last - first) / 4));
      begin = own ? first : last - some, end = own ? first + some : last;
      const uint64_t left = own ? (first + some) << 32 | last : first << 32 | (last - some);
      if (both.compare_exchange_weak(now, left, std::memory_order_relaxed)) return true;
    }
  }
};

// Call f(take) in each thread. take(begin, end) gives the next part of 0 to count < 2^32, or returns false when none is
// left. Parts of a thread are beside each other until it takes those of others. grain: what a thread is worth at least.
// f must not throw.
template <class F>
void take_parts(int64_t count, int64_t grain, const F& f) {
  const int64_t shares = std::max<int64_t>(1, std::min(threads_here(), count / grain));
  std::vector<Share> left(shares);
  for (int64_t i = 0; i < shares; ++i) left[i].set(i * count / shares, (i + 1) * count / shares);
  const auto body = [&](int64_t own) noexcept {
    f([&](int64_t& begin, int64_t& end) {
      for (int64_t i = 0; i < shares; ++i)
        if (left[(own + i) % shares].take(i == 0, begin, end)) return true;
      return false;
    });
  };
  Pool& pool = Pool::shared();
  if (pool.own())
    pool.run(shares - 1, [](const void* context, int64_t i) { (*static_cast<decltype(&body)>(context))(i); }, &body);
  else
    at::parallel_for(0, shares, 1, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) body(i);
    });
}

// Call f(begin, end) for parts of 0 to count, a few in each thread. grain: what a thread is worth at least.
template <class F>
void for_parts(int64_t count, int64_t grain, const F& f) {
  take_parts(count, grain, [&](auto take) {
    for (int64_t begin, end; take(begin, end);) f(begin, end);
  });
}

}  // namespace tutti_threads
