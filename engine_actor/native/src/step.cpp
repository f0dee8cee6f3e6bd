// The walk over layers: a whole decoder step in one call, its threads started once.
#include <chrono>

#include "kernels.h"

// What a model does not have is null; `window` 0: the layer sees all tokens.
struct Layer {
    const float* before_attention;
    Weight qkv;
    const float* qkv_bias;
    const float* q_norm;
    const float* k_norm;
    Weight output;
    const float* after_attention;
    const float* before_mlp;
    Weight gate_up;
    Weight down;
    const float* after_mlp;
    int32_t window;
    int32_t local;  // rotates by local_frequencies
};

struct Model {
    Heads heads;
    int32_t num_layers, hidden, inner, vocab, num_pages, gelu;
    float eps, embedding_scale, attention_scale;
    const Layer* layers;
    const float* norm;
    const bf16* embedding;  // [vocab, hidden], or null where lm_head is the embedding as well
    Weight lm_head;
    const float* frequencies;        // [head_dim / 2]
    const float* local_frequencies;  // [head_dim / 2], or null where no layer is local
    bf16* keys;                // [num_layers] pools, see Pages
    bf16* values;
};

// What a step gives back: the logits, or the highest token of each row and whether its logits were finite.
struct Result {
    float* logits;     // [num_logits, vocab], or null: then
    int32_t* highest;  // [num_logits], -1 for a row that was not finite
    double* seconds;   // of each Part, added to
};

namespace {

// The parts of a step whose time is counted.
enum class Part { linear, attention, pointwise, lm_head };

// Adds the time between its calls to parts of the step, in the first thread.
class Clock {
public:
    Clock(double* seconds, bool on) : seconds_(seconds), on_(on), last_(std::chrono::steady_clock::now()) {}

    void end(Part part) {
        if (!on_) return;
        const auto now = std::chrono::steady_clock::now();
        seconds_[static_cast<int>(part)] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

private:
    double* seconds_;
    bool on_;
    std::chrono::steady_clock::time_point last_;
};

// Room for one step, cut out of one block of memory at 64-byte borders.
struct Workspace {
    template <typename T>
    T* take(int64_t count) {
        T* taken = reinterpret_cast<T*>(at);
        at += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }

    uintptr_t at;  // a number: it is also used to measure, without any memory
};

struct Buffers {
    float *hidden, *qkv, *added;
    float *cos[2], *sin[2];  // of all layers, of local ones
    bf16 *normed, *q, *attended, *inner;
    int8_t* bytes;
    float* scales;
    int32_t* sums;
    AttentionTask* tasks;
    Best* best;

    Buffers(const Model& m, int64_t tokens, int64_t rows, int64_t logits, int64_t threads, Workspace& w) {
        const int64_t dim = m.heads.head_dim, query = m.heads.heads * dim;
        const int64_t widest = std::max<int64_t>({m.hidden, m.inner, query});
        hidden = w.take<float>(tokens * m.hidden);
        qkv = w.take<float>(tokens * (query + 2 * m.heads.kv_heads * dim));
        added = w.take<float>(tokens * m.hidden);
        for (int local = 0; local < 2; local++) {
            cos[local] = w.take<float>(tokens * dim / 2);
            sin[local] = w.take<float>(tokens * dim / 2);
        }
        normed = w.take<bf16>(tokens * m.hidden);
        q = w.take<bf16>(tokens * query);
        attended = w.take<bf16>(tokens * query);
        inner = w.take<bf16>(tokens * m.inner);
        bytes = w.take<int8_t>(tokens * widest);
        scales = w.take<float>(tokens * widest / INT4_GROUP);
        sums = w.take<int32_t>(tokens * widest / INT4_GROUP);
        tasks = w.take<AttentionTask>(tokens / TASK_TOKENS + rows);
        best = w.take<Best>(logits * threads);
    }
};

// One thread's way through the step.
class Walk {
public:
    Walk(Team& team, const Model& m, const Step& step, const Buffers& b, int tasks, const Result& result)
        : team_(team), m_(m), step_(step), b_(b), result_(result), tasks_(tasks),
          clock_(result.seconds, team.rank == 0) {}

