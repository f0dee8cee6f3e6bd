// The registers of simd.h in AVX-512 with BF16 and VNNI.
#pragma once
#include <immintrin.h>

using f32 = __m512;
using i32 = __m512i;
using pairs = __m512bh;
using quads = __m512i;

constexpr int BF16_TILE_ROWS = 8;  // by 32 columns: 16 accumulators; more do not stay in registers
constexpr int INT8_TILE_ROWS = 6;  // 12 of integers and 12 of floats
constexpr int INT4_TILE_ROWS = 4;
constexpr int ATTENTION_TILE_ROWS = 6;
constexpr int BYTE_SUM_FACTOR = -128;  // times the sum of x, dot_bytes() has to be told at the beginning

inline __mmask16 below(int count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

inline f32 zero() { return _mm512_setzero_ps(); }
inline f32 set(float x) { return _mm512_set1_ps(x); }
inline f32 load(const float* p) { return _mm512_loadu_ps(p); }
inline f32 load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(below(count), p); }
inline void store(float* p, f32 x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, f32 x, int count) { _mm512_mask_storeu_ps(p, below(count), x); }
inline f32 add(f32 a, f32 b) { return _mm512_add_ps(a, b); }
inline f32 sub(f32 a, f32 b) { return _mm512_sub_ps(a, b); }
inline f32 mul(f32 a, f32 b) { return _mm512_mul_ps(a, b); }
inline f32 div(f32 a, f32 b) { return _mm512_div_ps(a, b); }
inline f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
inline f32 min(f32 a, f32 b) { return _mm512_min_ps(a, b); }
inline f32 max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
inline f32 absolute(f32 a) { return _mm512_abs_ps(a); }
inline f32 round(f32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline f32 scale_exponent(f32 a, f32 whole) { return _mm512_scalef_ps(a, whole); }
inline bool any_higher(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline float highest(f32 a) { return _mm512_reduce_max_ps(a); }
inline float total(f32 a) { return _mm512_reduce_add_ps(a); }
// The first `count` lanes of a, `other` in the rest.
inline f32 first_lanes(f32 a, int count, f32 other) { return _mm512_mask_mov_ps(other, below(count), a); }

// value = max(value, x), and column that of the lane, `first` for the first one; of equal ones the lower, whichever came
// before.
inline void keep_higher(float* value, int32_t* column, f32 x, int first) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i columns = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    const __m512 before = load(value);
    const __mmask16 equal = _mm512_cmp_ps_mask(x, before, _CMP_EQ_OQ);
    const __mmask16 lower = _mm512_mask_cmplt_epi32_mask(equal, columns, _mm512_loadu_si512(column));
    const __mmask16 kept = _mm512_cmp_ps_mask(x, before, _CMP_GT_OQ) | lower;
    _mm512_mask_storeu_ps(value, kept, x);
    _mm512_mask_storeu_epi32(column, kept, columns);
}

inline f32 load_bf16(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store_bf16(bf16* p, f32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
inline f32 load_f16(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline pairs load_pairs(const bf16* p) { return (pairs)_mm512_loadu_si512(p); }
// The first of every pair, zeros for the second.
inline pairs load_first_of_pairs(const bf16* p) { return (pairs)_mm512_maskz_loadu_epi16(0x55555555u, p); }
inline pairs set_pair(uint32_t pair) { return (pairs)_mm512_set1_epi32(static_cast<int>(pair)); }
// sum + a[0] b[0] + a[1] b[1], lane by lane.
inline f32 dot(f32 sum, pairs a, pairs b) { return _mm512_dpbf16_ps(sum, a, b); }

// Two registers of float32 as the first and the second of pairs, rounded to nearest, ties to even.
inline pairs round_pairs(f32 first, f32 second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (pairs)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

inline i32 set_int(int32_t x) { return _mm512_set1_epi32(x); }
inline f32 to_float(i32 a) { return _mm512_cvtepi32_ps(a); }
inline i32 to_int(f32 a) { return _mm512_cvtps_epi32(a); }
inline int32_t total(i32 a) { return _mm512_reduce_add_epi32(a); }
inline void store_bytes(int8_t* p, i32 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
inline quads load_quads(const void* p) { return _mm512_loadu_si512(p); }
inline quads set_quad(uint32_t quad) { return _mm512_set1_epi32(static_cast<int>(quad)); }
inline quads low_nibbles(quads a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline quads high_nibbles(quads a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
// The nibble at a bit of each four bytes.
template <int bit>
inline f32 nibble_at(quads a) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(a, bit), values);  // looks at the last four bits alone
}
// 16 signed bytes.
inline f32 load_signed(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// sum + four products of a nibble and a signed byte of x. The intrinsic makes gcc 12 copy every sum twice.
inline i32 dot_nibbles(i32 sum, quads weight, quads x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
    return sum;
}
// sum + four products of a weight, stored + 128, and a signed byte of x.
inline i32 dot_bytes(i32 sum, quads weight, quads x) { return dot_nibbles(sum, weight, x); }

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// To the second level cache: a core waits for more lines there than in the first.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
