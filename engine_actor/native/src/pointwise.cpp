// What is done row by row: norm, quantisation, rotary embedding and the write of new keys and values.
#include <cmath>

#include "kernels.h"

namespace {

f32 rms_scale(const float* x, float eps, int n) {
    f32 squares = zero();
    for (int i = 0; i < n; i += LANES) {
        const f32 v = load(x + i);
        squares = fma(v, v, squares);
    }
    return set(1.0f / std::sqrt(total(squares) / static_cast<float>(n) + eps));
}

}  // namespace

void rms_norm_row(const float* x, const float* weight, float eps, int n, bf16* out) {
    const f32 scale = rms_scale(x, eps, n);
    for (int i = 0; i < n; i += LANES) store_bf16(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

void add_rms_norm_row(const float* x, const float* weight, float eps, int n, float* out) {
    const f32 scale = rms_scale(x, eps, n);
    for (int i = 0; i < n; i += LANES)
        store(out + i, add(load(out + i), mul(mul(load(x + i), scale), load(weight + i))));
}

void quantise_row(const bf16* x, int k, Format format, int8_t* bytes, float* scales, int32_t* sums) {
    const int group = group_size(format);
    for (int g = 0; g < k / group; g++, x += group, bytes += group) {
        f32 most = zero();
        for (int i = 0; i < group; i += LANES) most = max(most, absolute(load_bf16(x + i)));
        const float highest_value = highest(most);
        // NaN and infinity stay visible in the scale; zeros need no division by zero.
        scales[g] = highest_value / 127.0f;
        const f32 inverse = set(highest_value > 0.0f ? 127.0f / highest_value : 0.0f);
        int32_t sum = 0;
        for (int i = 0; i < group; i += LANES) {
            const i32 whole = to_int(mul(load_bf16(x + i), inverse));
            store_bytes(bytes + i, whole);
            sum += total(whole);
        }
        sums[g] = sum * sum_factor(format);
    }
}

void rope_angles(int position, const float* frequencies, int half, float* cos, float* sin) {
    // One angle at a time: a vector library may round a lane otherwise than a remainder.
    for (int i = 0; i < half; i++) {
        const float angle = static_cast<float>(position) * frequencies[i];
        cos[i] = std::cos(angle);
        sin[i] = std::sin(angle);
    }
}

namespace {

// One head [2 half], through its norm if it has one, rotated.
void rotate(const float* x, const float* norm, float eps, const float* cos, const float* sin, int half, bf16* out) {
    alignas(64) float normed[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
    if (norm != nullptr) {
        const f32 scale = rms_scale(x, eps, 2 * half);
        for (int i = 0; i < 2 * half; i += LANES) store(normed + i, mul(mul(load(x + i), scale), load(norm + i)));
        x = normed;
    }
    for (int i = 0; i < half; i++) {
        rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
        rotated[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    for (int i = 0; i < 2 * half; i += LANES) store_bf16(out + i, load(rotated + i));
}

}  // namespace

void rope_store(const Heads& heads, const HeadNorms& norms, const float* qkv, const float* cos, const float* sin,
                int slot, bf16* q, const Pages& pages) {
    const int dim = heads.head_dim, half = dim / 2;
    for (int h = 0; h < heads.heads; h++) rotate(qkv + h * dim, norms.q, norms.eps, cos, sin, half, q + h * dim);
    const int64_t page = slot / PAGE_SIZE;
    const int offset = slot % PAGE_SIZE;
    for (int h = 0; h < heads.kv_heads; h++) {
        alignas(64) bf16 row[MAX_HEAD_DIM];
        const int64_t at = (page * heads.kv_heads + h) * dim * PAGE_SIZE;
        rotate(qkv + (heads.heads + h) * dim, norms.k, norms.eps, cos, sin, half, row);
        for (int i = 0; i < half; i++)
            __builtin_memcpy(pages.keys + at + (i * PAGE_SIZE + offset) * 2, row + 2 * i, 2 * sizeof(bf16));
        const float* v = qkv + (heads.heads + heads.kv_heads + h) * dim;
        for (int i = 0; i < dim; i += LANES) store_bf16(row + i, load(v + i));
        bf16* out = pages.values + at + (offset / 2) * dim * 2 + offset % 2;
        for (int i = 0; i < dim; i++) out[2 * i] = row[i];
    }
}
