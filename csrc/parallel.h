// A parallel for loop. It runs on torch's OpenMP threads: a second thread pool would have idle
// threads spinning on the cores that torch's threads need.
#pragma once
#include <dlfcn.h>
#include <stdint.h>

#include <atomic>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#include "kernels.h"

namespace grpo {

// Divides [0, n) into ranges of `grain` elements, which the threads of a team take in turn.
struct ParallelLoop {
    void (*body)(const void* context, int64_t begin, int64_t end);
    const void* context;
    int64_t n, grain;
    std::atomic<int64_t> num_taken;  // beyond the first range of each thread

    void run_range(int64_t index) const {
        const int64_t begin = index * grain;
        if (begin < n) body(context, begin, begin + grain < n ? begin + grain : n);
    }
    // Runs the share of one thread. Its first range is given by its number, so that a thread that
    // gets the same rows in two calls may find them in its cache. The other ranges go to whichever
    // thread is free.
    void run_thread(int number, int threads) {
        int64_t index = number;
        while (index * grain < n) {
            run_range(index);
            index = threads + num_taken.fetch_add(1, std::memory_order_relaxed);
        }
    }
};

// The OpenMP runtime that torch has loaded, looked up at run time because this module does not link
// to one.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread_number)();
    int (*team_size)();

    static const OpenMP& loaded() {
        static const OpenMP runtime = {
            reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel")),
            reinterpret_cast<decltype(thread_number)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num")),
            reinterpret_cast<decltype(team_size)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads")),
        };
        return runtime;
    }
    explicit operator bool() const { return parallel && thread_number && team_size; }
};

// Runs the loop on this thread and on new ones. If no more threads can be created, those created
// so far do all of the work.
inline void run_on_new_threads(ParallelLoop& loop, int threads) {
    std::vector<std::thread> helpers;
    try {
        helpers.reserve(size_t(threads));
        for (int k = 1; k < threads; k++) {
            helpers.emplace_back([&loop, k, threads] { loop.run_thread(k, threads); });
        }
    } catch (const std::exception&) {}
    loop.run_thread(0, threads);
    for (int k = int(helpers.size()) + 1; k < threads; k++) loop.run_range(k);
    for (std::thread& helper : helpers) helper.join();
}

// Runs the loop on at most `threads` threads: this one, torch's OpenMP threads, or new ones if
// OpenMP is not loaded.
inline void run_parallel(ParallelLoop& loop, int threads) {
    const int64_t num_ranges = ceil_div(loop.n, loop.grain);
    if (threads > num_ranges) threads = int(num_ranges);
    if (threads <= 1) {
        loop.run_thread(0, 1);
    } else if (const OpenMP& openmp = OpenMP::loaded()) {
        openmp.parallel(
            [](void* context) {
                const OpenMP& team = OpenMP::loaded();
                ParallelLoop* shared = static_cast<ParallelLoop*>(context);
                shared->run_thread(team.thread_number(), team.team_size());
            },
            &loop, unsigned(threads), 0);
    } else {
        run_on_new_threads(loop, threads);
    }
}

// Calls body(begin, end) for ranges of at most `grain` elements that cover [0, n). `body` must not
// throw.
template <class Body> void parallel_for(int64_t n, int64_t grain, int threads, const Body& body) {
    const auto call_body = [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
    };
    ParallelLoop loop{call_body, &body, n, grain < 1 ? 1 : grain, {0}};
    run_parallel(loop, threads);
}

// As parallel_for, for a body that returns false if it gets no memory. An exception must not leave
// a thread, so std::bad_alloc (MemoryError in Python) is thrown after the loop.
template <class Body>
void parallel_for_or_bad_alloc(int64_t n, int64_t grain, int threads, const Body& body) {
    std::atomic<bool> allocated{true};
    parallel_for(n, grain, threads, [&](int64_t begin, int64_t end) {
        if (!allocated.load(std::memory_order_relaxed)) return;
        if (!body(begin, end)) allocated.store(false, std::memory_order_relaxed);
    });
    if (!allocated) throw std::bad_alloc();
}

}  // namespace grpo
