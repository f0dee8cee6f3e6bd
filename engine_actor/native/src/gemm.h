// Tiles of the matrix product: R rows by a panel of 32 columns, sums in registers; one kernel for each format.
#pragma once
#include <cmath>

#include "kernels.h"

#define UNROLL _Pragma("GCC unroll 16")

// Where the weights lie that a tile fetches on its way: `step` bytes on for each 128 bytes that it multiplies. `far`:
// to the second level cache only.
struct Ahead {
    const char* at;
    int32_t step;
    bool far;
};

struct Product {
    Activations x;
    Weight weight;
    Output output;
    int32_t n, k;
};


inline void keep_best(Best& best, f32 x, int column, int count) {
    if (count <= 0) return;
    store(best.zeros, fma(first_lanes(x, count, zero()), zero(), load(best.zeros)));
    keep_higher(best.value, best.column, first_lanes(x, count, set(-INFINITY)), column);
}

inline __attribute__((always_inline)) void write(const Product& p, int64_t row, int column, f32 low, f32 high) {
    const Output& output = p.output;
    if (output.epilogue == Epilogue::silu_mul || output.epilogue == Epilogue::gelu_mul) {
        const f32 gate = output.epilogue == Epilogue::silu_mul ? silu(low) : gelu_tanh(low);
        store_bf16(static_cast<bf16*>(output.out) + row * (p.n / 2) + column / 2, mul(gate, high));
        return;
    }
    const int left = p.n - column;
    if (output.epilogue == Epilogue::best) {
        Best& best = static_cast<Best*>(output.out)[row];
        keep_best(best, low, column, left);
        keep_best(best, high, column + LANES, left - LANES);
        return;
    }
    float* out = static_cast<float*>(output.out) + row * p.n + column;
    const float* added = output.epilogue == Epilogue::add ? out : output.bias == nullptr ? nullptr : output.bias + column;
    if (added != nullptr) {
        low = add(low, load_first(added, left));
        high = add(high, load_first(added + LANES, left - LANES));
    }
    store_first(out, low, left);
    store_first(out + LANES, high, left - LANES);
}

// Calls the kernel's tile for `rows` rows, 1 to TILE_ROWS.
template <typename Kernel, int R = Kernel::TILE_ROWS>
void call_tile(const Product& p, int row, int rows, int panel, Ahead ahead) {
    if constexpr (R > 0) {
        if (rows != R) return call_tile<Kernel, R - 1>(p, row, rows, panel, ahead);
        return ahead.far ? Kernel::template tile<R, true>(p, row, panel, ahead)
                         : Kernel::template tile<R, false>(p, row, panel, ahead);
    }
}

template <bool far>
void fetch(Ahead& ahead) {
    for (int i = 0; i < 128; i += 64) far ? prefetch_far(ahead.at + i) : prefetch(ahead.at + i);
    ahead.at += ahead.step;
}

struct Bf16Kernel {
    static constexpr int TILE_ROWS = BF16_TILE_ROWS;

    template <int R, bool far>
    static __attribute__((noinline)) void tile(const Product& p, int row, int panel, Ahead ahead) {
        const int64_t k = p.k;
        const bf16* x = p.x.values + row * k;
        const bf16* w = static_cast<const bf16*>(p.weight.data) + panel * k * COLUMNS;
        f32 sum[R][2];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        for (int i = 0; i < k; i += 2, w += 2 * COLUMNS) {
            const pairs low = load_pairs(w), high = load_pairs(w + COLUMNS);
            fetch<far>(ahead);
            UNROLL for (int r = 0; r < R; r++) {
                const pairs pair = set_pair(word_at(x + r * k + i));
                sum[r][0] = dot(sum[r][0], low, pair);
                sum[r][1] = dot(sum[r][1], high, pair);
            }
        }
        UNROLL for (int r = 0; r < R; r++) write(p, row + r, panel * COLUMNS, sum[r][0], sum[r][1]);
    }
};

// The product of Bf16Kernel, to the bit, out of weights in blocks: less to read, more to compute.
struct NibblesKernel {
    static constexpr int TILE_ROWS = BF16_TILE_ROWS;

