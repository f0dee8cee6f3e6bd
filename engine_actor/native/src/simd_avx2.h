// The registers of simd.h as two of AVX2 each, with FMA and F16C.
#pragma once
#include <immintrin.h>

struct f32 {
    __m256 low, high;
};
struct i32 {
    __m256i low, high;
};
struct pairs {
    __m256i low, high;
};
struct quads {
    __m256i low, high;
};

constexpr int BF16_TILE_ROWS = 2;  // 16 registers hold no more
constexpr int INT8_TILE_ROWS = 2;
constexpr int INT4_TILE_ROWS = 2;
constexpr int ATTENTION_TILE_ROWS = 2;
constexpr int BYTE_SUM_FACTOR = 0;  // times the sum of x, dot_bytes() has to be told at the beginning

inline __m256i lanes_below(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline f32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32 load_first(const float* p, int count) {
    return {_mm256_maskload_ps(p, lanes_below(count)), _mm256_maskload_ps(p + 8, lanes_below(count - 8))};
}
inline void store(float* p, f32 x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline void store_first(float* p, f32 x, int count) {
    _mm256_maskstore_ps(p, lanes_below(count), x.low);
    _mm256_maskstore_ps(p + 8, lanes_below(count - 8), x.high);
}
inline f32 add(f32 a, f32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline f32 sub(f32 a, f32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline f32 mul(f32 a, f32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline f32 div(f32 a, f32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline f32 fma(f32 a, f32 b, f32 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline f32 min(f32 a, f32 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline f32 max(f32 a, f32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline f32 absolute(f32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline f32 round(f32 a) {
    constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, MODE), _mm256_round_ps(a.high, MODE)};
}
// a * 2^whole, whole taken as -126 below it and as 127 above it.
inline __m256 scale_half(__m256 a, __m256 whole) {
    whole = _mm256_min_ps(_mm256_max_ps(whole, _mm256_set1_ps(-126.0f)), _mm256_set1_ps(127.0f));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline f32 scale_exponent(f32 a, f32 whole) { return {scale_half(a.low, whole.low), scale_half(a.high, whole.high)}; }
inline bool any_higher(f32 a, f32 b) {
    const __m256 low = _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), high = _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}
inline float highest(f32 a) {
    const __m256 both = _mm256_max_ps(a.low, a.high);
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
inline float total(f32 a) {
    const __m256 both = _mm256_add_ps(a.low, a.high);
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
// The first `count` lanes of a, `other` in the rest.
inline f32 first_lanes(f32 a, int count, f32 other) {
    return {_mm256_blendv_ps(other.low, a.low, _mm256_castsi256_ps(lanes_below(count))),
            _mm256_blendv_ps(other.high, a.high, _mm256_castsi256_ps(lanes_below(count - 8)))};
}
// value = max(value, x), and column that of the lane, `first` for the first one; of equal ones the lower, whichever came
// before.
inline void keep_higher(float* value, int32_t* column, f32 x, int first) {
    const __m256 parts[2] = {x.low, x.high};
    for (int i = 0; i < 2; i++) {
        const __m256 before = _mm256_loadu_ps(value + 8 * i);
        const __m256 higher = _mm256_cmp_ps(parts[i], before, _CMP_GT_OQ);
        const __m256 equal = _mm256_cmp_ps(parts[i], before, _CMP_EQ_OQ);
        const __m256i columns =
            _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first + 8 * i));
        const __m256i columns_before = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column + 8 * i));
        const __m256i lower = _mm256_cmpgt_epi32(columns_before, columns);
        const __m256 kept = _mm256_or_ps(higher, _mm256_and_ps(equal, _mm256_castsi256_ps(lower)));
        _mm256_storeu_ps(value + 8 * i, _mm256_blendv_ps(before, parts[i], kept));
        _mm256_maskstore_epi32(column + 8 * i, _mm256_castps_si256(kept), columns);
    }
}

inline __m256 widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline f32 load_bf16(const bf16* p) {
    return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// The upper halves, rounded to nearest, ties to even; NaN stays NaN.
inline __m256i narrow(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_srli_epi32(kept, 16);
}
inline void store_bf16(bf16* p, f32 x) {
    const __m256i packed = _mm256_packus_epi32(narrow(x.low), narrow(x.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline f32 load_f16(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

inline __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline pairs load_pairs(const bf16* p) { return {load_half(p), load_half(p + 16)}; }
// The first of every pair, zeros for the second.
inline pairs load_first_of_pairs(const bf16* p) {
    const __m256i first = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(load_half(p), first), _mm256_and_si256(load_half(p + 16), first)};
}
inline pairs set_pair(uint32_t pair) {
    return {_mm256_set1_epi32(static_cast<int>(pair)), _mm256_set1_epi32(static_cast<int>(pair))};
}
inline __m256 first_of(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
inline __m256 second_of(__m256i pair) {
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
// sum + a[0] b[0] + a[1] b[1], lane by lane.
inline __m256 dot_half(__m256 sum, __m256i a, __m256i b) {
    sum = _mm256_fmadd_ps(first_of(a), first_of(b), sum);
    return _mm256_fmadd_ps(second_of(a), second_of(b), sum);
}
inline f32 dot(f32 sum, pairs a, pairs b) { return {dot_half(sum.low, a.low, b.low), dot_half(sum.high, a.high, b.high)}; }

// Two registers of float32 as the first and the second of pairs, rounded to nearest, ties to even.
inline __m256i round_half(__m256 first, __m256 second) {
    return _mm256_or_si256(narrow(first), _mm256_slli_epi32(narrow(second), 16));
}
inline pairs round_pairs(f32 first, f32 second) {
    return {round_half(first.low, second.low), round_half(first.high, second.high)};
}

inline i32 set_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline f32 to_float(i32 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline i32 to_int(f32 a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
inline int32_t total(i32 a) {
    const __m256i both = _mm256_add_epi32(a.low, a.high);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
inline void store_bytes(int8_t* p, i32 a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline quads load_quads(const void* p) { return {load_half(p), load_half(static_cast<const char*>(p) + 32)}; }
inline quads set_quad(uint32_t quad) {
    return {_mm256_set1_epi32(static_cast<int>(quad)), _mm256_set1_epi32(static_cast<int>(quad))};
}
inline quads low_nibbles(quads a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
inline quads high_nibbles(quads a) { return low_nibbles({_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)}); }
// The nibble at a bit of each four bytes.
template <int bit>
inline f32 nibble_at(quads a) {
    const __m256i mask = _mm256_set1_epi32(15);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a.low, bit), mask)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a.high, bit), mask))};
}
// 16 signed bytes.
inline __m256 load_signed_half(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline f32 load_signed(const int8_t* p) { return {load_signed_half(p), load_signed_half(p + 8)}; }
// sum + four products of an unsigned and a signed byte; two of them must not go beyond 16 bits.
inline __m256i dot_four(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    const __m256i twos = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
// sum + four products of a nibble and a signed byte of x.
inline i32 dot_nibbles(i32 sum, quads weight, quads x) {
    return {dot_four(sum.low, weight.low, x.low), dot_four(sum.high, weight.high, x.high)};
}
// sum + four products of a weight, stored + 128, and a signed byte of x. |x| and the weight with the sign of x are at
// most 127 each: their products fit.
inline __m256i dot_signed(__m256i sum, __m256i weight, __m256i x) {
    const __m256i w = _mm256_xor_si256(weight, _mm256_set1_epi8(-128));
    return dot_four(sum, _mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
}
inline i32 dot_bytes(i32 sum, quads weight, quads x) {
    return {dot_signed(sum.low, weight.low, x.low), dot_signed(sum.high, weight.high, x.high)};
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// To the second level cache: a core waits for more lines there than in the first.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
