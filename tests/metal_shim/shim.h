// What the kernels use of Metal, on a CPU: a threadgroup's threads are fibres of one thread, run in turns.
//
// A simdgroup's lanes run until each waits for the others: simd_sum and simd_max are worked out once all 32
// have come to the same one, barriers once the whole threadgroup has. Where some pass and others do not, which
// Metal leaves undefined, the launch fails.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef uint32_t uint;
struct uint3 { uint x, y, z; };
#if defined(__aarch64__)
typedef __fp16 float16_t;
#else
typedef _Float16 float16_t;
#endif
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
};

#define device
#define constant
#define threadgroup static  // one threadgroup at a time

// Both arguments of one type, as Metal wants them.
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
namespace fast { inline float exp(float x) { return expf(x); } }
namespace precise { inline float tanh(float x) { return tanhf(x); } }
enum class mem_flags { mem_threadgroup };

namespace shim {
enum State { READY, SUM, MAX, BARRIER, DONE };
const char* const NAMES[] = {"", "simd_sum", "simd_max", "a barrier", "the end"};
struct Fibre {
  jmp_buf at;
  ucontext_t first;
  char* stack;
  bool begun;
  State state;
  float value;
};
struct Arg {  // becomes a pointer of whatever kind the kernel's parameter is
  void* to;
  template <class T> operator T*() const { return static_cast<T*>(to); }
};

static Fibre* fibres;
static uint count, current;
static jmp_buf scheduler;
static void (*body)();
static uint3 threads, group_at, groups;
static char failure[160];

inline uint lane() { return current % 32; }
inline uint simdgroup() { return current / 32; }

inline void wait(State state) {
  Fibre& self = fibres[current];
  self.state = state;
  if (!_setjmp(self.at)) _longjmp(scheduler, 1);
}
inline float reduced(State state, float value) {
  fibres[current].value = value;
  wait(state);
  return fibres[current].value;
}
inline void live() {  // a fibre's whole life: the body once for each threadgroup
  for (;;) {
    body();
    wait(DONE);
  }
}
inline void resume(uint number) {
  current = number;
  Fibre& fibre = fibres[number];
  if (_setjmp(scheduler)) return;
  if (fibre.begun) _longjmp(fibre.at, 1);
  fibre.begun = true;
  getcontext(&fibre.first);
  fibre.first.uc_stack.ss_sp = fibre.stack;
  fibre.first.uc_stack.ss_size = 1 << 16;
  fibre.first.uc_link = nullptr;
  makecontext(&fibre.first, live, 0);
  setcontext(&fibre.first);
}
inline bool same(uint from, uint to, const char* where) {
  for (uint i = from + 1; i < to; i++)
    if (fibres[i].state != fibres[from].state) {
      strcpy(failure, where);
      strcat(strcat(failure, ": one thread is at "), NAMES[fibres[from].state]);
      strcat(strcat(failure, ", another at "), NAMES[fibres[i].state]);
      return false;
    }
  return true;
}
inline void reduce(uint from, uint to) {
  float result = fibres[from].value;
  for (uint i = from + 1; i < to; i++)
    result = fibres[from].state == SUM ? result + fibres[i].value : max(result, fibres[i].value);
  for (uint i = from; i < to; i++) fibres[i].value = result;
}
inline bool run_simdgroup(uint from, uint to) {  // up to a barrier or the end
  for (;;) {
    for (uint i = from; i < to; i++) fibres[i].state = READY, resume(i);
    if (!same(from, to, "in a simdgroup")) return false;
    if (fibres[from].state != SUM && fibres[from].state != MAX) return true;
    reduce(from, to);
  }
}
inline bool run_threadgroup(bool backwards) {
  const uint simdgroups = (count + 31) / 32;
  do {
    for (uint i = 0; i < simdgroups; i++) {
      const uint from = 32 * (backwards ? simdgroups - 1 - i : i);
      if (!run_simdgroup(from, min(from + 32, count))) return false;
    }
    if (!same(0, count, "in a threadgroup")) return false;
  } while (fibres[0].state == BARRIER);
  return true;
}
// What went wrong, or nullptr.
inline const char* launch(void (*kernel)(), const uint* grid, const uint* group, bool backwards) {
  body = kernel;
  threads = {group[0], group[1], group[2]};
  groups = {grid[0] / group[0], grid[1] / group[1], grid[2] / group[2]};
  count = threads.x * threads.y * threads.z;
  fibres = static_cast<Fibre*>(calloc(count, sizeof(Fibre)));
  for (uint i = 0; i < count; i++) fibres[i].stack = static_cast<char*>(malloc(1 << 16));
  bool right = true;
  for (uint z = 0; right && z < groups.z; z++)
    for (uint y = 0; right && y < groups.y; y++)
      for (uint x = 0; right && x < groups.x; x++) {
        group_at = {x, y, z};
        right = run_threadgroup(backwards);
      }
  for (uint i = 0; i < count; i++) free(fibres[i].stack);
  free(fibres);
  return right ? nullptr : failure;
}
}  // namespace shim

inline float simd_sum(float value) { return shim::reduced(shim::SUM, value); }
inline float simd_max(float value) { return shim::reduced(shim::MAX, value); }
inline void threadgroup_barrier(mem_flags) { shim::wait(shim::BARRIER); }

// What a kernel asks for by an attribute of its parameter.
namespace attribute {
inline uint thread_index_in_simdgroup() { return shim::lane(); }
inline uint simdgroup_index_in_threadgroup() { return shim::simdgroup(); }
inline uint3 threadgroup_position_in_grid() { return shim::group_at; }
inline uint3 threadgroups_per_grid() { return shim::groups; }
}  // namespace attribute
