// Runs CUDA C++ kernels on the CPU: compiled by g++, one fibre for each CUDA thread, one block at a time.
//
// Not fast: strict. It is there to find what a GPU would only sometimes show.
//   - `order` says who runs between two synchronisation points: 0 forward, 1 reverse (warps in step), 2 forward,
//     3 reverse (each warp as far ahead as it can), 4 and up random with that seed. What a missing barrier breaks
//     differs between them.
//   - Shared memory starts as 0xFF (NaN) and lies between two pages that may not be touched.
//   - What an asynchronous copy is to fill is 0xFF until it is waited for. Bulk copies land at once in even orders and
//     as late as they may in odd ones. ldmatrix reads a row when its lane arrives (odd) or when the last lane does (even).
//   - A barrier that not all threads of the block reach, lanes that meet in different collectives, misaligned
//     copies: the launch ends with a message that names block and thread.
//
//   - Bulk copies and wgmma (emulator_warpgroup.h) have a shared memory of their own, in which what threads store is
//     seen only if they say so: a missing fence shows.
//
// It says nothing of speed, and threads' own memory is sequentially consistent: a missing __threadfence goes unseen.
// There is no `__shared__` here on purpose: kernels take dynamic shared memory, which is poisoned and guarded.
#ifndef EMULATOR_H  // not `#pragma once`: compiled ahead, it stands under another name
#define EMULATOR_H
#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__
#define SHARED_MEMORY(name) unsigned char* name = ::emulator::block->shared

struct uint2 { uint32_t x, y; } __attribute__((aligned(8)));
struct uint4 { uint32_t x, y, z, w; } __attribute__((aligned(16)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));

