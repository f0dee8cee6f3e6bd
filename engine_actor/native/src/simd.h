// Registers of 16 lanes, for the instruction set that the file is compiled for.
//
// f32: 16 float32. i32: 16 int32. pairs: 16 x 2 bfloat16. quads: 16 x 4 bytes.
#pragma once
#include <cstdint>

using bf16 = uint16_t;  // the bits of one bfloat16
using f16 = uint16_t;   // the bits of one float16

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

// Four bytes from an address that need not be aligned.
inline uint32_t word_at(const void* p) {
    uint32_t word;
    __builtin_memcpy(&word, p, 4);
    return word;
}

// 2^x of a finite x, relative error below 3e-6: what comes of it is rounded to bfloat16, whose half step is a thousand
// times that.
inline f32 exp2(f32 x) {
    const f32 whole = round(x), t = sub(x, whole);
    // Minimax polynomial of 2^t for |t| <= 1/2, with 1 at 0.
    f32 p = set(9.58285317e-3f);
    p = fma(p, t, set(5.59064250e-2f));
    p = fma(p, t, set(2.40240986e-1f));
    p = fma(p, t, set(6.93124193e-1f));
    p = fma(p, t, set(1.0f));
    return scale_exponent(p, whole);
}

inline f32 silu(f32 x) { return div(x, add(set(1.0f), exp2(mul(x, set(-LOG2_E))))); }

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + e^(-2 u)).
inline f32 gelu_tanh(f32 x) {
    const f32 inner = fma(mul(mul(x, x), x), set(0.044715f), x);
    const f32 power = mul(inner, set(-2.0f * 0.7978845608f * LOG2_E));  // infinite for a large x, as its cube is
    return div(x, add(set(1.0f), exp2(min(max(power, set(-126.0f)), set(126.0f)))));
}
