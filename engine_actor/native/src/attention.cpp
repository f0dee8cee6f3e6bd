// Paged causal attention with an online softmax (Milakov and Gimelshein, 2018) over blocks of four pages.
//
// The query rows of a tile (tokens x heads that share a KV head) go over the same keys. Blocks begin at multiples
// of 64 keys for every row, and a block beyond a row's last key changes nothing in it, so its result does not
// depend on the tile.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace {

constexpr int MAX_HEAD_DIM = 256;
constexpr int TILE_ROWS = 6;     // 6 x 4 sums, 4 keys and a query fill the registers
constexpr int BLOCK_PAGES = 4;
constexpr int BLOCK_KEYS = BLOCK_PAGES * PAGE_SIZE;
constexpr int TASK_TOKENS = 16;  // of one task

struct Tile {
    const bf16* q[TILE_ROWS];
    bf16* out[TILE_ROWS];
    int keys[TILE_ROWS];  // how many this row sees
    int last_keys;        // how many the last row sees
    const int32_t* pages;
    const bf16* key_pool;
    const bf16* value_pool;
    int64_t page_stride, head_offset;
    int dim;
    float scale;  // of scores, for powers of two
};

template <int R>
struct State {
    alignas(64) float out[R][MAX_HEAD_DIM];
    alignas(64) bf16 p[R][BLOCK_KEYS];  // probabilities of the block, not normalised
    float highest[R], sum[R];
};

// Scores of one block, and from them its probabilities; rescales what came before.
template <int R>
void block_scores(const Tile& t, int first, int pages, State<R>& state) {
    const bf16* k[BLOCK_PAGES];
    for (int i = 0; i < BLOCK_PAGES; i++)
        k[i] = t.key_pool + t.pages[first / PAGE_SIZE + std::min(i, pages - 1)] * t.page_stride + t.head_offset;
    __m512 s[R][BLOCK_PAGES];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) s[r][0] = s[r][1] = s[r][2] = s[r][3] = _mm512_setzero_ps();
    for (int i = 0; i < t.dim / 2; i++) {
        const int at = i * 2 * PAGE_SIZE;
        const __m512bh k0 = load_pairs(k[0] + at), k1 = load_pairs(k[1] + at);
        const __m512bh k2 = load_pairs(k[2] + at), k3 = load_pairs(k[3] + at);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m512bh q = broadcast_pair(reinterpret_cast<const uint32_t*>(t.q[r])[i]);
            s[r][0] = _mm512_dpbf16_ps(s[r][0], k0, q);
            s[r][1] = _mm512_dpbf16_ps(s[r][1], k1, q);
            s[r][2] = _mm512_dpbf16_ps(s[r][2], k2, q);
            s[r][3] = _mm512_dpbf16_ps(s[r][3], k3, q);
        }
    }
    const __m512 nothing = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(t.scale);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        __mmask16 seen[BLOCK_PAGES];
        __m512 block_highest = nothing;
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_PAGES; i++) {
            const int count = std::min(std::max(t.keys[r] - first - i * PAGE_SIZE, 0), PAGE_SIZE);
            seen[i] = static_cast<__mmask16>((1u << count) - 1);
            s[r][i] = _mm512_mask_mul_ps(nothing, seen[i], s[r][i], scale);
            block_highest = _mm512_max_ps(block_highest, s[r][i]);
        }
        const float highest = std::max(state.highest[r], _mm512_reduce_max_ps(block_highest));
        const float kept = std::exp2(state.highest[r] - highest);
        state.highest[r] = highest;
        const __m512 shift = _mm512_set1_ps(highest);
        __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_PAGES; i++) {
            const __m512 p = _mm512_maskz_mov_ps(seen[i], exp2_ps(_mm512_sub_ps(s[r][i], shift)));
            total = _mm512_add_ps(total, p);
            store_bf16(state.p[r] + i * PAGE_SIZE, p);
        }
        state.sum[r] = state.sum[r] * kept + _mm512_reduce_add_ps(total);
        if (kept != 1.0f) {
            const __m512 factor = _mm512_set1_ps(kept);
            for (int d = 0; d < t.dim; d += LANES)
                _mm512_store_ps(state.out[r] + d, _mm512_mul_ps(_mm512_load_ps(state.out[r] + d), factor));
        }
    }
}

