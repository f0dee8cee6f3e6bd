// Kernels of a decoder step. Every value is reduced in an order that depends on neither the number of rows nor
// the number of threads, so a token's result is the same to the bit in any batch and any chunk.
#pragma once
#include "simd.h"

// Tokens of a step and where their KV lies: the columns of engine_actor.step.StepRecord.
struct Step {
    int32_t num_tokens, num_rows, num_logits;
    const int32_t* token_ids;     // [num_tokens]
    const int32_t* token_indptr;  // [num_rows + 1]
    const int32_t* start;         // [num_rows]
    const int32_t* page_indices;
    const int32_t* page_indptr;    // [num_rows + 1]
    const int32_t* positions;      // [num_tokens]
    const int32_t* slots;          // [num_tokens] page * PAGE_SIZE + offset
    const int32_t* logit_tokens;   // [num_logits] indexes of tokens
};

// One layer's pages: keys are [page][kv head][dim / 2][PAGE_SIZE][2] and values
// [page][kv head][PAGE_SIZE / 2][dim][2], so that a dot product of pairs needs no sum across lanes.
struct Heads {
    int32_t heads, kv_heads, head_dim;
};

enum class Epilogue : int32_t {
    store = 0,     // float32 [rows, n] = product + bias
    add = 1,       // float32 [rows, n] += product
    silu_mul = 2,  // bf16 [rows, n / 2] = silu(gate) * up; gate and up alternate by 16 columns
};

extern "C" {

// a [rows, k] times a weight [n, k] that is packed as [n / 32][k / 2][32][2], n padded with zeros to 32.
// k is even; bias [n] float32 or null, for Epilogue::store.
void evenhand_gemm(const bf16* a, int32_t rows, const bf16* packed, int32_t n, int32_t k, const float* bias,
                   Epilogue epilogue, void* out, int32_t threads);

// out [rows, n] bf16 = x / rms(x) * weight; x and weight float32, n a multiple of 16. `pick` [rows] names the
// rows of x to take, null for all in order.
void evenhand_rms_norm(const float* x, const int32_t* pick, const float* weight, float eps, int32_t rows,
                       int32_t n, bf16* out, int32_t threads);

// cos and sin [num_tokens, head_dim / 2] of the positions' angles.
void evenhand_rope_angles(const Step* step, const float* frequencies, int32_t half, float* cos, float* sin,
                          int32_t threads);

// Rotates q and k of qkv [num_tokens, heads + 2 kv_heads, head_dim] float32, pairing dim i with i + head_dim / 2;
// q goes to q [num_tokens, heads, head_dim] bf16, k and v into their pages.
void evenhand_rope_store(const Step* step, const Heads* shape, const float* qkv, const float* cos,
                         const float* sin, bf16* q, bf16* keys, bf16* values, int32_t threads);

// Causal attention of all rows over their pages, softmax online in float32 over blocks of 64 keys.
// out is [num_tokens, heads, head_dim] bf16; tasks is room for 2 * (num_tokens / 16 + num_rows) integers.
void evenhand_attention(const Step* step, const Heads* shape, const bf16* q, const bf16* keys,
                        const bf16* values, int32_t* tasks, bf16* out, int32_t threads);
}