    template <int R, bool far>
    static __attribute__((noinline)) void tile(const Product& p, int row, int panel, Ahead ahead) {
        const int64_t k = p.k, groups = k / BLOCK;
        const bf16* x = p.x.values + row * k;
        const uint8_t* w = static_cast<const uint8_t*>(p.weight.blocks) + panel * k * COLUMNS / 2;
        const f16* scales = p.weight.block_scales + panel * groups * 2 * COLUMNS;
        f32 sum[R][2];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        for (int g = 0; g < groups; g++, scales += 2 * COLUMNS) {
            const f32 factor[2] = {load_f16(scales), load_f16(scales + LANES)};
            const f32 minimum[2] = {load_f16(scales + COLUMNS), load_f16(scales + COLUMNS + LANES)};
            for (int i = 0; i < BLOCK; i += 8, w += 4 * COLUMNS, x += 8) {
                const quads half[2] = {load_quads(w), load_quads(w + 4 * LANES)};
                fetch<far>(ahead);
                add_pair<R, 0, 8>(sum, half, factor, minimum, x, k);
                add_pair<R, 16, 24>(sum, half, factor, minimum, x + 2, k);
                add_pair<R, 4, 12>(sum, half, factor, minimum, x + 4, k);
                add_pair<R, 20, 28>(sum, half, factor, minimum, x + 6, k);
            }
        }
        UNROLL for (int r = 0; r < R; r++) write(p, row + r, panel * COLUMNS, sum[r][0], sum[r][1]);
    }

    template <int R, int first, int second>
    static inline __attribute__((always_inline)) void add_pair(f32 (&sum)[R][2], const quads (&half)[2],
                                                               const f32 (&factor)[2], const f32 (&minimum)[2],
                                                               const bf16* x, int64_t k) {
        UNROLL for (int h = 0; h < 2; h++) {
            const pairs weights = round_pairs(fma(nibble_at<first>(half[h]), factor[h], minimum[h]),
                                              fma(nibble_at<second>(half[h]), factor[h], minimum[h]));
            UNROLL for (int r = 0; r < R; r++) sum[r][h] = dot(sum[r][h], weights, set_pair(word_at(x + r * k)));
        }
    }
};

// As NibblesKernel, out of blocks of bytes.
struct BytesKernel {
    static constexpr int TILE_ROWS = BF16_TILE_ROWS;

