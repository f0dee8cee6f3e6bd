// Paged causal attention with an online softmax (Milakov and Gimelshein, 2018) over blocks of four pages.
//
// The query rows of a tile (tokens x heads that share a KV head) go over the same keys. Blocks begin at multiples
// of 64 keys for every row, and a block beyond a row's last key changes nothing in it, so its result does not
// depend on the tile. The same holds for blocks before a row's sliding window.
#include <algorithm>
#include <cmath>

#include "kernels.h"

#define UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int TILE_ROWS = ATTENTION_TILE_ROWS;
constexpr int BLOCK_PAGES = 4;
constexpr int BLOCK_KEYS = BLOCK_PAGES * PAGE_SIZE;
constexpr float LOWEST = -1e30f;  // below every score, and its difference from itself is 0

struct Tile {
    const bf16* q[TILE_ROWS];
    bf16* out[TILE_ROWS];
    int keys[TILE_ROWS];        // this row sees the keys below
    int first_keys[TILE_ROWS];  // and from here on
    int last_keys;              // those of the last row
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

// Fetches what lies at the pages from key `first` on. Pages are anywhere, so hardware does not foresee it.
void fetch_block(const Tile& t, const bf16* pool, int first) {
    const int end = std::min(first + BLOCK_KEYS, t.last_keys), bytes = t.dim * PAGE_SIZE * 2;
    for (int key = first; key < end; key += PAGE_SIZE) {
        const bf16* at = pool + t.pages[key / PAGE_SIZE] * t.page_stride + t.head_offset;
        for (int i = 0; i < bytes; i += 64) prefetch(reinterpret_cast<const char*>(at) + i);
    }
}

// Scores of one block, and from them its probabilities; rescales what came before.
template <int R>
void block_scores(const Tile& t, int first, int pages, State<R>& state) {
    const bf16* k[BLOCK_PAGES];
    for (int i = 0; i < BLOCK_PAGES; i++)
        k[i] = t.key_pool + t.pages[first / PAGE_SIZE + std::min(i, pages - 1)] * t.page_stride + t.head_offset;
    f32 s[R][BLOCK_PAGES];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < BLOCK_PAGES; i++) s[r][i] = zero();
    for (int d = 0; d < t.dim / 2; d++) {
        pairs key[BLOCK_PAGES];
        UNROLL for (int i = 0; i < BLOCK_PAGES; i++) key[i] = load_pairs(k[i] + d * 2 * PAGE_SIZE);
        UNROLL for (int r = 0; r < R; r++) {
            const pairs q = set_pair(word_at(t.q[r] + 2 * d));
            UNROLL for (int i = 0; i < BLOCK_PAGES; i++) s[r][i] = dot(s[r][i], key[i], q);
        }
    }
    const f32 nothing = set(-INFINITY), scale = set(t.scale);
    UNROLL for (int r = 0; r < R; r++) {
        const int seen = t.keys[r] - first, unseen = t.first_keys[r] - first;
        f32 block_highest = nothing;
        UNROLL for (int i = 0; i < BLOCK_PAGES; i++) {
            s[r][i] = first_lanes(mul(s[r][i], scale), seen - i * PAGE_SIZE, nothing);
            s[r][i] = first_lanes(nothing, unseen - i * PAGE_SIZE, s[r][i]);
            block_highest = max(block_highest, s[r][i]);
        }
        const float now_highest = std::max(state.highest[r], highest(block_highest));
        const float kept = std::exp2(state.highest[r] - now_highest);
        state.highest[r] = now_highest;
        const f32 shift = set(now_highest);
        f32 sum = zero();
        UNROLL for (int i = 0; i < BLOCK_PAGES; i++) {
            f32 p = first_lanes(exp2(sub(s[r][i], shift)), seen - i * PAGE_SIZE, zero());
            p = first_lanes(zero(), unseen - i * PAGE_SIZE, p);
            sum = add(sum, p);
            store_bf16(state.p[r] + i * PAGE_SIZE, p);
        }
        state.sum[r] = state.sum[r] * kept + total(sum);
        if (kept != 1.0f) {
            const f32 factor = set(kept);
            for (int d = 0; d < t.dim; d += LANES) store(state.out[r] + d, mul(load(state.out[r] + d), factor));
        }
    }
}

