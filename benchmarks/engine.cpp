// The event engine's algorithm in C++, to compare its speed with: see benchmarks/engine.py.
//
// Reads a task graph as little-endian int64: the number of tasks T, edges E, resource sets S, members
// of all sets M, resources R and the length of the contention table C; then successor_offsets
// [T + 1], successors [E], num_predecessors [T], durations [T], resource_sets [T], set_offsets
// [S + 1], set_resources [M] and contention [C] (see TaskGraph). Prints the makespan and the
// nanoseconds of the fastest of several plays.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

using Ints = std::vector<int64_t>;

struct Queue {
    Ints ready, task;

    void push(int64_t hole, int64_t time, int64_t id) {
        while (hole > 0) {
            const int64_t parent = (hole - 1) >> 1;
            if (ready[parent] < time || (ready[parent] == time && task[parent] < id)) break;
            ready[hole] = ready[parent];
            task[hole] = task[parent];
            hole = parent;
        }
        ready[hole] = time;
        task[hole] = id;
    }

    void pop(int64_t size) {
        const int64_t last = size - 1;
        int64_t hole = 0, child = 1;
        while (child + 1 < last) {
            const int64_t left = ready[child], right = ready[child + 1];
            child += (right < left) | ((right == left) & (task[child + 1] < task[child]));
            ready[hole] = ready[child];
            task[hole] = task[child];
            hole = child;
            child = 2 * hole + 1;
        }
        if (child < last) {
            ready[hole] = ready[child];
            task[hole] = task[child];
            hole = child;
        }
        push(hole, ready[last], task[last]);
    }
};

struct Engine {
    Ints successor_offsets, successors, num_predecessors, durations, resource_sets, set_offsets,
        set_resources, contention;
    Ints remaining, free, stack, ready, start, end;
    Queue queue;

    int64_t lost(int64_t duration, int64_t wait) const {
        if (wait <= 0) return 0;
        const int64_t slowdown = contention[0], slowest = 1000 + slowdown;
        return std::min(duration / 1000 * slowdown + duration % 1000 * slowdown / 1000,
                        wait / slowest * slowdown + wait % slowest * slowdown / slowest);
    }

    int64_t play() {
        const int64_t num_tasks = durations.size();
        std::fill(free.begin(), free.end(), 0);
        int64_t size = 0, depth = 0, makespan = 0;
        for (int64_t task = 0; task < num_tasks; ++task) {
            remaining[task] = num_predecessors[task];
            ready[task] = 0;
            if (num_predecessors[task] > 0) continue;
            if (durations[task] > 0) {
                queue.push(size++, 0, task);
            } else {
                start[task] = end[task] = 0;
                stack[depth++] = task;
            }
        }
        while (size > 0 || depth > 0) {
            int64_t task, time;
            if (depth == 0) {
                task = queue.task[0];
                queue.pop(size--);
                time = ready[task];
                const int64_t first = set_offsets[resource_sets[task]];
                const int64_t last = set_offsets[resource_sets[task] + 1];
                for (int64_t i = first; i < last; ++i)
                    time = std::max(time, free[set_resources[i]]);
                start[task] = time;
                if (!contention.empty()) {
                    const int64_t *begin = &contention[1 + resource_sets[task]];
                    int64_t busy = time;
                    for (int64_t i = begin[0]; i < begin[1]; ++i)
                        busy = std::max(busy, free[contention[i]]);
                    time += lost(durations[task], busy - time);
                }
                time += durations[task];
                end[task] = time;
                for (int64_t i = first; i < last; ++i) free[set_resources[i]] = time;
                makespan = std::max(makespan, time);
            } else {
                task = stack[--depth];
                time = end[task];
            }
            for (int64_t edge = successor_offsets[task]; edge < successor_offsets[task + 1]; ++edge) {
                const int64_t after = successors[edge];
                ready[after] = std::max(ready[after], time);
                if (--remaining[after] > 0) continue;
                if (durations[after] > 0) {
                    queue.push(size++, ready[after], after);
                } else {
                    start[after] = end[after] = ready[after];
                    stack[depth++] = after;
                }
            }
        }
        return makespan;
    }
};

static Ints read(std::FILE *file, int64_t count) {
    Ints values(count);
    if (std::fread(values.data(), sizeof(int64_t), count, file) != static_cast<size_t>(count)) {
        std::fprintf(stderr, "the file is too short\n");
        std::exit(1);
    }
    return values;
}

int main(int argc, char **argv) {
    std::FILE *file = argc == 3 ? std::fopen(argv[1], "rb") : nullptr;
    if (!file) {
        std::fprintf(stderr, "usage: engine GRAPH REPEATS\n");
        return 1;
    }
    const Ints sizes = read(file, 6);
    const int64_t num_tasks = sizes[0];
    Engine engine;
    engine.successor_offsets = read(file, num_tasks + 1);
    engine.successors = read(file, sizes[1]);
    engine.num_predecessors = read(file, num_tasks);
    engine.durations = read(file, num_tasks);
    engine.resource_sets = read(file, num_tasks);
    engine.set_offsets = read(file, sizes[2] + 1);
    engine.set_resources = read(file, sizes[3]);
    engine.contention = read(file, sizes[5]);
    std::fclose(file);
    for (Ints *work : {&engine.remaining, &engine.stack, &engine.ready, &engine.start, &engine.end,
                       &engine.queue.ready, &engine.queue.task})
        work->resize(num_tasks);
    engine.free.resize(sizes[4]);
    int64_t makespan = engine.play(), best = INT64_MAX;
    for (int repeat = std::atoi(argv[2]); repeat > 0; --repeat) {
        const auto begin = std::chrono::steady_clock::now();
        makespan = engine.play();
        const auto took = std::chrono::steady_clock::now() - begin;
        best = std::min<int64_t>(
            best, std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    }
    std::printf("%lld %lld\n", static_cast<long long>(makespan), static_cast<long long>(best));
}
