// bfloat16 and exponentials on AVX-512 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>

using bf16 = uint16_t;  // the bits of one bfloat16

constexpr int LANES = 16;      // float32 values of one register
constexpr int PAGE_SIZE = 16;  // tokens of one KV page
constexpr float LOG2_E = 1.44269504f;

static inline __m512 load_bf16(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline void store_bf16(bf16* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}

static inline __m512bh load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

static inline __m512bh broadcast_pair(uint32_t pair) { return (__m512bh)_mm512_set1_epi32((int)pair); }

// 2^x, relative error below 2e-7; x is clamped to [-126, 126].
static inline __m512 exp2_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(126.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 t = _mm512_sub_ps(x, whole);
    // Taylor series of 2^t for |t| <= 1/2: (ln 2)^k / k!
    __m512 p = _mm512_set1_ps(1.54035304e-4f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.33335581e-3f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

static inline __m512 silu_ps(__m512 x) {
    const __m512 e = exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}
