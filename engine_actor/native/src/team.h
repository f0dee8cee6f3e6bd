// The threads of one step, and how they share out the work of its phases.
//
// Each thread begins with a part of its own, the same one whenever the work is the same: what it wrote or fetched before
// is in its caches. Then it helps others, from the far ends of their parts.
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

// What is left of one thread's part of a phase: one word, so that it changes at once.
struct Part {
    uint64_t phase : 16;
    uint64_t begin : 24;
    uint64_t end : 24;
};

struct alignas(64) SharedPart {
    std::atomic<Part> left{Part{0, 0, 0}};
};

struct TeamState {
    explicit TeamState(int threads) : parts(threads) {}

    std::vector<SharedPart> parts;
    alignas(64) std::atomic<int64_t> done{0};  // pieces of all phases
    std::atomic<int32_t> sleeping{0};
};

// One thread's view. Every thread of the team makes the same calls in the same order.
class Team {
public:
    Team(TeamState& state, int rank, int size) : rank(rank), size(size), state_(state) {}

    // Calls work(begin, end) for pieces of 0 .. count, at most `longest` long and shorter towards the end; returns when
    // all of them are done, in whichever threads. What is computed must not depend on the thread.
    template <typename Work>
    void share(int count, int longest, Work&& work) {
        phase_++;
        target_ += count;
        for (int i = 0; i < size; i++) {
            int begin, end;
            while (take((rank + i) % size, count, longest, begin, end)) {
                work(begin, end);
                const bool last = state_.done.fetch_add(end - begin) + end - begin == target_;
                if (last && state_.sleeping.load() > 0) state_.done.notify_all();
            }
        }
        wait();
    }

    // Where this thread's own part of 0 .. count begins.
    int first(int count) const { return part(rank, count).begin; }

    const int rank, size;

private:
    Part part(int owner, int count) const {
        const int64_t whole = count;
        return {phase_, static_cast<uint64_t>(whole * owner / size), static_cast<uint64_t>(whole * (owner + 1) / size)};
    }

    // Takes a piece of the part of `owner`; false if nothing is left of it.
    bool take(int owner, int count, int longest, int& begin, int& end) {
        std::atomic<Part>& shared = state_.parts[owner].left;
        Part before = shared.load();
        while (true) {
            if (before.phase > phase_) return false;  // all have gone on to a later one
            Part left = before.phase == phase_ ? before : part(owner, count);
            if (left.begin == left.end) return false;
            const int length = std::clamp(static_cast<int>(left.end - left.begin) / 2, 1, longest);
            if (owner == rank) {
                begin = left.begin;
                end = begin + length;
                left.begin += length;
            } else {
                end = left.end;
                begin = end - length;
                left.end -= length;
            }
            if (shared.compare_exchange_weak(before, left)) return true;
        }
    }

    // Spins for a few tens of microseconds (pieces are that short), then gives the core away a few times, then sleeps:
    // under load the thread that is waited for must be able to run.
    void wait() {
        constexpr int SPINS = 1000, YIELDS = 20;
        for (int i = 0; i < SPINS + YIELDS; i++) {
            if (state_.done.load(std::memory_order_acquire) >= target_) return;
            if (i < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
        state_.sleeping.fetch_add(1);
        for (int64_t done; (done = state_.done.load()) < target_;) state_.done.wait(done);
        state_.sleeping.fetch_sub(1);
    }

    TeamState& state_;
    uint64_t phase_ = 0;
    int64_t target_ = 0;
};

// Runs body(team) in threads of OpenMP's pool, which torch uses as well: `threads` of them, or fewer where OpenMP gives
// no more.
template <typename Body>
void run_team(int threads, Body&& body) {
    TeamState state(threads);
#pragma omp parallel num_threads(threads)
    {
        Team team(state, omp_get_thread_num(), omp_get_num_threads());
        body(team);
    }
}
