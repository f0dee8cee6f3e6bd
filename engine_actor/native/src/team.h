// The threads of one step, and how they share out the work of its phases.
//
// A phase ends when its work is done, not when every thread has arrived: a thread that another process keeps from its
// core holds up nobody unless it was in the middle of a piece. It finds the phases it missed finished, and goes on.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

// The pieces of one phase, counted.
struct alignas(64) Phase {
    std::atomic<int32_t> taken{0};
    std::atomic<int32_t> done{0};
    std::atomic<int32_t> sleeping{0};
};

// One thread's view. Every thread of the team makes the same calls in the same order.
class Team {
public:
    Team(Phase* phases, int rank, int size) : rank(rank), size(size), next_(phases) {}

    // Calls work(begin, end) for parts of 0 .. count, at most `piece` long and shorter towards the end, each in
    // whichever thread is free; returns when all of them are done. What is computed must not depend on the thread.
    template <typename Work>
    void share(int count, int piece, Work&& work) {
        Phase& phase = *next_++;
        int32_t begin = phase.taken.load(std::memory_order_relaxed);
        while (begin < count) {
            const int32_t end = begin + std::clamp((count - begin) / (2 * size), 1, piece);
            if (!phase.taken.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            work(begin, end);
            const bool last = phase.done.fetch_add(end - begin) + end - begin == count;
            if (last && phase.sleeping.load() > 0) phase.done.notify_all();
            begin = phase.taken.load(std::memory_order_relaxed);
        }
        wait(phase, count);
    }

    const int rank, size;

private:
    // Spins for a few tens of microseconds (pieces are that short), then gives the core away a few times, then sleeps:
    // under load the thread that is waited for must be able to run.
    static void wait(Phase& phase, int count) {
        constexpr int SPINS = 1000, YIELDS = 20;
        for (int i = 0; i < SPINS + YIELDS; i++) {
            if (phase.done.load(std::memory_order_acquire) >= count) return;
            if (i < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
        phase.sleeping.fetch_add(1);
        for (int32_t done; (done = phase.done.load()) < count;) phase.done.wait(done);
    }

    Phase* next_;
};

// Runs body(team), which has at most `phases` phases, in threads of OpenMP's pool, which torch uses as well: `threads`
// of them, or fewer where OpenMP gives no more.
template <typename Body>
void run_team(int threads, int phases, Body&& body) {
    std::vector<Phase> shared(phases);
#pragma omp parallel num_threads(threads)
    {
        Team team(shared.data(), omp_get_thread_num(), omp_get_num_threads());
        body(team);
    }
}
