// Norm, rotary embedding and the write of new keys and values.
#include <cmath>

#include "kernels.h"

void evenhand_rms_norm(const float* x, const int32_t* pick, const float* weight, float eps, int32_t rows,
                       int32_t n, bf16* out, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 4)
    for (int row = 0; row < rows; row++) {
        const float* in = x + static_cast<int64_t>(pick == nullptr ? row : pick[row]) * n;
        __m512 squares = _mm512_setzero_ps();
        for (int i = 0; i < n; i += LANES) {
            const __m512 v = _mm512_loadu_ps(in + i);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(n);
        const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
        for (int i = 0; i < n; i += LANES) {
            const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(in + i), scale);
            store_bf16(out + static_cast<int64_t>(row) * n + i, _mm512_mul_ps(v, _mm512_loadu_ps(weight + i)));
        }
    }
}

void evenhand_rope_angles(const Step* step, const float* frequencies, int32_t half, float* cos, float* sin,
                          int32_t threads) {
    // One angle at a time: a vector library may round a lane otherwise than a remainder.
#pragma omp parallel for schedule(static) num_threads(threads) if (step->num_tokens > 4)
    for (int t = 0; t < step->num_tokens; t++)
        for (int i = 0; i < half; i++) {
            const float angle = static_cast<float>(step->positions[t]) * frequencies[i];
            cos[static_cast<int64_t>(t) * half + i] = std::cos(angle);
            sin[static_cast<int64_t>(t) * half + i] = std::sin(angle);
        }
}

namespace {

constexpr int MAX_HEAD_DIM = 256;

void rotate(const float* x, const float* cos, const float* sin, int half, bf16* out) {
    alignas(64) float rotated[MAX_HEAD_DIM];
    for (int i = 0; i < half; i++) {
        rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
        rotated[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    for (int i = 0; i < 2 * half; i += LANES) store_bf16(out + i, _mm512_load_ps(rotated + i));
}

}  // namespace

void evenhand_rope_store(const Step* step, const Heads* shape, const float* qkv, const float* cos,
                         const float* sin, bf16* q, bf16* keys, bf16* values, int32_t threads) {
    const int heads = shape->heads, kv_heads = shape->kv_heads, dim = shape->head_dim, half = dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (step->num_tokens > 4)
    for (int t = 0; t < step->num_tokens; t++) {
        const float* x = qkv + static_cast<int64_t>(t) * (heads + 2 * kv_heads) * dim;
        const float* c = cos + static_cast<int64_t>(t) * half;
        const float* s = sin + static_cast<int64_t>(t) * half;
        for (int h = 0; h < heads; h++)
            rotate(x + h * dim, c, s, half, q + (static_cast<int64_t>(t) * heads + h) * dim);
        const int64_t page = step->slots[t] / PAGE_SIZE;
        const int offset = step->slots[t] % PAGE_SIZE;
        for (int h = 0; h < kv_heads; h++) {
            alignas(64) bf16 row[MAX_HEAD_DIM];
            const int64_t at = (page * kv_heads + h) * dim * PAGE_SIZE;
            rotate(x + (heads + h) * dim, c, s, half, row);
            for (int i = 0; i < half; i++) {
                keys[at + (i * PAGE_SIZE + offset) * 2] = row[2 * i];
                keys[at + (i * PAGE_SIZE + offset) * 2 + 1] = row[2 * i + 1];
            }
            const float* v = x + (heads + kv_heads + h) * dim;
            for (int i = 0; i < dim; i += LANES) store_bf16(row + i, _mm512_loadu_ps(v + i));
            bf16* out = values + at + (offset / 2) * dim * 2 + offset % 2;
            for (int i = 0; i < dim; i++) out[2 * i] = row[i];
        }
    }
}