// Adds the block's values, weighted, to V registers of dims from d on.
template <int R, int V>
void block_values(const Tile& t, int first, int d, State<R>& state) {
    __m512 o[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) o[r][j] = _mm512_load_ps(state.out[r] + d + j * LANES);
    const int count = std::min(BLOCK_KEYS, t.last_keys - first);
    for (int i = 0; i < (count + 1) / 2; i++) {
        const int64_t page = t.pages[first / PAGE_SIZE + i / (PAGE_SIZE / 2)];
        const bf16* v = t.value_pool + page * t.page_stride + t.head_offset;
        v += (i % (PAGE_SIZE / 2) * t.dim + d) * 2;
        // The second key of the last pair may be a former owner's, and 0 * NaN is NaN.
        const __mmask32 seen = 2 * i + 1 < count ? 0xffffffffu : 0x55555555u;
        __m512bh value[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) value[j] = (__m512bh)_mm512_maskz_loadu_epi16(seen, v + j * 2 * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m512bh p = broadcast_pair(reinterpret_cast<const uint32_t*>(state.p[r])[i]);
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) o[r][j] = _mm512_dpbf16_ps(o[r][j], value[j], p);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) _mm512_store_ps(state.out[r] + d + j * LANES, o[r][j]);
}

template <int R>
void attend(const Tile& t) {
    State<R> state;
    for (int r = 0; r < R; r++) {
        state.highest[r] = -INFINITY;
        state.sum[r] = 0.0f;
        for (int d = 0; d < t.dim; d += LANES) _mm512_store_ps(state.out[r] + d, _mm512_setzero_ps());
    }
    for (int first = 0; first < t.last_keys; first += BLOCK_KEYS) {
        const int pages = (std::min(BLOCK_KEYS, t.last_keys - first) + PAGE_SIZE - 1) / PAGE_SIZE;
        block_scores<R>(t, first, pages, state);
        int d = 0;
        for (; d + 4 * LANES <= t.dim; d += 4 * LANES) block_values<R, 4>(t, first, d, state);
        for (; d < t.dim; d += LANES) block_values<R, 1>(t, first, d, state);
    }
    for (int r = 0; r < R; r++) {
        const __m512 inverse = _mm512_set1_ps(1.0f / state.sum[r]);
        for (int d = 0; d < t.dim; d += LANES)
            store_bf16(t.out[r] + d, _mm512_mul_ps(_mm512_load_ps(state.out[r] + d), inverse));
    }
}

using Attend = void (*)(const Tile&);
constexpr Attend ATTEND[] = {nullptr,   attend<1>, attend<2>, attend<3>,
                             attend<4>, attend<5>, attend<6>};

}  // namespace

void evenhand_attention(const Step* step, const Heads* shape, const bf16* q, const bf16* keys,
                        const bf16* values, int32_t* tasks, bf16* out, int32_t threads) {
    int count = 0;
    for (int row = 0; row < step->num_rows; row++)
        for (int t = step->token_indptr[row]; t < step->token_indptr[row + 1]; t += TASK_TOKENS, count++) {
            tasks[2 * count] = row;
            tasks[2 * count + 1] = t;
        }
    const int heads = shape->heads, kv_heads = shape->kv_heads, dim = shape->head_dim, group = heads / kv_heads;
    const float scale = LOG2_E / std::sqrt(static_cast<float>(dim));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (count * kv_heads > 3)
    for (int i = 0; i < count * kv_heads; i++) {
        const int row = tasks[i / kv_heads * 2], first = tasks[i / kv_heads * 2 + 1], kv_head = i % kv_heads;
        const int begin = step->token_indptr[row];
        const int end = std::min(first + TASK_TOKENS, step->token_indptr[row + 1]);
        Tile tile;
        tile.pages = step->page_indices + step->page_indptr[row];
        tile.key_pool = keys;
        tile.value_pool = values;
        tile.page_stride = static_cast<int64_t>(kv_heads) * dim * PAGE_SIZE;
        tile.head_offset = static_cast<int64_t>(kv_head) * dim * PAGE_SIZE;
        tile.dim = dim;
        tile.scale = scale;
        const int queries = (end - first) * group;
        for (int done = 0; done < queries;) {
            const int size = std::min(TILE_ROWS, queries - done);
            for (int r = 0; r < size; r++) {
                const int token = first + (done + r) / group, head = kv_head * group + (done + r) % group;
                const int64_t at = (static_cast<int64_t>(token) * heads + head) * dim;
                tile.q[r] = q + at;
                tile.out[r] = out + at;
                tile.keys[r] = step->start[row] + token - begin + 1;
            }
            tile.last_keys = tile.keys[size - 1];
            ATTEND[size](tile);
            done += size;
        }
    }
}