namespace emulator {

struct Index { unsigned x = 1, y = 1, z = 1; };

// Where the lanes of one mask meet. Two sets of slots: a fast lane may be in the next meeting while a slow one still
// reads from the last.
struct Meeting {
  uint32_t arrived = 0;
  unsigned round = 0;
  int kind = 0;
  alignas(16) unsigned char slot[2][32][64];
};

// A product of a warpgroup on its way (emulator_warpgroup.h), as one thread sees its share of it.
struct Product {
  float* d;
  int columns;
  uint64_t a, b;
  bool from_registers, transposed, add;
  float rows[2][16];            // of A, when it came from registers
  std::vector<float> operands;  // A's two rows and B's columns, when they are read early
  float (*value)(uint16_t);
};
// Accumulators that products own until they are waited for: what was in them, and how many products still count on it.
struct Owned { float* d; std::vector<float> now; int products; };

struct Copy { void* to; const void* from; int bytes; bool real; };
struct Bulk { void* to; const void* from; int bytes; uint64_t* barrier; };
struct Barrier { uint16_t pending, expected; int32_t bytes : 31; uint32_t phase : 1; };  // a model of mbarrier
static_assert(sizeof(Barrier) == 8, "an mbarrier has 8 bytes");

enum class At { ready, meeting, barrier, arrival, done };

struct Fibre {
  jmp_buf point;
  ucontext_t start;
  bool started = false;
  Index thread;
  int lane = 0, warp = 0;
  At at = At::ready;
  Meeting* meeting = nullptr;
  unsigned round = 0;
  uint64_t* awaited = nullptr;
  int parity = 0, barrier = 0, registers = 0, multiplied = 0;
  bool begun = false;  // wgmma's fence was passed since the last wait
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  std::vector<Product> products;
  std::vector<std::vector<Product>> product_groups;
  std::vector<Owned> owned;
  std::map<const void*, std::vector<uint32_t>> operands;  // registers that products used, as they were at the last fence
  std::vector<size_t> unfenced;                           // 16 bytes of shared memory that wgmma does not see yet
};

struct Block {
  Index index, size, grid;
  int threads = 0, order = 0;
  int arrived[16] = {};
  unsigned round[16] = {};
  unsigned char *shared = nullptr, *area = nullptr;
  std::vector<unsigned char> async;  // shared memory as bulk copies and wgmma have it
  size_t capacity = 0, bytes = 0;
  std::vector<Fibre*> fibres;
  std::vector<std::map<uint32_t, Meeting>> meetings;
  std::vector<Bulk> bulk;
  std::map<const uint64_t*, bool> barriers;  // those initialised, and whether the copy unit knows
  jmp_buf scheduler;
  const std::function<void()>* body = nullptr;
  std::string fault;
};

inline thread_local Block* block = nullptr;
inline thread_local Fibre* self = nullptr;

inline void leave() {
  if (!_setjmp(self->point)) _longjmp(block->scheduler, 1);
}

inline void fault(const char* what) {
  char text[256];
  std::snprintf(text, sizeof text, "%s (block %u,%u,%u thread %u)", what, block->index.x, block->index.y,
                block->index.z, self ? self->thread.x : 0);
  if (block->fault.empty()) block->fault = text;
  if (self) _longjmp(block->scheduler, 1);  // never resumed: the launch ends
}

inline void fibre_main() {
  for (;;) {
    (*block->body)();
    self->at = At::done;
    leave();
  }
}

inline void resume(Fibre* fibre) {
  self = fibre;
  fibre->at = At::ready;
  if (!_setjmp(block->scheduler)) {
    if (fibre->started) _longjmp(fibre->point, 1);
    fibre->started = true;
    setcontext(&fibre->start);
  }
  self = nullptr;
}

// ---- meetings of a warp's lanes and of a block's threads

template <class T> inline T of_lane(const unsigned char (*slots)[64], int lane) {
  T value;
  std::memcpy(&value, slots[lane], sizeof(T));
  return value;
}

// Every lane of `mask` brings a value and sees all. `kind` tells collectives apart.
template <class T> inline const unsigned char (*meet(uint32_t mask, int kind, const T& mine))[64] {
  static_assert(sizeof(T) <= 64, "too much for a slot");
  if (!(mask >> self->lane & 1)) fault("a lane calls a collective whose mask leaves it out");
  Meeting& meeting = block->meetings[self->warp][mask];
  if (meeting.arrived && meeting.kind != kind) fault("lanes of one mask meet in different collectives");
  unsigned round = meeting.round;
  meeting.kind = kind;
  std::memcpy(meeting.slot[round & 1][self->lane], &mine, sizeof(T));
  meeting.arrived |= 1u << self->lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    meeting.round++;
  } else {
    self->meeting = &meeting;
    self->round = round;
    self->at = At::meeting;
    leave();
  }
  return meeting.slot[round & 1];
}

// Barrier `id` of a block, for `threads` of its threads. 0 is that of all.
inline void block_barrier(int id = 0, int threads = 0) {
  unsigned round = block->round[id];
  if (++block->arrived[id] == (threads ? threads : block->threads)) {
    block->arrived[id] = 0;
    block->round[id]++;
  } else {
    self->round = round;
    self->barrier = id;
    self->at = At::barrier;
    leave();
  }
}

// ---- asynchronous copies

inline void check_alignment(const char* what, const void* to, const void* from, int bytes) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) fault(what);
}
inline void copy_async(void* to, const void* from, bool real) {
  check_alignment("cp.async: misaligned", to, from, 16);
  std::memset(to, 0xFF, 16);
  self->open.push_back({to, from, 16, real});
}
inline void copy_commit() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}
inline void copy_wait(size_t keep) {
  while (self->groups.size() > keep) {
    for (const Copy& copy : self->groups.front()) {
      if (copy.real) std::memcpy(copy.to, copy.from, copy.bytes);
      else std::memset(copy.to, 0, copy.bytes);
    }
    self->groups.erase(self->groups.begin());
  }
}