    template <int R, bool far>
    static __attribute__((noinline)) void tile(const Product& p, int row, int panel, Ahead ahead) {
        const int64_t k = p.k, groups = k / BLOCK;
        const bf16* x = p.x.values + row * k;
        const int8_t* w = static_cast<const int8_t*>(p.weight.blocks) + panel * k * COLUMNS;
        const f16* scales = p.weight.block_scales + panel * groups * COLUMNS;
        f32 sum[R][2];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        for (int g = 0; g < groups; g++, scales += COLUMNS) {
            const f32 factor[2] = {load_f16(scales), load_f16(scales + LANES)};
            for (int i = 0; i < BLOCK; i += 2, w += 2 * COLUMNS, x += 2) {
                if (i % 4 == 0) fetch<far>(ahead);
                UNROLL for (int h = 0; h < 2; h++) {
                    const pairs weights = round_pairs(mul(load_signed(w + h * LANES), factor[h]),
                                                      mul(load_signed(w + COLUMNS + h * LANES), factor[h]));
                    UNROLL for (int r = 0; r < R; r++)
                        sum[r][h] = dot(sum[r][h], weights, set_pair(word_at(x + r * k)));
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) write(p, row + r, panel * COLUMNS, sum[r][0], sum[r][1]);
    }
};

struct Int8Kernel {
    static constexpr int TILE_ROWS = INT8_TILE_ROWS;

    template <int R, bool far>
    static __attribute__((noinline)) void tile(const Product& p, int row, int panel, Ahead ahead) {
        const int64_t k = p.k, groups = k / INT8_GROUP;
        const int8_t* x = p.x.bytes + row * k;
        const float* x_scales = p.x.scales + row * groups;
        const int32_t* x_sums = p.x.sums + row * groups;
        const uint8_t* w = static_cast<const uint8_t*>(p.weight.data) + panel * k * COLUMNS;
        f32 sum[R][2];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        for (int g = 0; g < groups; g++, x += INT8_GROUP) {
            i32 part[R][2];
            UNROLL for (int r = 0; r < R; r++) part[r][0] = part[r][1] = set_int(x_sums[r * groups + g]);
            for (int i = 0; i < INT8_GROUP; i += 4, w += 4 * COLUMNS) {
                const quads low = load_quads(w), high = load_quads(w + 4 * LANES);
                fetch<far>(ahead);
                UNROLL for (int r = 0; r < R; r++) {
                    const quads quad = set_quad(word_at(x + r * k + i));
                    part[r][0] = dot_bytes(part[r][0], low, quad);
                    part[r][1] = dot_bytes(part[r][1], high, quad);
                }
            }
            UNROLL for (int r = 0; r < R; r++) {
                const f32 scale = set(x_scales[r * groups + g]);
                sum[r][0] = fma(to_float(part[r][0]), scale, sum[r][0]);
                sum[r][1] = fma(to_float(part[r][1]), scale, sum[r][1]);
            }
        }
        const float* scales = static_cast<const float*>(p.weight.scales) + panel * COLUMNS;
        const f32 low = load(scales), high = load(scales + LANES);
        UNROLL for (int r = 0; r < R; r++)
            write(p, row + r, panel * COLUMNS, mul(sum[r][0], low), mul(sum[r][1], high));
    }
};

struct Int4Kernel {
    static constexpr int TILE_ROWS = INT4_TILE_ROWS;

    template <int R, bool far>
    static __attribute__((noinline)) void tile(const Product& p, int row, int panel, Ahead ahead) {
        const int64_t k = p.k, groups = k / INT4_GROUP;
        const int8_t* x = p.x.bytes + row * k;
        const float* x_scales = p.x.scales + row * groups;
        const int32_t* x_sums = p.x.sums + row * groups;
        const uint8_t* w = static_cast<const uint8_t*>(p.weight.data) + panel * k * COLUMNS / 2;
        const f16* scales = static_cast<const f16*>(p.weight.scales) + panel * groups * 2 * COLUMNS;
        f32 sum[R][2];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        for (int g = 0; g < groups; g++, x += INT4_GROUP, scales += 2 * COLUMNS) {
            i32 part[R][2];
            UNROLL for (int r = 0; r < R; r++) part[r][0] = part[r][1] = set_int(0);
            UNROLL for (int i = 0; i < INT4_GROUP; i += 8, w += 4 * COLUMNS) {
                const quads low = load_quads(w), high = load_quads(w + 4 * LANES);
                fetch<far>(ahead);
                UNROLL for (int r = 0; r < R; r++) {
                    const quads first = set_quad(word_at(x + r * k + i)), second = set_quad(word_at(x + r * k + i + 4));
                    part[r][0] = dot_nibbles(part[r][0], low_nibbles(low), first);
                    part[r][1] = dot_nibbles(part[r][1], low_nibbles(high), first);
                    part[r][0] = dot_nibbles(part[r][0], high_nibbles(low), second);
                    part[r][1] = dot_nibbles(part[r][1], high_nibbles(high), second);
                }
            }
            UNROLL for (int half = 0; half < 2; half++) {
                const f32 factor = load_f16(scales + half * LANES);
                const f32 minimum = load_f16(scales + COLUMNS + half * LANES);
                UNROLL for (int r = 0; r < R; r++) {
                    const float scale = x_scales[r * groups + g];
                    const float offset = scale * static_cast<float>(x_sums[r * groups + g]);
                    sum[r][half] = fma(to_float(part[r][half]), mul(factor, set(scale)), sum[r][half]);
                    sum[r][half] = fma(minimum, set(offset), sum[r][half]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) write(p, row + r, panel * COLUMNS, sum[r][0], sum[r][1]);
    }
};
