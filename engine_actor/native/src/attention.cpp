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
constexpr int MOST_TASKS = 6;  // that a thread takes at a time
constexpr float LOWEST = -1e30f;  // below every score
constexpr float SLACK = 8.0f;     // powers of two by which a probability may grow beyond 1 before all are rescaled

// Keys and values of one KV head of a row: of the tokens first_key .. last_key, beginning at a block.
struct Source {
    const int32_t* pages;
    int64_t head_offset;
    int first_key, last_key;
};

// Where the pages of a block lie in a pool; a last block's missing pages are its last one again.
struct Block {
    const bf16* at[BLOCK_PAGES];

    Block(const bf16* pool, int64_t page_stride, const Source& source, int first) {
        const int last = (source.last_key - 1) / PAGE_SIZE;
        for (int i = 0; i < BLOCK_PAGES; i++)
            at[i] = pool + source.pages[std::min(first / PAGE_SIZE + i, last)] * page_stride + source.head_offset;
    }

    // Fetches the pages from number `from` on.
    void fetch(int from, int dim) const {
        for (int i = from; i < BLOCK_PAGES; i++)
            for (int d = 0; d < dim; d += 2) prefetch_far(at[i] + d * PAGE_SIZE);
    }
};

struct Tile {
    int rows;
    const bf16* q[TILE_ROWS];
    bf16* out[TILE_ROWS];
    int keys[TILE_ROWS];        // this row sees the keys below
    int first_keys[TILE_ROWS];  // and from here on
    Source source;
    Source next;  // what the tile after this one reads: fetched on the way, since hardware does not foresee pages
    Pages pools;
    int64_t page_stride;
    int dim;
    float scale;  // of scores, for powers of two
};

template <int R>
struct State {
    alignas(64) float out[R][MAX_HEAD_DIM];
    alignas(64) uint32_t q[MAX_HEAD_DIM / 2][R];  // pairs of all rows side by side: one address instead of R
    alignas(64) float sum[R][LANES];
    alignas(64) bf16 p[R][BLOCK_KEYS];  // probabilities of the block, not normalised
    float highest[R];                   // what they are relative to: no score is more than SLACK above it
};

template <int R>
void rescale(State<R>& state, int r, int dim, float now_highest) {
    const f32 factor = set(std::exp2(state.highest[r] - now_highest));
    state.highest[r] = now_highest;
    store(state.sum[r], mul(load(state.sum[r]), factor));
    for (int d = 0; d < dim; d += LANES) store(state.out[r] + d, mul(load(state.out[r] + d), factor));
}

// Scores of a block's first P pages, and from them its probabilities; not `masked` where every row sees all of them.
template <int R, int P, bool masked>
void block_scores(const Tile& t, int first, const Block& keys, const Block& next, State<R>& state) {
    f32 s[R][P];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < P; i++) s[r][i] = zero();
    for (int d = 0; d < t.dim; d += 2) {
        pairs key[P];
        UNROLL for (int i = 0; i < P; i++) {
            key[i] = load_pairs(keys.at[i] + d * PAGE_SIZE);
            prefetch_far(next.at[i] + d * PAGE_SIZE);
        }
        UNROLL for (int r = 0; r < R; r++) {
            const pairs q = set_pair(state.q[d / 2][r]);
            UNROLL for (int i = 0; i < P; i++) s[r][i] = dot(s[r][i], key[i], q);
        }
    }
    const f32 nothing = set(-INFINITY), scale = set(t.scale);
    UNROLL for (int r = 0; r < R; r++) {
        const int seen = t.keys[r] - first, unseen = t.first_keys[r] - first;
        const auto mask = [&](f32 x, int page, f32 other) {
            if (!masked) return x;
            return first_lanes(other, unseen - page * PAGE_SIZE, first_lanes(x, seen - page * PAGE_SIZE, other));
        };
        f32 block_highest = nothing;
        UNROLL for (int i = 0; i < P; i++) block_highest = max(block_highest, mask(s[r][i], i, nothing));
        block_highest = mul(block_highest, scale);
        if (any_higher(block_highest, set(state.highest[r] + SLACK))) rescale(state, r, t.dim, highest(block_highest));
        const f32 shift = set(-state.highest[r]);
        f32 sum = load(state.sum[r]);
        UNROLL for (int i = 0; i < P; i++) {
            const f32 p = mask(exp2(fma(s[r][i], scale, shift)), i, zero());
            sum = add(sum, p);
            store_bf16(state.p[r] + i * PAGE_SIZE, p);
        }
        store(state.sum[r], sum);
    }
}

template <int R, int P = BLOCK_PAGES>
void masked_scores(const Tile& t, int first, const Block& keys, const Block& next, State<R>& state) {
    if constexpr (P > 1)
        if (first + (P - 1) * PAGE_SIZE >= t.source.last_key)
            return masked_scores<R, P - 1>(t, first, keys, next, state);
    block_scores<R, P, true>(t, first, keys, next, state);
}