inline void turn(Barrier* barrier) {
  if (barrier->pending || barrier->bytes) return;
  barrier->pending = barrier->expected;
  barrier->phase ^= 1;
}
inline void barrier_init(uint64_t* at, int arrivals) {
  Barrier fresh{(uint16_t)arrivals, (uint16_t)arrivals, 0, 0};
  std::memcpy(at, &fresh, 8);
  block->barriers[at] = false;
}
inline void barrier_publish() {
  for (auto& [at, known] : block->barriers) known = true;
}
inline void barrier_arrive(uint64_t* at, int bytes) {
  if (!block->barriers.count(at)) fault("mbarrier: not initialised yet");
  auto* barrier = (Barrier*)at;
  if (!barrier->pending) fault("mbarrier: more arrivals than it expects");
  barrier->bytes += bytes;
  barrier->pending--;
  turn(barrier);
}
inline size_t shared_offset(const void* at) {
  size_t offset = (const unsigned char*)at - block->shared;
  if (offset >= block->bytes) fault("this is to be in shared memory");
  return offset;
}
inline void land(size_t i) {
  Bulk copy = block->bulk[i];
  block->bulk.erase(block->bulk.begin() + i);
  std::memcpy(copy.to, copy.from, copy.bytes);
  std::memcpy(&block->async[shared_offset(copy.to)], copy.from, copy.bytes);
  auto* barrier = (Barrier*)copy.barrier;
  barrier->bytes -= copy.bytes;
  turn(barrier);
}
inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_alignment("cp.async.bulk: misaligned", to, from, bytes);
  if (!block->barriers[barrier]) fault("cp.async.bulk: its mbarrier is not published");
  block->bulk.push_back({to, from, bytes, barrier});
  std::memset(to, 0xFF, bytes);
  std::memset(&block->async[shared_offset(to)], 0xFF, bytes);
  if (block->order & 1) return;
  land(block->bulk.size() - 1);
}
inline bool arrived(uint64_t* at, int parity) {
  for (size_t i = block->bulk.size(); i-- > 0;)
    if (block->bulk[i].barrier == at) land(i);
  return ((Barrier*)at)->phase != (unsigned)parity;
}
inline void barrier_wait(uint64_t* at, int parity) {
  if (!block->barriers.count(at)) fault("mbarrier: not initialised yet");
  if (arrived(at, parity)) return;
  self->awaited = at;
  self->parity = parity;
  self->at = At::arrival;
  leave();
}

// ---- tensor cores

inline void ldmatrix_x4(uint32_t (&registers)[4], const void* row, bool transposed) {
  struct Row { const uint16_t* now; uint16_t then[8]; } mine{(const uint16_t*)row, {}};
  if ((uintptr_t)row % 16) fault("ldmatrix: misaligned row");
  std::memcpy(mine.then, row, 16);
  auto* slots = meet(~0u, transposed ? 21 : 20, mine);
  int lane = self->lane;
  for (int i = 0; i < 4; i++) {
    uint32_t halves[2];
    for (int j = 0; j < 2; j++) {
      int r = transposed ? 2 * (lane % 4) + j : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + j;
      Row of = of_lane<Row>(slots, 8 * i + r);
      halves[j] = block->order & 1 ? of.then[column] : of.now[column];
    }
    registers[i] = halves[0] | halves[1] << 16;
  }
}

// D[16][8] += A[16][16] B[16][8]; `value` turns 16 bits into a float.
template <class Value>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Value value) {
  struct Part { float a[8], b[4]; } mine;
  for (int i = 0; i < 8; i++) mine.a[i] = value(uint16_t(a[i / 2] >> 16 * (i % 2)));
  for (int i = 0; i < 4; i++) mine.b[i] = value(uint16_t(b[i / 2] >> 16 * (i % 2)));
  auto* slots = meet(~0u, 30, mine);
  int row = self->lane / 4, column = self->lane % 4;
  for (int quarter = 0; quarter < 4; quarter++) {
    auto& left = *(const Part*)slots[4 * row + quarter];
    for (int n = 0; n < 2; n++) {
      auto& right = *(const Part*)slots[4 * (2 * column + n) + quarter];
      for (int m = 0; m < 2; m++)
        d[2 * m + n] += left.a[2 * m] * right.b[0] + left.a[2 * m + 1] * right.b[1] +
                        left.a[4 + 2 * m] * right.b[2] + left.a[5 + 2 * m] * right.b[3];
    }
  }
}

