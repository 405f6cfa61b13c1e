// Where a thread runs, and how one that only waits gives its core to one that the system has put aside.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

#if defined(__linux__)

// All is written by the thread itself, and read by others at any time.
class Place {
public:
    // Of the thread that calls.
    void here() {
        clockid_t clock;
        thread_.store(pid_t(syscall(SYS_gettid)), std::memory_order_relaxed);
        clock_.store(pthread_getcpuclockid(pthread_self(), &clock) ? NONE : clock, std::memory_order_relaxed);
    }
    void seen() { core_.store(sched_getcpu(), std::memory_order_relaxed); }

    // Processor time that the thread has had, in ns; 0 if that is not known.
    uint64_t worked() const {
        const clockid_t clock = clock_.load(std::memory_order_relaxed);
        timespec t;
        if (clock == NONE || clock_gettime(clock, &t)) return 0;
        return uint64_t(t.tv_sec) * 1000000000 + uint64_t(t.tv_nsec);
    }

    // The thread that calls has nothing to do and `late` waits for a core: it gets this one, and the caller goes to where
    // that was, or if they share this one, to one that is not `taken`. Afterwards each may run where it might before.
    template <class Taken>
    static void change(const Place& late, Taken taken) {
        const pid_t thread = late.thread_.load(std::memory_order_relaxed);
        const int here = sched_getcpu();
        int there = late.core();
        cpu_set_t mine, its;
        if (here < 0 || there < 0 || sched_getaffinity(0, sizeof mine, &mine)) return;
        if (here == there) {
            for (there = 0; there < CPU_SETSIZE && (!CPU_ISSET(there, &mine) || taken(there)); there++) {}
            if (there == CPU_SETSIZE) return;
        } else if (!CPU_ISSET(there, &mine) || sched_getaffinity(thread, sizeof its, &its) || !CPU_ISSET(here, &its)) {
            return;
        } else {
            move(thread, here);
        }
        move(0, there);
    }
    int core() const { return core_.load(std::memory_order_relaxed); }

private:
    static constexpr clockid_t NONE = CLOCK_REALTIME;  // no thread's

    static void move(pid_t thread, int core) {
        cpu_set_t allowed, one, now;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        if (sched_getaffinity(thread, sizeof allowed, &allowed) || !CPU_ISSET(core, &allowed)) return;
        // A mask that somebody else has set meanwhile stays: the thread that calls may have been put aside in between.
        if (sched_setaffinity(thread, sizeof one, &one) || sched_getaffinity(thread, sizeof now, &now)) return;
        if (CPU_EQUAL(&one, &now)) sched_setaffinity(thread, sizeof allowed, &allowed);
    }
    std::atomic<pid_t> thread_{0};
    std::atomic<clockid_t> clock_{NONE};
    std::atomic<int> core_{-1};
};

#else

class Place {
public:
    void here() {}
    void seen() {}
    uint64_t worked() const { return 0; }
    template <class Taken>
    static void change(const Place&, Taken) {}
    int core() const { return -1; }
};

#endif

}  // namespace octavo