// Adds the block's values, weighted, to V registers of dims from d on.
template <int R, int V>
void block_values(const Tile& t, int first, int d, State<R>& state) {
    f32 o[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++) o[r][j] = load(state.out[r] + d + j * LANES);
    const int count = std::min(BLOCK_KEYS, t.last_keys - first);
    const auto add_pair = [&](int i, auto load_values) {
        const int64_t page = t.pages[first / PAGE_SIZE + i / (PAGE_SIZE / 2)];
        const bf16* v = t.value_pool + page * t.page_stride + t.head_offset;
        v += (i % (PAGE_SIZE / 2) * t.dim + d) * 2;
        pairs value[V];
        UNROLL for (int j = 0; j < V; j++) value[j] = load_values(v + j * 2 * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            const pairs p = set_pair(word_at(state.p[r] + 2 * i));
            UNROLL for (int j = 0; j < V; j++) o[r][j] = dot(o[r][j], value[j], p);
        }
    };
    for (int i = 0; i < count / 2; i++) add_pair(i, load_pairs);
    // The second key of the last pair may be a former owner's, and 0 * NaN is NaN.
    if (count % 2) add_pair(count / 2, load_first_of_pairs);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++) store(state.out[r] + d + j * LANES, o[r][j]);
}

template <int R>
void attend(const Tile& t) {
    State<R> state;
    for (int r = 0; r < R; r++) {
        state.highest[r] = LOWEST;
        state.sum[r] = 0.0f;
        for (int d = 0; d < t.dim; d += LANES) store(state.out[r] + d, zero());
    }
    for (int first = t.first_keys[0] / BLOCK_KEYS * BLOCK_KEYS; first < t.last_keys; first += BLOCK_KEYS) {
        const int pages = (std::min(BLOCK_KEYS, t.last_keys - first) + PAGE_SIZE - 1) / PAGE_SIZE;
        fetch_block(t, t.value_pool, first);
        block_scores<R>(t, first, pages, state);
        fetch_block(t, t.key_pool, first + BLOCK_KEYS);
        int d = 0;
        for (; d + 4 * LANES <= t.dim; d += 4 * LANES) block_values<R, 4>(t, first, d, state);
        for (; d < t.dim; d += LANES) block_values<R, 1>(t, first, d, state);
    }
    for (int r = 0; r < R; r++) {
        const f32 inverse = set(1.0f / state.sum[r]);
        for (int d = 0; d < t.dim; d += LANES) store_bf16(t.out[r] + d, mul(load(state.out[r] + d), inverse));
    }
}

template <int R = TILE_ROWS>
void attend_rows(const Tile& t, int rows) {
    if constexpr (R > 0) {
        if (rows == R) return attend<R>(t);
        attend_rows<R - 1>(t, rows);
    }
}

}  // namespace

int attention_tasks(const Step& step, AttentionTask* tasks) {
    int count = 0;
    for (int row = 0; row < step.num_rows; row++)
        for (int t = step.token_indptr[row]; t < step.token_indptr[row + 1]; t += TASK_TOKENS) tasks[count++] = {row, t};
    return count;
}

void attention(Team& team, const Step& step, const AttentionTask* tasks, int count, const Heads& heads, int window,
               float scale, const bf16* q, const Pages& pages, bf16* out) {
    const int kv_heads = heads.kv_heads, dim = heads.head_dim, group = heads.heads / kv_heads;
    const auto one = [&](const AttentionTask& task, int kv_head) {
        const int begin = step.token_indptr[task.row];
        const int end = std::min(task.first_token + TASK_TOKENS, step.token_indptr[task.row + 1]);
        Tile tile;
        tile.pages = step.page_indices + step.page_indptr[task.row];
        tile.key_pool = pages.keys;
        tile.value_pool = pages.values;
        tile.page_stride = static_cast<int64_t>(kv_heads) * dim * PAGE_SIZE;
        tile.head_offset = static_cast<int64_t>(kv_head) * dim * PAGE_SIZE;
        tile.dim = dim;
        tile.scale = scale * LOG2_E;
        const int queries = (end - task.first_token) * group;
        for (int done = 0; done < queries;) {
            const int size = std::min(TILE_ROWS, queries - done);
            for (int r = 0; r < size; r++) {
                const int token = task.first_token + (done + r) / group, head = kv_head * group + (done + r) % group;
                const int64_t at = (static_cast<int64_t>(token) * heads.heads + head) * dim;
                tile.q[r] = q + at;
                tile.out[r] = out + at;
                tile.keys[r] = step.start[task.row] + token - begin + 1;
                tile.first_keys[r] = window > 0 ? std::max(0, tile.keys[r] - window) : 0;
            }
            tile.last_keys = tile.keys[size - 1];
            attend_rows(tile, size);
            done += size;
        }
    };
    team.share(count * kv_heads, 4, [&](int first, int last) {
        for (int i = first; i < last; i++) one(tasks[i / kv_heads], i % kv_heads);
    });
}