// ---- running a block

inline bool may_run(Fibre* fibre) {
  switch (fibre->at) {
    case At::ready: return true;
    case At::meeting: return fibre->meeting->round != fibre->round;
    case At::barrier: return block->round[fibre->barrier] != fibre->round;
    case At::arrival: return arrived(fibre->awaited, fibre->parity);
    case At::done: return false;
  }
  return false;
}

constexpr size_t STACK = 256 << 10, GUARD = 4096;

inline void* map(size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

inline void prepare(int threads, size_t shared) {
  Block& b = *block;
  if (!b.area || b.capacity < shared) {
    if (b.area) munmap(b.area, b.capacity + 2 * GUARD);
    b.capacity = (shared + GUARD - 1) / GUARD * GUARD + GUARD;
    b.area = (unsigned char*)map(b.capacity + 2 * GUARD);
    mprotect(b.area, GUARD, PROT_NONE);
    mprotect(b.area + GUARD + b.capacity, GUARD, PROT_NONE);
  }
  b.shared = b.area + GUARD + b.capacity - (shared + 15) / 16 * 16;  // ends at the guard
  std::memset(b.area + GUARD, 0xFF, b.capacity);
  b.async.assign(shared, 0xFF);
  b.bytes = shared;
  while ((int)b.fibres.size() < threads) {
    auto* fibre = new Fibre;
    getcontext(&fibre->start);
    fibre->start.uc_stack = {map(STACK), 0, STACK};
    fibre->start.uc_link = nullptr;
    makecontext(&fibre->start, fibre_main, 0);
    b.fibres.push_back(fibre);
  }
  b.meetings.assign((threads + 31) / 32, {});
  b.bulk.clear();
  b.barriers.clear();
  std::fill(b.arrived, b.arrived + 16, 0);
  std::fill(b.round, b.round + 16, 0);
  for (int i = 0; i < threads; i++) {
    Fibre* fibre = b.fibres[i];
    fibre->thread = {(unsigned)i, 0, 0};
    fibre->lane = i % 32;
    fibre->warp = i / 32;
    fibre->at = At::ready;
    fibre->registers = fibre->multiplied = 0;
    fibre->begun = false;
    fibre->open.clear();
    fibre->groups.clear();
    fibre->products.clear();
    fibre->product_groups.clear();
    fibre->owned.clear();
    fibre->operands.clear();
    fibre->unfenced.clear();
  }
}

inline void check_warpgroups();

inline void run_block(Index index) {
  Block& b = *block;
  b.index = index;
  int order = b.order, warps = (b.threads + 31) / 32;
  uint64_t state = 0x9E3779B97F4A7C15ull * (order + 1) + index.x + 1;
  auto random = [&](int below) {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return int((state >> 20) % below);
  };
  std::vector<int> turns(warps);
  for (int i = 0; i < warps; i++) turns[i] = order & 1 ? warps - 1 - i : i;
  for (;;) {
    bool moved = false, left = false;
    if (order >= 4) for (int i = warps - 1; i > 0; i--) std::swap(turns[i], turns[random(i + 1)]);
    for (int warp : turns) {
      int laps = order < 2 ? 1 : order < 4 ? 1 << 30 : 1 + random(40), mixed = order >= 4 ? random(32) : 0;
      for (bool ran = true; ran && laps-- > 0;) {
        ran = false;
        for (int k = 0; k < 32; k++) {
          int i = 32 * warp + ((order & 1 ? 31 - k : k) ^ mixed);
          if (i >= b.threads || !may_run(b.fibres[i])) continue;
          ran = moved = true;
          resume(b.fibres[i]);
          if (!b.fault.empty()) return;
        }
      }
    }
    for (int i = 0; i < b.threads; i++) left |= b.fibres[i]->at != At::done;
    if (!left) break;
    if (!moved) return fault("no thread can run: a barrier or a collective is not reached by all");
  }
  if (!b.bulk.empty()) fault("a bulk copy was never waited for");
  check_warpgroups();
}

using Launch = std::function<std::string(Index, Index, size_t, void**, int)>;

inline std::map<std::string, Launch>& kernels() {
  static std::map<std::string, Launch> all;
  return all;
}

template <class... A, size_t... I> Launch launcher(void (*kernel)(A...), std::index_sequence<I...>) {
  return [kernel](Index grid, Index size, size_t shared, void** args, int order) {
    std::function<void()> body = [&] { kernel(*static_cast<std::remove_cv_t<A>*>(args[I])...); };
    if (!block) block = new Block;
    Block& b = *block;
    b.grid = grid;
    b.size = size;
    b.threads = size.x;
    b.order = order;
    b.body = &body;
    b.fault.clear();
    uint64_t total = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t i = 0; i < total && b.fault.empty(); i++) {
      uint64_t j = order & 1 ? total - 1 - i : i;
      prepare(b.threads, shared);
      run_block({unsigned(j % grid.x), unsigned(j / grid.x % grid.y), unsigned(j / grid.x / grid.y)});
    }
    if (!b.fault.empty()) for (Fibre* fibre : b.fibres) {  // their stacks are in the middle of something
      fibre->started = false;
      makecontext(&fibre->start, fibre_main, 0);
    }
    return b.fault;
  };
}