    void run() {
        const int dim = m_.heads.head_dim, kv = m_.heads.kv_heads * dim, query = m_.heads.heads * dim;
        const int64_t pool = static_cast<int64_t>(m_.num_pages) * PAGE_SIZE * kv;
        begin();
        for (int i = 0; i < m_.num_layers; i++) {
            const Layer& layer = m_.layers[i];
            const Pages pages{m_.keys + i * pool, m_.values + i * pool};
            norm(step_.num_tokens, nullptr, layer.before_attention, layer.qkv);
            product(b_.normed, layer.qkv, {Epilogue::store, b_.qkv, layer.qkv_bias});
            const float *cos = b_.cos[layer.local], *sin = b_.sin[layer.local];
            rows(step_.num_tokens, [&](int t) {
                rope_store(m_.heads, {layer.q_norm, layer.k_norm, m_.eps}, b_.qkv + int64_t(t) * (query + 2 * kv),
                           cos + int64_t(t) * dim / 2, sin + int64_t(t) * dim / 2, step_.slots[t],
                           b_.q + int64_t(t) * query, pages);
            });
            attention(team_, step_, b_.tasks, tasks_, m_.heads, layer.window, m_.attention_scale, b_.q, pages,
                      b_.attended);
            clock_.end(Part::attention);
            quantise(b_.attended, layer.output);
            add_product(b_.attended, layer.output, layer.after_attention);
            norm(step_.num_tokens, nullptr, layer.before_mlp, layer.gate_up);
            product(b_.normed, layer.gate_up, {m_.gelu ? Epilogue::gelu_mul : Epilogue::silu_mul, b_.inner});
            quantise(b_.inner, layer.down);
            add_product(b_.inner, layer.down, layer.after_mlp);
        }
        if (step_.num_logits > 0) finish();
    }

private:
    // Embeddings and angles.
    void begin() {
        const int hidden = m_.hidden, half = m_.heads.head_dim / 2;
        const f32 scale = set(m_.embedding_scale);
        rows(step_.num_tokens, [&](int t) {
            float* out = b_.hidden + int64_t(t) * hidden;
            if (m_.embedding == nullptr) {
                read_row(m_.lm_head, step_.token_ids[t], out);
            } else {
                const bf16* row = m_.embedding + int64_t(step_.token_ids[t]) * hidden;
                for (int i = 0; i < hidden; i += LANES) store(out + i, load_bf16(row + i));
            }
            for (int i = 0; i < hidden; i += LANES) store(out + i, mul(load(out + i), scale));
            const int64_t at = int64_t(t) * half;
            rope_angles(step_.positions[t], m_.frequencies, half, b_.cos[0] + at, b_.sin[0] + at);
            if (m_.local_frequencies != nullptr)
                rope_angles(step_.positions[t], m_.local_frequencies, half, b_.cos[1] + at, b_.sin[1] + at);
        });
    }

    void finish() {
        const int count = step_.num_logits;
        norm(count, step_.logit_tokens, m_.norm, m_.lm_head);
        const Activations x{b_.normed, b_.bytes, b_.scales, b_.sums};
        if (result_.logits != nullptr) {
            gemm(team_, x, count, m_.lm_head, {Epilogue::store, result_.logits});
            clock_.end(Part::lm_head);
        } else {
            rows(count * team_.size, [&](int i) { b_.best[i].clear(); });
            gemm(team_, x, count, m_.lm_head, {Epilogue::best, b_.best});
            clock_.end(Part::lm_head);
            rows(count, [&](int i) { result_.highest[i] = best_column(b_.best + i, team_.size, count); });
        }
    }

    // The norm of rows of the residual stream, picked or all, in the form that `weight` is multiplied with.
    void norm(int count, const int32_t* pick, const float* norm_weight, const Weight& weight) {
        rows(count, [&](int t) {
            const float* x = b_.hidden + int64_t(pick == nullptr ? t : pick[t]) * m_.hidden;
            rms_norm_row(x, norm_weight, m_.eps, m_.hidden, b_.normed + int64_t(t) * m_.hidden);
            quantise_to(b_.normed, t, weight);
        });
    }

    void quantise(const bf16* x, const Weight& weight) {
        if (weight.format != Format::bf16) rows(step_.num_tokens, [&](int t) { quantise_to(x, t, weight); });
    }

    void quantise_to(const bf16* x, int t, const Weight& weight) {
        if (weight.format == Format::bf16) return;
        const int64_t groups = weight.k / group_size(weight.format);
        quantise_row(x + int64_t(t) * weight.k, weight.k, weight.format, b_.bytes + int64_t(t) * weight.k,
                     b_.scales + t * groups, b_.sums + t * groups);
    }

    void product(const bf16* x, const Weight& weight, const Output& output) {
        gemm(team_, {x, b_.bytes, b_.scales, b_.sums}, step_.num_tokens, weight, output);
        clock_.end(Part::linear);
    }

    // Adds the product to the residual stream, through a norm if there is one.
    void add_product(const bf16* x, const Weight& weight, const float* norm_weight) {
        if (norm_weight == nullptr) return product(x, weight, {Epilogue::add, b_.hidden});
        product(x, weight, {Epilogue::store, b_.added});
        rows(step_.num_tokens, [&](int t) {
            const int64_t at = int64_t(t) * m_.hidden;
            add_rms_norm_row(b_.added + at, norm_weight, m_.eps, m_.hidden, b_.hidden + at);
        });
    }

    template <typename Work>
    void rows(int count, Work&& work) {
        team_.share(count, 8, [&](int first, int last) {
            for (int i = first; i < last; i++) work(i);
        });
        clock_.end(Part::pointwise);
    }

    Team& team_;
    const Model& m_;
    const Step& step_;
    const Buffers& b_;
    const Result& result_;
    const int tasks_;
    Clock clock_;
};

}  // namespace

extern "C" {

// Bytes of workspace that a step needs.
int64_t evenhand_workspace_bytes(const Model* model, const Step* step, int32_t threads) {
    Workspace measure{0};
    Buffers(*model, step->num_tokens, step->num_rows, step->num_logits, threads, measure);
    return static_cast<int64_t>(measure.at);
}

// Writes KV of every token, and the result. `workspace` is aligned to 64 bytes.
void evenhand_step(const Model* model, const Step* step, char* workspace, const Result* result, int32_t threads) {
    Workspace space{reinterpret_cast<uintptr_t>(workspace)};
    const Buffers buffers(*model, step->num_tokens, step->num_rows, step->num_logits, threads, space);
    const int tasks = attention_tasks(*step, buffers.tasks);
    run_team(threads, [&](Team& team) { Walk(team, *model, *step, buffers, tasks, *result).run(); });
}
}
