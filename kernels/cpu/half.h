// fp16 and bf16 as plain integer arithmetic. Everything here has internal linkage: it is compiled at every level.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

inline float from_bf16(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t to_bf16(float f) {  // nearest, ties to even; a NaN stays one
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    float f;
    if (exponent == 0) {  // zero or subnormal: fraction · 2^-24
        f = float(fraction) * 5.9604644775390625e-8f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    }
    memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t to_f16(float f) {  // nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {                                 // subnormal: let the adder round
        float scaled;
        memcpy(&scaled, &magnitude, 4);
        scaled += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &scaled, 4);
        return uint16_t(sign | (rounded - 0x3f000000));
    }
    return uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
}

}  // namespace
