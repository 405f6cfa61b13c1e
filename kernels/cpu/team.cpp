#include "team.h"

#include "isa.h"

namespace octavo {

namespace {

constexpr int SPINS_BETWEEN_JOBS = 2000;  // some tens of microseconds
constexpr int SPINS_IN_PHASE = 4000;

constexpr uint64_t word_of(uint32_t epoch, uint32_t phase) { return uint64_t(epoch) << 32 | uint64_t(phase) << 20; }
constexpr uint32_t epoch_of(uint64_t word) { return uint32_t(word >> 32); }
constexpr uint32_t phase_of(uint64_t word) { return uint32_t(word >> 20) & (Team::MOST_PHASES - 1); }
constexpr uint32_t FINISHED = Team::MOST_PHASES - 1;  // instead of a phase: nothing of this epoch is left to claim
constexpr uint32_t claims_of(uint64_t word) { return uint32_t(word) & Team::MOST_CHUNKS; }

}  // namespace

Team::Team(int threads, Rest* rest)
    : chunks_(new std::atomic<uint32_t>[MOST_PHASES]()), taken_(new Taken[size_t(threads)]), rest_(rest) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Team::run(Job& job, const std::vector<uint32_t>& chunks, double* seconds) {
    const uint32_t epoch = epoch_of(word_.load(std::memory_order_relaxed)) + 1;
    job_ = &job;
    if ((seconds_ = seconds)) opened_ = std::chrono::steady_clock::now();
    for (size_t p = 0; p < chunks.size(); p++) chunks_[p].store(chunks[p], std::memory_order_relaxed);
    phases_ = uint32_t(chunks.size());
    open(epoch, 0);
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    work(0, epoch);
}

// Opens the first phase from `phase` on that has chunks, or ends the job.
void Team::open(uint32_t epoch, uint32_t phase) {
    while (phase < phases_ && chunks_[phase].load(std::memory_order_relaxed) == 0) phase++;
    done_.store(0, std::memory_order_relaxed);
    word_.store(word_of(epoch, phase < phases_ ? phase : FINISHED));
}

void Team::note(uint32_t phase) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[phase] += std::chrono::duration<double>(now - opened_).count();
    opened_ = now;
}

// A chunk for who holds a claim. Only they come here, and none does any more when the next phase is opened.
uint32_t Team::take(int thread, uint64_t claim, uint32_t chunks) {
    const uint32_t all = uint32_t(threads());
    const auto first_of = [&](uint32_t owner) { return uint32_t(uint64_t(chunks) * owner / all); };
    for (uint32_t owner = uint32_t(thread);; owner = (owner + 1) % all) {
        const uint32_t first = first_of(owner), own = first_of(owner + 1) - first;
        std::atomic<uint64_t>& word = taken_[owner].word;
        for (uint64_t before = word.load(std::memory_order_relaxed);;) {
            const bool begun = before >> 20 == claim >> 20;
            const uint32_t n = begun ? claims_of(before) : 0;
            if (n == own) break;
            const uint64_t after = (claim >> 20 << 20) + n + 1;
            if (word.compare_exchange_weak(before, after, std::memory_order_relaxed)) return first + n;
        }
    }
}

void Team::work(int thread, uint32_t epoch) noexcept {
    int spins = 0;
    for (;;) {
        uint64_t word = word_.load(std::memory_order_acquire);
        const uint32_t phase = phase_of(word);
        if (epoch_of(word) != epoch || phase == FINISHED) return;
        const uint32_t chunks = chunks_[phase].load(std::memory_order_relaxed);
        if (claims_of(word) < chunks) {
            // From a stale `phase` or `chunks` nothing follows: the word has moved on then, and this fails.
            if (!word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) continue;
            job_->run(phase, take(thread, word, chunks), chunks, thread);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) {
                if (seconds_) note(phase);
                open(epoch, phase + 1);
            }
            spins = 0;
        } else if (++spins < SPINS_IN_PHASE) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

void Team::serve(int thread) {
    uint32_t seen = 0;
    const auto news = [&] { return epoch_of(word_.load()) != seen || stop_.load(); };
    for (;;) {
        for (int i = 0; i < SPINS_BETWEEN_JOBS && !news(); i++) pause();
        if (!news()) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_++;
            wake_.wait(lock, news);
            sleepers_--;
        }
        if (stop_.load()) return;
        seen = epoch_of(word_.load(std::memory_order_acquire));
        work(thread, seen);
        if (rest_) rest_->rest();
    }
}

}  // namespace octavo

OCT_API int64_t oct_team_stress(int32_t threads, int32_t phases, int32_t chunks, int32_t rounds) {
    // Plain numbers on purpose: a phase that begins before the one before it is done, or a chunk that is run twice,
    // shows in the sums (and to a thread sanitizer).
    struct Sum : octavo::Job {
        std::vector<int64_t> cells;
        uint32_t width;
        void run(uint32_t phase, uint32_t chunk, uint32_t, int) override {
            const int64_t before = phase ? cells[size_t(phase - 1) * width + width - 1 - chunk] : 0;
            cells[size_t(phase) * width + chunk] += before + 1;
        }
    } job;
    job.width = uint32_t(chunks);
    octavo::Team team(threads);
    int64_t total = 0;
    for (int round = 0; round < rounds; round++) {
        job.cells.assign(size_t(phases) * size_t(chunks), 0);
        std::vector<uint32_t> plan(job.cells.size() / job.width, job.width);
        team.run(job, plan);
        for (int64_t cell : job.cells) total += cell;
    }
    return total;
}

OCT_API double oct_read_bandwidth(int32_t threads, uint64_t bytes, int32_t repeats) {
    struct Read : octavo::Job {
        std::vector<uint64_t> data;
        std::vector<uint64_t> sums;
        void run(uint32_t, uint32_t chunk, uint32_t chunks, int) override {
            const size_t from = data.size() * chunk / chunks, to = data.size() * (chunk + 1) / chunks;
            uint64_t sum[8] = {};
            for (size_t i = from; i + 8 <= to; i += 8)
                for (int j = 0; j < 8; j++) sum[j] ^= data[i + j];
            for (uint64_t s : sum) sums[chunk] ^= s;
        }
    } job;
    job.data.assign(bytes / 8, 3);
    job.sums.assign(size_t(threads) * 4, 0);
    octavo::Team team(threads);
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        team.run(job, {uint32_t(threads) * 4});
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        if (double(bytes) / took.count() > best) best = double(bytes) / took.count();
    }
    return best;
}
