// The matrix product: columns are shared out among threads, rows go through in tiles.
#include "gemm.h"

#include <limits>

namespace {

constexpr int BLOCK_ROWS = 96;   // rows of x that stay in the second level cache
constexpr int NEAR_BYTES = 8192;  // how far a tile fetches ahead in its own panel
// With fewer rows the first level cache is the faster place for weights to come, with more a core waits for none.
constexpr int FAR_ROWS = 6, MOST_FAR_ROWS = 24;
constexpr int MOST_PANELS = 16;  // that a thread takes at a time

// Up to so many rows a product waits for its weights, and making them out of blocks is faster than reading them.
constexpr int MOST_BLOCK_ROWS = 4;

// Rows of one tile out of `left`: 8 + 1 rows take longer than 5 + 4.
int tile_rows(int left, int most) { return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most; }

// `data` is what the kernel reads, `bytes` of it for a panel.
template <typename Kernel>
void panels(const Product& p, const void* data, int64_t bytes, int begin, int end, int rows) {
    const char* weights = static_cast<const char*>(data);
    for (int block = 0; block < rows; block += BLOCK_ROWS) {
        const int last = std::min(rows, block + BLOCK_ROWS);
        const int tiles = (last - block + Kernel::TILE_ROWS - 1) / Kernel::TILE_ROWS;
        const bool far = last - block >= FAR_ROWS && last - block <= MOST_FAR_ROWS;
        for (int panel = begin; panel < end; panel++) {
            // One tile fetches what it will need itself; several fetch the next panel, each a part of it.
            const char* here = weights + panel * bytes;
            Ahead ahead{here + bytes, (128 / tiles + 15) / 16 * 16, far};
            if (tiles == 1) ahead = {here + NEAR_BYTES, 128, far};
            for (int row = block; row < last;) {
                const int count = tile_rows(last - row, Kernel::TILE_ROWS);
                call_tile<Kernel>(p, row, count, panel, ahead);
                if (tiles > 1) ahead.at += bytes / 128 * ahead.step;
                row += count;
            }
        }
    }
}

}  // namespace

void gemm(Team& team, const Activations& x, int rows, const Weight& weight, const Output& output) {
    if (rows == 0) return;
    Product product{x, weight, output, weight.n, weight.k};
    if (output.epilogue == Epilogue::best)
        product.output.out = static_cast<Best*>(output.out) + static_cast<int64_t>(team.rank) * rows;
    const int count = (weight.n + COLUMNS - 1) / COLUMNS;
    const Blocks blocks = rows <= MOST_BLOCK_ROWS ? weight.blocks_format : Blocks::none;
    const int64_t values = int64_t(weight.k) * COLUMNS;
    team.share(count, MOST_PANELS, [&](int begin, int end) {
        if (blocks == Blocks::nibbles)
            return panels<NibblesKernel>(product, weight.blocks, values / 2, begin, end, rows);
        if (blocks == Blocks::bytes) return panels<BytesKernel>(product, weight.blocks, values, begin, end, rows);
        switch (weight.format) {
            case Format::bf16: return panels<Bf16Kernel>(product, weight.data, values * 2, begin, end, rows);
            case Format::int8: return panels<Int8Kernel>(product, weight.data, values, begin, end, rows);
            case Format::int4: return panels<Int4Kernel>(product, weight.data, values / 2, begin, end, rows);
        }
    });
}

void Best::clear() {
    for (int i = 0; i < LANES; i++) {
        value[i] = -std::numeric_limits<float>::infinity();
        column[i] = 0;
        zeros[i] = 0.0f;
    }
}

int32_t best_column(const Best* best, int threads, int stride) {
    float value = -std::numeric_limits<float>::infinity();
    int32_t column = -1;
    for (int thread = 0; thread < threads; thread++, best += stride)
        for (int i = 0; i < LANES; i++) {
            if (!(best->zeros[i] == 0.0f)) return -1;
            if (best->value[i] > value || (best->value[i] == value && best->column[i] < column)) {
                value = best->value[i];
                column = best->column[i];
            }
        }
    return column;
}

void read_row(const Weight& weight, int column, float* out) {
    const int k = weight.k;
    const int64_t panel = column / COLUMNS, lane = column % COLUMNS;
    if (weight.format == Format::bf16) {
        const char* words = static_cast<const char*>(weight.data) + panel * COLUMNS * k * 2;
        for (int i = 0; i < k; i += 2) {
            const uint32_t pair = word_at(words + 4 * (i / 2 * COLUMNS + lane));
            const uint32_t bits[2] = {pair << 16, pair & 0xffff0000u};
            __builtin_memcpy(out + i, bits, sizeof bits);
        }
        return;
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(weight.data) + panel * COLUMNS * k;
    const float scale = static_cast<const float*>(weight.scales)[column];
    for (int i = 0; i < k; i++) {
        const int byte = bytes[(i / 4 * COLUMNS + lane) * 4 + i % 4];
        out[i] = scale * static_cast<float>(byte - 128);
    }
}
