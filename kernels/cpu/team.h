// Threads that run a job of phases, each of so many chunks. No job is ever waited for by a thread that has nothing of it.
//
// One word says which phase is open: {epoch | phase}. Of each phase every thread has chunks of its own, side by side, and
// takes them in order, so that what it reads goes on where it stopped; then it takes others'. A word for each thread says
// how many of its chunks are taken. Who brings the last chunks of a phase opens the next. So a phase ends when its chunks
// are done and not when all threads have come: one that the system has put aside while it held no chunk delays nobody, and
// a late one finds another epoch and goes.
// Within a phase threads wait briefly by spinning, then yield; between jobs they spin, then sleep. Who waits for one that
// the system has put aside while it held chunks gives it its core, and waits for that one's.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "place.h"

namespace octavo {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Job {
    virtual void run(uint32_t phase, uint32_t chunk, uint32_t chunks, int thread) = 0;

protected:
    ~Job() = default;
};

// What threads do once a job has nothing left for them, before they wait for the next one, which does not wait for them.
struct Rest {
    virtual void rest() = 0;

protected:
    ~Rest() = default;
};

class Team {
public:
    static constexpr uint32_t MOST_PHASES = 1u << 12, MOST_CHUNKS = (1u << 20) - 1;

    explicit Team(int threads, Rest* rest = nullptr);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return int(workers_.size()) + 1; }
    // Run all phases; phase p has chunks[p] (0: it is skipped). The caller takes part as thread 0. `seconds`, if it is
    // not null, has a number for each phase, to which is added how long it was open.
    void run(Job& job, const std::vector<uint32_t>& chunks, double* seconds = nullptr);

private:
    struct alignas(64) Own {
        std::atomic<uint64_t> word{0};  // {epoch | phase | how many of the thread's chunks are taken}
        // Apart from the word, which others read in each phase:
        alignas(64) std::atomic<bool> holds{false};  // chunks that are not done, or is about to open the next phase
        std::atomic<uint64_t> worked{0};  // at the last look of one that waits: see `Place::worked`
        Place place;
    };

    // What a chunk throws ends the process: nobody could say that the chunk is done, and the next job would count it.
    void work(int thread, uint32_t epoch) noexcept;
    void serve(int thread);
    uint32_t take(uint32_t owner, uint64_t word, uint32_t chunks);
    void look(int thread);
    void open(uint32_t epoch, uint32_t phase);
    void note(uint32_t phase);

    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::unique_ptr<std::atomic<uint32_t>[]> chunks_;
    const std::unique_ptr<Own[]> own_;  // by thread
    Rest* const rest_;
    std::atomic_flag changing_ = ATOMIC_FLAG_INIT;  // a thread changes its core with another's
    uint32_t phases_ = 0;  // this and the job: read only by holders of a chunk
    Job* job_ = nullptr;
    double* seconds_ = nullptr;
    std::chrono::steady_clock::time_point opened_;
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
