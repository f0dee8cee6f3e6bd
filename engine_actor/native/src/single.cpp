// The kernels one by one, for tests and measurements.
#include "kernels.h"

extern "C" {

void evenhand_gemm(const Activations* x, int32_t rows, const Weight* weight, Epilogue epilogue, void* out,
                   const float* bias, int32_t threads) {
    run_team(threads, [&](Team& team) { gemm(team, *x, rows, *weight, {epilogue, out, bias}); });
}

// The highest column of each row; best is room for [threads, rows].
void evenhand_highest(const Activations* x, int32_t rows, const Weight* weight, Best* best, int32_t* highest,
                      int32_t threads) {
    for (int i = 0; i < rows * threads; i++) best[i].clear();
    run_team(threads, [&](Team& team) { gemm(team, *x, rows, *weight, {Epilogue::best, best}); });
    for (int i = 0; i < rows; i++) highest[i] = best_column(best + i, threads, rows);
}

void evenhand_read_row(const Weight* weight, int32_t column, float* out) { read_row(*weight, column, out); }

void evenhand_quantise_row(const bf16* x, int32_t k, Format format, int8_t* bytes, float* scales, int32_t* sums) {
    quantise_row(x, k, format, bytes, scales, sums);
}

void evenhand_rms_norm_row(const float* x, const float* weight, float eps, int32_t n, bf16* out) {
    rms_norm_row(x, weight, eps, n, out);
}

void evenhand_rope_angles(int32_t position, const float* frequencies, int32_t half, float* cos, float* sin) {
    rope_angles(position, frequencies, half, cos, sin);
}

void evenhand_add_rms_norm_row(const float* x, const float* weight, float eps, int32_t n, float* out) {
    add_rms_norm_row(x, weight, eps, n, out);
}

void evenhand_rope_store(const Heads* heads, const HeadNorms* norms, const float* qkv, const float* cos,
                         const float* sin, int32_t slot, bf16* q, bf16* keys, bf16* values) {
    rope_store(*heads, *norms, qkv, cos, sin, slot, q, {keys, values});
}

// `tasks` is room for 2 * (num_tokens / 16 + num_rows) integers.
void evenhand_attention(const Step* step, const Heads* heads, int32_t window, float scale, const bf16* q, bf16* keys,
                        bf16* values, AttentionTask* tasks, bf16* out, int32_t threads) {
    const int count = attention_tasks(*step, tasks);
    run_team(threads, [&](Team& team) {
        attention(team, *step, tasks, count, *heads, window, scale, q, {keys, values}, out);
    });
}
}
