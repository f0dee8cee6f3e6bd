// What the machine can do at most: dot products of registers, and reading memory. For the roofline of benchmarks.
#include <ctime>

#include "kernels.h"

namespace {

constexpr int SUMS = 16, ROUNDS = 200'000;

// CPU time: what neighbours take from a thread is not the machine's ceiling.
double cpu_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename Sum, typename Dot>
double dots_per_second(Sum first, Dot dot) {
    Sum sums[SUMS];
    for (Sum& sum : sums) sum = first;
    const double begin = cpu_seconds();
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sums[i] = dot(sums[i]);
    }
    const double seconds = cpu_seconds() - begin;
    for (const Sum& sum : sums) {
        volatile Sum kept = sum;  // so that nothing is left out
        (void)kept;
    }
    return SUMS * ROUNDS / seconds;
}

double bytes_per_second(const char* memory, int64_t size) {
    const double begin = cpu_seconds();
    f32 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t at = 0; at + 256 <= size; at += 256)
        for (int i = 0; i < 4; i++) sums[i] = add(sums[i], load(reinterpret_cast<const float*>(memory + at + 64 * i)));
    const double seconds = cpu_seconds() - begin;
    volatile float kept = total(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    (void)kept;
    return static_cast<double>(size) / seconds;
}

}  // namespace

extern "C" {

// Of all threads together: bfloat16 operations, int8 operations, bytes read from `memory`, each in one second. Each
// thread reads its part of the `size` bytes.
void evenhand_ceilings(const char* memory, int64_t size, double* bf16_operations, double* int8_operations,
                       double* bytes, int32_t threads) {
    std::atomic<double> pairs_rate{0.0}, quads_rate{0.0}, bytes_rate{0.0};
    run_team(threads, [&](Team& team) {
        const int64_t part = size / team.size;
        const pairs pair = set_pair(0x3c003c00u);
        const quads quad = set_quad(0x01010101u);
        pairs_rate += dots_per_second(zero(), [&](f32 sum) { return dot(sum, pair, pair); });
        quads_rate += dots_per_second(set_int(0), [&](i32 sum) { return dot_bytes(sum, quad, quad); });
        bytes_rate += bytes_per_second(memory + team.rank * part, part);
    });
    *bf16_operations = pairs_rate * LANES * 4;
    *int8_operations = quads_rate * LANES * 8;
    *bytes = bytes_rate;
}
}