// Adds the block's first `count` values, weighted, to V registers of dims from d on.
template <int R, int V>
void block_values(const Tile& t, int count, int d, const Block& values, const Block& next, State<R>& state) {
    constexpr int PAGE_PAIRS = PAGE_SIZE / 2;
    f32 o[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++) o[r][j] = load(state.out[r] + d + j * LANES);
    const auto add_pair = [&](int i, auto load_values) {
        const int64_t at = (i % PAGE_PAIRS * t.dim + d) * 2;
        const bf16* v = values.at[i / PAGE_PAIRS] + at;
        pairs value[V];
        UNROLL for (int j = 0; j < V; j++) {
            value[j] = load_values(v + j * 2 * LANES);
            prefetch_far(next.at[i / PAGE_PAIRS] + at + j * 2 * LANES);
        }
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
        store(state.sum[r], zero());
        for (int d = 0; d < t.dim; d += LANES) store(state.out[r] + d, zero());
    }
    for (int d = 0; d < t.dim; d += 2)
        UNROLL for (int r = 0; r < R; r++) state.q[d / 2][r] = word_at(t.q[r] + d);
    const int last = t.source.last_key;
    for (int first = t.source.first_key; first < last; first += BLOCK_KEYS) {
        const bool more = first + BLOCK_KEYS < last;
        const Source& next = more ? t.source : t.next;
        const int next_first = more ? first + BLOCK_KEYS : t.next.first_key;
        const Block keys(t.pools.keys, t.page_stride, t.source, first);
        const Block next_keys(t.pools.keys, t.page_stride, next, next_first);
        const int count = std::min(BLOCK_KEYS, last - first);
        // Each page that is read fetches the one of its number in the next block; a last block has fewer.
        next_keys.fetch((count + PAGE_SIZE - 1) / PAGE_SIZE, t.dim);
        if (first + BLOCK_KEYS <= t.keys[0] && first >= t.first_keys[R - 1])
            block_scores<R, BLOCK_PAGES, false>(t, first, keys, next_keys, state);
        else
            masked_scores<R>(t, first, keys, next_keys, state);
        const Block values(t.pools.values, t.page_stride, t.source, first);
        const Block next_values(t.pools.values, t.page_stride, next, next_first);
        next_values.fetch(count / PAGE_SIZE, t.dim);
        int d = 0;
        for (; d + 4 * LANES <= t.dim; d += 4 * LANES) block_values<R, 4>(t, count, d, values, next_values, state);
        for (; d < t.dim; d += LANES) block_values<R, 1>(t, count, d, values, next_values, state);
    }
    for (int r = 0; r < R; r++) {
        const f32 inverse = set(1.0f / total(load(state.sum[r])));
        for (int d = 0; d < t.dim; d += LANES) store_bf16(t.out[r] + d, mul(load(state.out[r] + d), inverse));
    }
}

template <int R = TILE_ROWS>
void attend_rows(const Tile& t) {
    if constexpr (R > 0) {
        if (t.rows == R) return attend<R>(t);
        attend_rows<R - 1>(t);
    }
}

int task_tokens(const Step& step, const AttentionTask& task) {
    return std::min(TASK_TOKENS, step.token_indptr[task.row + 1] - task.first_token);
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
    // The tile of a task's queries from `done` on. A query is a token and one of the heads that share the KV head.
    const auto make_tile = [&](const AttentionTask& task, int kv_head, int done) {
        const int begin = step.token_indptr[task.row];
        Tile tile;
        tile.rows = std::min(TILE_ROWS, task_tokens(step, task) * group - done);
        for (int r = 0; r < tile.rows; r++) {
            const int token = task.first_token + (done + r) / group, head = kv_head * group + (done + r) % group;
            const int64_t at = (static_cast<int64_t>(token) * heads.heads + head) * dim;
            tile.q[r] = q + at;
            tile.out[r] = out + at;
            tile.keys[r] = step.start[task.row] + token - begin + 1;
            tile.first_keys[r] = window > 0 ? std::max(0, tile.keys[r] - window) : 0;
        }
        tile.source.pages = step.page_indices + step.page_indptr[task.row];
        tile.source.head_offset = static_cast<int64_t>(kv_head) * dim * PAGE_SIZE;
        tile.source.first_key = tile.first_keys[0] / BLOCK_KEYS * BLOCK_KEYS;
        tile.source.last_key = tile.keys[tile.rows - 1];
        tile.pools = pages;
        tile.page_stride = static_cast<int64_t>(kv_heads) * dim * PAGE_SIZE;
        tile.dim = dim;
        tile.scale = scale * LOG2_E;
        return tile;
    };
    team.share(count * kv_heads, MOST_TASKS, [&](int first, int last) {
        int i = first, done = 0;
        Tile tile = make_tile(tasks[i / kv_heads], i % kv_heads, done);
        while (i < last) {
            done += tile.rows;
            if (done == task_tokens(step, tasks[i / kv_heads]) * group) {
                done = 0;
                i++;
            }
            const Tile following = i < last ? make_tile(tasks[i / kv_heads], i % kv_heads, done) : tile;
            tile.next = following.source;
            attend_rows(tile);
            tile = following;
        }
    });
}
