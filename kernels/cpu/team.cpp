#include "team.h"

#include "isa.h"

namespace octavo {

namespace {

constexpr int SPINS_BETWEEN_JOBS = 2000;  // some tens of microseconds
constexpr int SPINS_IN_PHASE = 4000;
constexpr int SPINS_BETWEEN_LOOKS = 500;  // times threads: many looks would hinder those that work

constexpr uint32_t FINISHED = Team::MOST_PHASES - 1;  // instead of a phase: nothing of this epoch is left to take
constexpr uint32_t NONE = ~uint32_t(0);

constexpr uint64_t word_of(uint32_t epoch, uint32_t phase) { return uint64_t(epoch) << 32 | uint64_t(phase) << 20; }
constexpr uint32_t epoch_of(uint64_t word) { return uint32_t(word >> 32); }
constexpr uint32_t phase_of(uint64_t word) { return uint32_t(word >> 20) & (Team::MOST_PHASES - 1); }
constexpr uint32_t taken_of(uint64_t word) { return uint32_t(word) & Team::MOST_CHUNKS; }
constexpr uint64_t start_of(uint64_t word) { return word >> 20 << 20; }

}  // namespace

Team::Team(int threads, Rest* rest)
    : chunks_(new std::atomic<uint32_t>[MOST_PHASES]()), own_(new Own[size_t(threads)]), rest_(rest) {
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
    own_[0].place.here();
    job_ = &job;
    if ((seconds_ = seconds)) opened_ = std::chrono::steady_clock::now();
    // Before the numbers of chunks: a late thread that reads one of these finds nothing of its own job left to take.
    for (int i = 0; i < threads(); i++) own_[size_t(i)].word.store(word_of(epoch, 0), std::memory_order_relaxed);
    for (size_t p = 0; p < chunks.size(); p++) chunks_[p].store(chunks[p], std::memory_order_release);
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

// The next of the chunks that are `owner`'s in the phase that begins with `word`, or NONE. Words only go up, so nothing is
// taken twice, nor of a phase that is over: all its chunks are taken, or the owner's word is a later one's.
uint32_t Team::take(uint32_t owner, uint64_t word, uint32_t chunks) {
    const auto first_of = [&](uint32_t thread) { return uint32_t(uint64_t(chunks) * thread / uint32_t(threads())); };
    const uint32_t first = first_of(owner), count = first_of(owner + 1) - first;
    std::atomic<uint64_t>& own = own_[owner].word;
    for (uint64_t before = own.load(std::memory_order_relaxed);;) {
        const int64_t later = int64_t(start_of(before) - word);
        const uint32_t taken = later < 0 ? 0 : taken_of(before);
        if (later > 0 || taken >= count) return NONE;
        if (own.compare_exchange_weak(before, word + taken + 1, std::memory_order_relaxed)) return first + taken;
    }
}

// Who waits looks for one that holds chunks and has had no processor since the last look, whoever's that was.
void Team::look(int thread) {
    const auto taken = [&](int core) {
        for (int i = 0; i < threads(); i++)
            if (own_[size_t(i)].place.core() == core) return true;
        return false;
    };
    for (int i = 0; i < threads(); i++) {
        Own& other = own_[size_t(i)];
        if (i == thread || !other.holds.load(std::memory_order_relaxed)) continue;
        const uint64_t worked = other.place.worked(), before = other.worked.exchange(worked, std::memory_order_relaxed);
        if (worked == 0 || worked != before || changing_.test_and_set(std::memory_order_acquire)) continue;
        other.worked.store(0, std::memory_order_relaxed);
        Place::change(other.place, taken);
        changing_.clear(std::memory_order_release);
        return;
    }
}

void Team::work(int thread, uint32_t epoch) noexcept {
    const uint32_t all = uint32_t(threads());
    Own& self = own_[size_t(thread)];
    uint64_t exhausted = ~uint64_t(0);  // the word of the phase of which nothing is left to take; at first no phase's
    int spins = 0;
    for (;;) {
        const uint64_t word = word_.load(std::memory_order_acquire);
        const uint32_t phase = phase_of(word);
        if (epoch_of(word) != epoch || phase == FINISHED) return;
        if (word == exhausted) {
            if (++spins % (SPINS_BETWEEN_LOOKS * int(all)) == 0) look(thread);
            else if (spins < SPINS_IN_PHASE) pause();
            else std::this_thread::yield();
            continue;
        }
        const uint32_t chunks = chunks_[phase].load(std::memory_order_acquire);
        uint32_t done = 0;
        self.place.seen();
        for (uint32_t i = 0; i < all;) {
            const uint32_t chunk = take((uint32_t(thread) + i) % all, word, chunks);
            if (chunk == NONE) {
                i++;
                continue;
            }
            if (!done++) self.holds.store(true, std::memory_order_relaxed);
            job_->run(phase, chunk, chunks, thread);
        }
        if (done && done_.fetch_add(done, std::memory_order_acq_rel) + done == chunks) {
            if (seconds_) note(phase);
            open(epoch, phase + 1);
        }
        self.holds.store(false, std::memory_order_relaxed);
        exhausted = word;
        spins = 0;
    }
}

void Team::serve(int thread) {
    own_[size_t(thread)].place.here();
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
