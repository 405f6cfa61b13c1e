// Tile registers: eight of up to 16 rows by 64 bytes, and products of whole tiles. What a level with AMX is written
// with, beside its vectors. With OCTAVO_PLAIN_TILES the same operations, bit for bit, in plain C++: for processors without
// AMX, and for sanitizers, which do not see what tile instructions read and write.
//
// A product takes rows of A times B, whose row j holds columns 4 j .. 4 j + 3 (bytes) or 2 j, 2 j + 1 (bf16) of the sum,
// for up to 16 results side by side: a group of a packed block is a B of 8 rows as it lies.
//
//     C [row][result] += Σ A [row][column] · B [column / 4][result][column % 4]
//
// A row of C depends on the same row of A alone. Tile registers are a thread's own, and are the kernel's that holds a
// `Tiles`: it gives them shapes, and gives them back when it ends, so that the system has none to save between kernels.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace {

struct TileShape {
    int rows, bytes;  // at most 16, 64; rows of B: a fourth (bf16: half) of the columns of A
};

#if !defined(OCTAVO_PLAIN_TILES)

// Kernels of one thread do not nest: the inner one would take the registers of the outer one away.
class Tiles {
public:
    template <size_t N>
    explicit Tiles(const TileShape (&shapes)[N]) {
        static_assert(N <= 8, "there are eight tile registers");
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } all = {};
        all.palette = 1;
        for (size_t i = 0; i < N; i++) all.bytes[i] = uint16_t(shapes[i].bytes), all.rows[i] = uint8_t(shapes[i].rows);
        asm volatile("ldtilecfg %0" ::"m"(all));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
// Rows are `stride` bytes apart.
template <int T>
inline void tile_load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// C += A B: of signed bytes; of signed bytes A and unsigned ones B; the other way round; of bf16 into floats.
template <int C, int A, int B>
inline void tile_dot_ss() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
template <int C, int A, int B>
inline void tile_dot_su() { asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
template <int C, int A, int B>
inline void tile_dot_us() { asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
template <int C, int A, int B>
inline void tile_dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

#else

struct TileRegister {
    TileShape shape;
    uint8_t bytes[16][64];
};
inline thread_local TileRegister tile_registers[8];

class Tiles {
public:
    template <size_t N>
    explicit Tiles(const TileShape (&shapes)[N]) {
        static_assert(N <= 8, "there are eight tile registers");
        for (size_t i = 0; i < N; i++) tile_registers[i] = {shapes[i], {}};
    }
    ~Tiles() { memset(tile_registers, 0, sizeof tile_registers); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void tile_zero() { memset(tile_registers[T].bytes, 0, sizeof tile_registers[T].bytes); }
template <int T>
inline void tile_load(const void* p, size_t stride) {
    TileRegister& t = tile_registers[T];
    tile_zero<T>();
    for (int r = 0; r < t.shape.rows; r++) memcpy(t.bytes[r], (const uint8_t*)p + size_t(r) * stride, size_t(t.shape.bytes));
}
template <int T>
inline void tile_store(void* p, size_t stride) {
    const TileRegister& t = tile_registers[T];
    for (int r = 0; r < t.shape.rows; r++) memcpy((uint8_t*)p + size_t(r) * stride, t.bytes[r], size_t(t.shape.bytes));
}
template <int C, int A, int B, class Left, class Right>
inline void tile_dot_bytes() {
    TileRegister& c = tile_registers[C];
    for (int m = 0; m < c.shape.rows; m++)
        for (int n = 0; n < c.shape.bytes / 4; n++) {
            int32_t sum;
            memcpy(&sum, c.bytes[m] + 4 * n, 4);
            for (int k = 0; k < tile_registers[A].shape.bytes; k++)
                sum += int32_t(Left(tile_registers[A].bytes[m][k])) * int32_t(Right(tile_registers[B].bytes[k / 4][4 * n + k % 4]));
            memcpy(c.bytes[m] + 4 * n, &sum, 4);
        }
}
template <int C, int A, int B>
inline void tile_dot_ss() { tile_dot_bytes<C, A, B, int8_t, int8_t>(); }
template <int C, int A, int B>
inline void tile_dot_su() { tile_dot_bytes<C, A, B, int8_t, uint8_t>(); }
template <int C, int A, int B>
inline void tile_dot_us() { tile_dot_bytes<C, A, B, uint8_t, int8_t>(); }

// Even and odd columns are summed apart, in order, each product and its sum rounded once; numbers below 2^-126 are 0.
template <int C, int A, int B>
inline void tile_dot_bf16() {
    const auto flushed = [](float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? x * 0.f : x; };
    const auto number = [&](const uint8_t* p) {
        uint16_t half;
        memcpy(&half, p, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float x;
        memcpy(&x, &bits, 4);
        return flushed(x);
    };
    TileRegister& c = tile_registers[C];
    for (int m = 0; m < c.shape.rows; m++)
        for (int n = 0; n < c.shape.bytes / 4; n++) {
            float before, sum[2] = {0.f, 0.f};
            memcpy(&before, c.bytes[m] + 4 * n, 4);
            for (int k = 0; k < tile_registers[A].shape.bytes / 2; k++) {
                const float x = number(tile_registers[A].bytes[m] + 2 * k);
                const float y = number(tile_registers[B].bytes[k / 2] + 4 * n + 2 * (k % 2));
                sum[k % 2] = flushed(__builtin_fmaf(x, y, sum[k % 2]));
            }
            const float after = flushed(flushed(before) + flushed(sum[0] + sum[1]));
            memcpy(c.bytes[m] + 4 * n, &after, 4);
        }
}

#endif

}  // namespace
