// The walk over layers: a whole decoder step in one call.
#include "kernels.h"

struct Layer {
    const float* input_norm;
    const bf16* qkv;
    const float* qkv_bias;  // null where the model has none
    const bf16* output;
    const float* post_attention_norm;
    const bf16* gate_up;
    const bf16* down;
};

struct Model {
    Heads shape;
    int32_t num_layers, hidden, inner, vocab, num_pages;
    float eps;
    const Layer* layers;
    const float* norm;
    const bf16* embedding;  // [vocab, hidden]
    const bf16* lm_head;
    const float* frequencies;  // [head_dim / 2]
    bf16* keys;                // [num_layers] pools, see Heads
    bf16* values;
};

namespace {

// Room for one step, cut out of one block of memory at 64-byte borders.
struct Workspace {
    explicit Workspace(char* block) : begin(block), at(block) {}

    template <typename T>
    T* take(int64_t count) {
        T* taken = reinterpret_cast<T*>(at);
        at += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }

    int64_t used() const { return at - begin; }

    char* begin;
    char* at;
};

struct Buffers {
    float *hidden, *qkv, *cos, *sin;
    bf16 *normed, *q, *attended, *inner;
    int32_t* tasks;

    Buffers(const Model& m, int64_t tokens, int64_t rows, Workspace& w) {
        const int64_t dim = m.shape.head_dim, query = m.shape.heads * dim;
        hidden = w.take<float>(tokens * m.hidden);
        qkv = w.take<float>(tokens * (query + 2 * m.shape.kv_heads * dim));
        cos = w.take<float>(tokens * dim / 2);
        sin = w.take<float>(tokens * dim / 2);
        normed = w.take<bf16>(tokens * m.hidden);
        q = w.take<bf16>(tokens * query);
        attended = w.take<bf16>(tokens * query);
        inner = w.take<bf16>(tokens * m.inner);
        tasks = w.take<int32_t>(2 * (tokens / PAGE_SIZE + rows));
    }
};

}  // namespace

extern "C" {

// Bytes of workspace that a step of this size needs.
int64_t evenhand_workspace_bytes(const Model* model, int32_t tokens, int32_t rows) {
    Workspace measure(nullptr);
    Buffers(*model, tokens, rows, measure);
    return measure.used();
}

// Writes KV of every token, and logits [num_logits, vocab] float32. `workspace` is aligned to 64 bytes.
void evenhand_step(const Model* model, const Step* step, char* workspace, float* logits, int32_t threads) {
    const Model& m = *model;
    const int tokens = step->num_tokens, hidden = m.hidden;
    const int query = m.shape.heads * m.shape.head_dim, key_value = m.shape.kv_heads * m.shape.head_dim;
    const int64_t pool = static_cast<int64_t>(m.num_pages) * PAGE_SIZE * key_value;
    Workspace space(workspace);
    const Buffers b(m, tokens, step->num_rows, space);

    for (int t = 0; t < tokens; t++) {
        const bf16* row = m.embedding + static_cast<int64_t>(step->token_ids[t]) * hidden;
        for (int i = 0; i < hidden; i += LANES)
            _mm512_storeu_ps(b.hidden + static_cast<int64_t>(t) * hidden + i, load_bf16(row + i));
    }
    evenhand_rope_angles(step, m.frequencies, m.shape.head_dim / 2, b.cos, b.sin, threads);
    for (int i = 0; i < m.num_layers; i++) {
        const Layer& layer = m.layers[i];
        bf16* keys = m.keys + i * pool;
        bf16* values = m.values + i * pool;
        evenhand_rms_norm(b.hidden, nullptr, layer.input_norm, m.eps, tokens, hidden, b.normed, threads);
        evenhand_gemm(b.normed, tokens, layer.qkv, query + 2 * key_value, hidden, layer.qkv_bias, Epilogue::store,
                      b.qkv, threads);
        evenhand_rope_store(step, &m.shape, b.qkv, b.cos, b.sin, b.q, keys, values, threads);
        evenhand_attention(step, &m.shape, b.q, keys, values, b.tasks, b.attended, threads);
        evenhand_gemm(b.attended, tokens, layer.output, hidden, query, nullptr, Epilogue::add, b.hidden, threads);
        evenhand_rms_norm(b.hidden, nullptr, layer.post_attention_norm, m.eps, tokens, hidden, b.normed, threads);
        evenhand_gemm(b.normed, tokens, layer.gate_up, 2 * m.inner, hidden, nullptr, Epilogue::silu_mul, b.inner,
                      threads);
        evenhand_gemm(b.inner, tokens, layer.down, hidden, m.inner, nullptr, Epilogue::add, b.hidden, threads);
    }
    evenhand_rms_norm(b.hidden, step->logit_tokens, m.norm, m.eps, step->num_logits, hidden, b.normed, threads);
    evenhand_gemm(b.normed, step->num_logits, m.lm_head, m.vocab, hidden, nullptr, Epilogue::store, logits,
                  threads);
}
}
