// Divides rows among threads. There is no thread pool of our own: idle threads of a second pool would spin on the cores that torch's
// threads need.
#pragma once
#include <dlfcn.h>
#include <stdint.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "kernels.h"

namespace grpo {

struct ParallelFor {
    void (*body)(const void* context, int64_t begin, int64_t end);
    const void* context;
    int64_t n, grain;
    std::atomic<int64_t> taken;

    void range(int64_t index) const {
        const int64_t begin = index * grain;
        if (begin < n) body(context, begin, begin + grain < n ? begin + grain : n);
    }
    // A thread's first range is given by its number, so that a thread that gets the same rows in two calls may find them in its
    // cache. The other ranges go to whichever thread is free.
    void work(int number, int threads) {
        int64_t index = number;
        while (index * grain < n) {
            range(index);
            index = threads + taken.fetch_add(1, std::memory_order_relaxed);
        }
    }
};

// The OpenMP runtime that torch has loaded for its own kernels, looked up at run time. Our loops run on its threads.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread_number)();
    int (*team_size)();

    static const OpenMP& loaded() {
        static const OpenMP found = {
            reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel")),
            reinterpret_cast<decltype(thread_number)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num")),
            reinterpret_cast<decltype(team_size)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads")),
        };
        return found;
    }
    explicit operator bool() const { return parallel && thread_number && team_size; }
};

// Calls body(context, begin, end) for ranges of at most `grain` that cover [0, n).
inline void parallel_for(int64_t n, int64_t grain, int threads, void (*body)(const void*, int64_t, int64_t), const void* context) {
    if (grain < 1) grain = 1;
    const int64_t ranges = ceil_div(n, grain);
    if (threads > ranges) threads = int(ranges);
    ParallelFor loop{body, context, n, grain, {0}};
    if (threads <= 1) {
        loop.work(0, 1);
    } else if (const OpenMP& openmp = OpenMP::loaded()) {
        openmp.parallel(
            [](void* self) {
                const OpenMP& team = OpenMP::loaded();
                static_cast<ParallelFor*>(self)->work(team.thread_number(), team.team_size());
            },
            &loop, unsigned(threads), 0);
    } else {
        std::vector<std::thread> helpers;
        try {
            helpers.reserve(size_t(threads));
            for (int k = 1; k < threads; k++) helpers.emplace_back([&loop, k, threads] { loop.work(k, threads); });
        } catch (const std::exception&) {  // no more threads or memory: the threads created so far do all of the work
        }
        loop.work(0, threads);
        for (int k = int(helpers.size()) + 1; k < threads; k++) loop.range(k);
        for (auto& helper : helpers) helper.join();
    }
}

// The same for a callable object body(begin, end).
template <class Body> void each_range(int64_t n, int64_t grain, int threads, const Body& body) {
    parallel_for(
        n, grain, threads,
        [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

}  // namespace grpo
