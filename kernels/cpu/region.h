// Memory from the system, and a pool of it that is taken ahead of those who write there.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace octavo {

// Memory that is zero at first and is taken from the system only where it is written.
class Region {
public:
    Region() = default;
    explicit Region(size_t bytes) : bytes_(bytes ? bytes : 1) {
        void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(p);
#if defined(MADV_HUGEPAGE)
        if (bytes_ >= size_t(8) << 20) madvise(p, bytes_, MADV_HUGEPAGE);
#endif
    }
    Region(Region&& other) noexcept { swap(other); }
    Region& operator=(Region&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Region() {
        if (data_) munmap(data_, bytes_);
    }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }
    // Take [from, from + count) from the system now. What is there stays.
    void touch(size_t from, size_t count) const {
        constexpr size_t PAGE = 4096;
        for (size_t i = from; i < bytes_ && i < from + count; i += PAGE) {
            volatile uint8_t* byte = data_ + i;
            *byte = *byte;
        }
    }

    // The same, be somebody writing there or not; false where the system cannot (Linux before 5.14).
    bool populate(size_t from, size_t to) const {
#if defined(__linux__)
        constexpr int POPULATE_WRITE = 23;
        constexpr uintptr_t PAGE = 64 << 10;  // the largest that there is: an Arm's
        const uintptr_t first = std::max(uintptr_t(data_), (uintptr_t(data_) + from) / PAGE * PAGE);
        return madvise(reinterpret_cast<void*>(first), uintptr_t(data_) + to - first, POPULATE_WRITE) == 0;
#else
        return false;
#endif
    }
    // Where the huge page ends in which byte `at` may be.
    size_t page_end(size_t at) const {
        constexpr uintptr_t HUGE_PAGE = 2 << 20;
        const uintptr_t end = (uintptr_t(data_) + at) / HUGE_PAGE * HUGE_PAGE + HUGE_PAGE - uintptr_t(data_);
        return end < bytes_ ? end : bytes_;
    }

private:
    void swap(Region& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// A pool of layers, each written from its beginning on as more is in use. A huge page that a step is the first to write to
// is zeroed while it waits, and layers come to theirs together: so pages are taken before, a few at a time, between steps.
class Ahead {
public:
    static constexpr size_t MARGIN = 1 << 20;  // of a layer

    Ahead(const Region& pool, size_t layer_bytes, int layers) : pool_(pool), layer_bytes_(layer_bytes) {
        for (int layer = 0; layer < layers; layer++) taken_.push_back(size_t(layer) * layer_bytes);
    }
    // Each layer's first bytes are there. Waits for who takes pages: of a step before.
    void has(size_t bytes) {
        while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
        for (size_t layer = 0; layer < taken_.size(); layer++)
            taken_[layer] = std::max(taken_[layer], layer * layer_bytes_ + bytes);
        busy_.clear(std::memory_order_release);
    }
    // A step wrote so many bytes, in no layer beyond its first `end`. Its successors are expected to go on like that: twice
    // the pages that they can fill are taken after each.
    void wrote(size_t bytes, size_t end) {
        constexpr size_t HUGE_PAGE = 2 << 20;
        const size_t most = end + MARGIN < layer_bytes_ ? end + MARGIN : layer_bytes_;
        if (most > wanted_.load(std::memory_order_relaxed)) wanted_.store(most, std::memory_order_relaxed);
        pages_.store(int(1 + 2 * bytes / HUGE_PAGE), std::memory_order_relaxed);
    }
    // Takes some pages, if another thread is not doing so.
    void take() {
        if (busy_.test_and_set(std::memory_order_acquire)) return;
        const size_t wanted = wanted_.load(std::memory_order_relaxed);
        for (int left = pages_.exchange(0, std::memory_order_relaxed); left > 0 && layer_ < taken_.size(); left--) {
            size_t passed = 0;
            while (passed < taken_.size() && taken_[layer_] >= layer_ * layer_bytes_ + wanted)
                layer_ = (layer_ + 1) % taken_.size(), passed++;
            if (passed == taken_.size()) break;
            const size_t to = pool_.page_end(taken_[layer_]);
            if (!pool_.populate(taken_[layer_], to)) layer_ = taken_.size();  // never again
            else taken_[layer_] = to;
        }
        busy_.clear(std::memory_order_release);
    }

private:
    const Region& pool_;
    const size_t layer_bytes_;
    std::vector<size_t> taken_;  // by layer: up to which byte of the pool
    size_t layer_ = 0;
    std::atomic<size_t> wanted_{0};  // of each layer
    std::atomic<int> pages_{0};
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace octavo
