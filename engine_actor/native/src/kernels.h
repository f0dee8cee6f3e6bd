// Kernels of a decoder step. Every value is reduced in an order that depends on neither the number of rows nor
// the number of threads, so a token's result is the same to the bit in any batch and any chunk.
//
// A kernel with a Team is one phase of it.
#pragma once
#include "simd.h"
#include "team.h"

constexpr int PAGE_SIZE = 16;     // tokens of one KV page
constexpr int MAX_HEAD_DIM = 256;
constexpr int COLUMNS = 32;       // of one panel of a packed weight
constexpr int TASK_TOKENS = 16;   // of one task of the attention

// Tokens of a step and where their KV lies: the columns of engine_actor.step.StepRecord.
struct Step {
    int32_t num_tokens, num_rows, num_logits;
    const int32_t* token_ids;     // [num_tokens]
    const int32_t* token_indptr;  // [num_rows + 1]
    const int32_t* start;         // [num_rows]
    const int32_t* page_indices;
    const int32_t* page_indptr;   // [num_rows + 1]
    const int32_t* positions;     // [num_tokens]
    const int32_t* slots;         // [num_tokens] page * PAGE_SIZE + offset
    const int32_t* logit_tokens;  // [num_logits] indexes of tokens
};

enum class Format : int32_t {
    bf16 = 0,  // data [panels][k / 2][32][2] bfloat16
    int8 = 1,  // data [panels][k / 4][32][4] bytes, scales [panels][32] float32
    int4 = 2,  // data [panels][k / 32][4][32][4] bytes, scales [panels][k / 32][2][32] float16: factor and minimum
};

// How blocks of 32 values of a row of a weight are kept, as in the file that they come from; k a multiple of 32.
enum class Blocks : int32_t {
    none = 0,
    nibbles = 1,  // data and scales as in Format::int4
    bytes = 2,    // data [panels][k][32] signed bytes, scales [panels][k / 32][32] float16: value = factor * byte
};

// A weight [n, k] in panels of 32 rows of it (columns of the product), the last one filled up with zeros.
// int8: k a multiple of 64, value = (byte - 128) * scale of its row of the weight. int4: k a multiple of 32,
// value = factor * nibble + minimum by 32 values of a row; quads 2 j and 2 j + 1 of them are the low and the high
// nibbles of the bytes [j].
//
// A weight of bf16 may have its values a second time in fewer bytes: rounded to bfloat16, `blocks` gives the same bits.
struct Weight {
    const void* data;
    const void* scales;
    int32_t n, k;
    Format format;
    Blocks blocks_format;
    const void* blocks;
    const f16* block_scales;
};

// Rows that a weight is multiplied with: bfloat16, or bytes with a scale and a sum for each group of inputs.
struct Activations {
    const bf16* values;    // [rows, k]
    const int8_t* bytes;   // [rows, k]
    const float* scales;   // [rows, k / group]
    const int32_t* sums;   // [rows, k / group] sum of the bytes times sum_factor()
};

constexpr int INT8_GROUP = 64, INT4_GROUP = 32, BLOCK = 32;
inline int group_size(Format format) { return format == Format::int4 ? INT4_GROUP : INT8_GROUP; }
inline int sum_factor(Format format) { return format == Format::int4 ? 1 : BYTE_SUM_FACTOR; }

enum class Epilogue : int32_t {
    store = 0,     // float32 [rows, n] = product + bias
    add = 1,       // float32 [rows, n] += product
    silu_mul = 2,  // bf16 [rows, n / 2] = silu(gate) * up; gate and up alternate by 16 columns
    gelu_mul = 3,  // the same with the tanh form of gelu
    best = 4,      // Best [threads, rows]: the highest column of each row; the caller has cleared them all
};

// The highest columns that one thread has seen of one row, lane by lane.
struct alignas(64) Best {
    float value[LANES];
    int32_t column[LANES];
    float zeros[LANES];  // 0 times every value: not 0 once one of them was not finite

    void clear();
};

struct Output {
    Epilogue epilogue;
    void* out;
    const float* bias = nullptr;  // [n] or null; for Epilogue::store
};

struct Heads {
    int32_t heads, kv_heads, head_dim;
};

// One layer's pages: keys are [page][kv head][dim / 2][PAGE_SIZE][2] and values
// [page][kv head][PAGE_SIZE / 2][dim][2], so that a dot product of pairs needs no sum across lanes.
struct Pages {
    bf16* keys;
    bf16* values;
};

// rows of x times the weight, each product to its epilogue.
void gemm(Team& team, const Activations& x, int rows, const Weight& weight, const Output& output);

// The first highest column of a row from the Bests of all threads, `stride` apart; -1 if a value was not finite.
int32_t best_column(const Best* best, int threads, int stride);

// Row `column` of a weight as float32 [k]; not of int4.
void read_row(const Weight& weight, int column, float* out);

// One row of bfloat16 [k] to the bytes, scales and sums of Activations.
void quantise_row(const bf16* x, int k, Format format, int8_t* bytes, float* scales, int32_t* sums);

// x / rms(x) * weight, float32 [n] to bfloat16; n a multiple of 16.
void rms_norm_row(const float* x, const float* weight, float eps, int n, bf16* out);

// out += x / rms(x) * weight, all float32 [n].
void add_rms_norm_row(const float* x, const float* weight, float eps, int n, float* out);

// Cosines and sines [head_dim / 2] of a position's angles.
void rope_angles(int position, const float* frequencies, int half, float* cos, float* sin);

// Norms of the heads of q and k, float32 [head_dim] each; null where the model has none.
struct HeadNorms {
    const float* q;
    const float* k;
    float eps;
};

// Rotates q and k of qkv [heads + 2 kv_heads, head_dim] float32, pairing dim i with i + head_dim / 2, after their norms;
// q goes to q [heads, head_dim], k and v into the slot.
void rope_store(const Heads& heads, const HeadNorms& norms, const float* qkv, const float* cos, const float* sin,
                int slot, bf16* q, const Pages& pages);

// One task of the attention for each 16 tokens of a row: (row, first token). Returns how many; `tasks` has room for
// num_tokens / 16 + num_rows.
struct AttentionTask {
    int32_t row, first_token;
};
int attention_tasks(const Step& step, AttentionTask* tasks);

// Causal attention over the pages, softmax online in float32 over blocks of 64 keys. q and out are
// [num_tokens, heads, head_dim]. A token sees the last `window` tokens, its own included; 0: all. Scores are multiplied
// by `scale`.
void attention(Team& team, const Step& step, const AttentionTask* tasks, int count, const Heads& heads, int window,
               float scale, const bf16* q, const Pages& pages, bf16* out);
