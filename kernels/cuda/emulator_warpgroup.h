// What warpgroup.cuh asks of a GPU, on the CPU: products that are done aside, and the memory that they see.
//
//   - Accumulators are NaN from a product's issue to the wait for it, and must still be so then: whoever reads them
//     early has NaN, whoever writes them is named.
//   - Operands in shared memory are read at the issue in even orders, at the wait in odd ones, from what bulk copies
//     brought and threads stored *and fenced*. Between a store and its fence they are NaN.
//   - Registers that products take must be as they were at the last fence, and there must have been one since the last
//     wait.
//   - All four warps of a warpgroup issue the same number of products, and wait for all.
#ifndef EMULATOR_WARPGROUP_H
#define EMULATOR_WARPGROUP_H
#include "emulator.h"

namespace emulator {

constexpr uint32_t POISON = 0xFFFFFFFF;

inline void store_async(void* to, const void* sixteen) {
  size_t at = shared_offset(to);
  if (at % 16) fault("a store for wgmma: misaligned");
  std::memcpy(to, sixteen, 16);
  std::memset(&block->async[at], 0xFF, 16);
  self->unfenced.push_back(at);
}
inline void fence_async() {
  for (size_t at : self->unfenced) std::memcpy(&block->async[at], block->shared + at, 16);
  self->unfenced.clear();
}

inline void take_registers(int count) {
  if (count % 8 || count < 24 || count > 256) fault("setmaxnreg: 24 to 256, in steps of 8");
  meet(~0u, 40, count);
  self->registers = count;
}

// ---- operands

// Where in shared memory the element (line, k) of an operand lies. Lines are rows of A, columns of B.
inline size_t element_at(uint64_t operand, int line, int k, bool transposed) {
  static const int widths[] = {0, 128, 64, 32};
  int width = widths[operand >> 62];
  if (!width) fault("wgmma: an operand that is not exchanged");
  size_t start = (operand & 0x3FFF) << 4, panels = (operand >> 16 & 0x3FFF) << 4, rows = (operand >> 32 & 0x3FFF) << 4;
  size_t at = transposed ? start + line / (width / 2) * panels + k / 8 * rows + k % 8 * width + line % (width / 2) * 2
                         : start + line / 8 * rows + line % 8 * width + k * 2;
  return at ^ (at >> 7 & (width / 16 - 1)) << 4;
}
inline float element(const Product& p, uint64_t operand, int line, int k, bool transposed) {
  size_t at = element_at(operand, line, k, transposed);
  if (at + 2 > block->bytes) fault("wgmma: an operand goes past shared memory");
  uint16_t bits;
  std::memcpy(&bits, &block->async[at], 2);
  return p.value(bits);
}
// This thread's part of both operands: its two rows of A, then its columns of B.
inline void read_operands(Product& p) {
  int row = self->warp % 4 * 16 + self->lane / 4;
  p.operands.resize((2 + p.columns / 4) * 16);
  float* to = p.operands.data();
  for (int h = 0; h < 2; h++)
    for (int k = 0; k < 16; k++) *to++ = p.from_registers ? p.rows[h][k] : element(p, p.a, row + 8 * h, k, false);
  for (int j = 0; j < p.columns / 8; j++)
    for (int e = 0; e < 2; e++)
      for (int k = 0; k < 16; k++) *to++ = element(p, p.b, 8 * j + self->lane % 4 * 2 + e, k, p.transposed);
}

// ---- products

inline bool poisoned(const float* d, int n) {
  for (int i = 0; i < n; i++) if (std::memcmp(d + i, &POISON, 4)) return false;
  return true;
}
inline void products_begin() {
  meet(~0u, 41, 0);
  self->begun = true;
  for (auto& [registers, then] : self->operands) std::memcpy(then.data(), registers, then.size() * 4);
}
// Registers as they are must be those of the last fence, if that knew them.
inline void check_fenced(const void* registers, int n) {
  auto found = self->operands.find(registers);
  if (found == self->operands.end()) {
    self->operands[registers].assign((const uint32_t*)registers, (const uint32_t*)registers + n);
  } else if (std::memcmp(found->second.data(), registers, n * 4)) {
    fault("wgmma: a register was changed after the fence");
  }
}
inline void multiply(float* d, int columns, const uint64_t* a, const uint32_t (*registers)[4], uint64_t b,
                     bool transposed, bool add, float (*value)(uint16_t)) {
  if (!self->begun) fault("wgmma: no fence since registers were last free");
  Product p{d, columns, a ? *a : 0, b, registers != nullptr, transposed, add, {}, {}, value};
  struct Four { uint32_t of[4]; } mine = {};
  if (registers) {
    check_fenced(*registers, 4);
    std::memcpy(mine.of, *registers, 16);
  }
  auto* slots = meet(~0u, 42, mine);
  if (registers)
    for (int quarter = 0; quarter < 4; quarter++) {
      Four other = of_lane<Four>(slots, self->lane / 4 * 4 + quarter);
      for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++)
          p.rows[i % 2][i / 2 * 8 + quarter * 2 + half] = value(uint16_t(other.of[i] >> 16 * half));
    }
  auto owned = std::find_if(self->owned.begin(), self->owned.end(), [&](const Owned& one) { return one.d == d; });
  if (owned == self->owned.end()) {
    if (add) check_fenced(d, columns / 2);
    self->owned.push_back({d, std::vector<float>(d, d + columns / 2), 0});
    owned = self->owned.end() - 1;
    std::memset(d, 0xFF, columns / 2 * 4);
  }
  owned->products++;
  self->multiplied++;
  if (!(block->order & 1)) read_operands(p);
  self->products.push_back(std::move(p));
}
inline void products_commit() {
  meet(~0u, 43, 0);
  self->product_groups.push_back(std::move(self->products));
  self->products.clear();
}
inline void finish(Product& p) {
  if (p.operands.empty()) read_operands(p);
  auto owned = std::find_if(self->owned.begin(), self->owned.end(), [&](const Owned& one) { return one.d == p.d; });
  const float *rows = p.operands.data(), *columns = rows + 32;
  for (int i = 0; i < p.columns / 2; i++) {
    float sum = p.add ? owned->now[i] : 0.f;
    const float *row = rows + i / 2 % 2 * 16, *column = columns + (i / 4 * 2 + i % 2) * 16;
    for (int k = 0; k < 16; k++) sum += row[k] * column[k];
    owned->now[i] = sum;
  }
  if (--owned->products) return;
  if (!poisoned(p.d, p.columns / 2)) fault("wgmma: accumulators were written while a product had them");
  std::copy(owned->now.begin(), owned->now.end(), p.d);
  self->owned.erase(owned);
}
inline void products_wait(size_t keep) {
  while (self->product_groups.size() > keep) {
    for (Product& p : self->product_groups.front()) finish(p);
    self->product_groups.erase(self->product_groups.begin());
  }
  self->begun = false;
  meet(~0u, 44, 0);  // a warp goes on when all of its lanes' results are there
}

inline void check_warpgroups() {
  int registers = 0;
  for (int i = 0; i < block->threads; i++) {
    Fibre* fibre = block->fibres[i];
    registers += fibre->registers;
    if (!fibre->products.empty() || !fibre->product_groups.empty()) return fault("a product was never waited for");
    if (fibre->multiplied != block->fibres[i / 128 * 128]->multiplied)
      return fault("wgmma: the warps of a warpgroup did not issue the same products");
  }
  if (registers > 65536) fault("setmaxnreg: more registers than there are");
}

}  // namespace emulator
#endif
