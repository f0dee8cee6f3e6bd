// bfloat16 matrix product with a packed weight: 8 rows by 32 columns in registers.
#include <algorithm>

#include "kernels.h"

namespace {

constexpr int COLUMNS = 32;
constexpr int TILE_ROWS = 8;    // 8 x 2 accumulators; more do not stay in registers
constexpr int BLOCK_ROWS = 96;  // rows of a that stay in the second level cache

struct Product {
    const bf16* a;
    const bf16* packed;
    const float* bias;
    void* out;
    int32_t n, k;
    Epilogue epilogue;
};

inline __mmask16 lanes_below(int limit) {
    return limit >= LANES ? 0xffff : limit <= 0 ? 0 : (__mmask16)((1u << limit) - 1);
}

inline __attribute__((always_inline)) void write(const Product& p, int64_t row, int column, __m512 low,
                                                 __m512 high) {
    if (p.epilogue == Epilogue::silu_mul) {
        store_bf16(static_cast<bf16*>(p.out) + row * (p.n / 2) + column / 2, _mm512_mul_ps(silu_ps(low), high));
        return;
    }
    const __mmask16 keep_low = lanes_below(p.n - column), keep_high = lanes_below(p.n - column - LANES);
    float* out = static_cast<float*>(p.out) + row * p.n + column;
    const float* added = p.epilogue == Epilogue::add ? out : p.bias == nullptr ? nullptr : p.bias + column;
    if (added != nullptr) {
        low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(keep_low, added));
        high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(keep_high, added + LANES));
    }
    _mm512_mask_storeu_ps(out, keep_low, low);
    _mm512_mask_storeu_ps(out + LANES, keep_high, high);
}

template <int R>
void tile(const Product& p, int64_t row, int column) {
    const int pairs = p.k / 2;
    const uint32_t* a = reinterpret_cast<const uint32_t*>(p.a + row * p.k);
    const bf16* w = p.packed + static_cast<int64_t>(column) * p.k;
    __m512 sum[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int i = 0; i < pairs; i++, w += 2 * COLUMNS) {
        const __m512bh low = load_pairs(w), high = load_pairs(w + COLUMNS);
        _mm_prefetch(reinterpret_cast<const char*>(w) + 2048, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w) + 2112, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512bh x = broadcast_pair(a[static_cast<int64_t>(r) * pairs + i]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], low, x);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], high, x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) write(p, row + r, column, sum[r][0], sum[r][1]);
}

using Tile = void (*)(const Product&, int64_t, int);
constexpr Tile TILES[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>};

}  // namespace

void evenhand_gemm(const bf16* a, int32_t rows, const bf16* packed, int32_t n, int32_t k, const float* bias,
                   Epilogue epilogue, void* out, int32_t threads) {
    const Product product{a, packed, bias, out, n, k, epilogue};
    const int column_blocks = (n + COLUMNS - 1) / COLUMNS, row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    // Columns are the outer loop: a thread reads only its part of the weight.
#pragma omp parallel for schedule(static) collapse(2) num_threads(threads)
    for (int j = 0; j < column_blocks; j++)
        for (int i = 0; i < row_blocks; i++) {
            const int end = std::min(rows, (i + 1) * BLOCK_ROWS);
            for (int row = i * BLOCK_ROWS; row < end;) {
                const int left = end - row;
                // 8 + 1 rows take longer than 5 + 4.
                const int count = left <= TILE_ROWS ? left : left < 2 * TILE_ROWS ? (left + 1) / 2 : TILE_ROWS;
                TILES[count](product, row, j * COLUMNS);
                row += count;
            }
        }
}