template <class... A> bool add(const char* name, void (*kernel)(A...)) {
  kernels()[name] = launcher(kernel, std::index_sequence_for<A...>{});
  return true;
}

}  // namespace emulator

#define EMULATOR_JOIN2(a, b) a##b
#define EMULATOR_JOIN(a, b) EMULATOR_JOIN2(a, b)
#define EMULATOR_KERNEL(...) \
  static bool EMULATOR_JOIN(emulator_kernel_, __COUNTER__) = ::emulator::add(#__VA_ARGS__, __VA_ARGS__)

#include "emulator_warpgroup.h"

// 0: ran; else the reason is in `why`.
extern "C" __attribute__((used)) inline int emulator_launch(const char* name, const unsigned* shape, size_t shared,
                                                            void** args, int order, char* why, size_t room) {
  auto found = ::emulator::kernels().find(name);
  std::string fault = found == ::emulator::kernels().end()
                          ? std::string("there is no such kernel")
                          : found->second({shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, shared, args, order);
  std::snprintf(why, room, "%s", fault.c_str());
  return fault.empty() ? 0 : 1;
}

// ---- what CUDA C++ has built in

#define threadIdx (::emulator::self->thread)
#define blockIdx (::emulator::block->index)
#define blockDim (::emulator::block->size)
#define gridDim (::emulator::block->grid)

inline void __syncthreads() { ::emulator::block_barrier(); }
inline void __syncwarp() { ::emulator::meet(~0u, 1, 0); }
template <class T> inline T __shfl_sync(uint32_t mask, T value, int lane) {
  return ::emulator::of_lane<T>(::emulator::meet(mask, 2, value), lane & 31);
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return ::emulator::of_lane<T>(::emulator::meet(mask, 3, value), ::emulator::self->lane ^ bits);
}
template <class T> inline T emulator_change(T* at, T value) {
  T old = *at;  // fibres do not interrupt each other
  *at = value;
  return old;
}
template <class T> inline T atomicAdd(T* at, T value) { return emulator_change(at, T(*at + value)); }

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
#endif
