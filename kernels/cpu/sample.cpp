// Rows that are drawn from, or reported on, as chunks of a job: a row is one thread's.
#include "isa.h"
#include "model.h"
#include "team.h"

using namespace octavo;

namespace {

template <class Ask, class Work>
struct Rows final : Job {
    Rows(Ask* asks, int32_t count, Work work) : asks(asks), count(count), work(work) {}

    void run(uint32_t, uint32_t chunk, uint32_t chunks, int) override {
        const int64_t from = int64_t(count) * chunk / chunks, to = int64_t(count) * (chunk + 1) / chunks;
        for (int64_t i = from; i < to; i++) work(asks[i]);
    }

    Ask* asks;
    int32_t count;
    Work work;
};

template <class Ask, class Work>
void each(OctModel* model, Ask* asks, int32_t count, Work work) {
    Rows<Ask, Work> job(asks, count, work);
    if (model && count > 1) team_of(*model).run(job, {uint32_t(count)});
    else if (count > 0) job.run(0, 0, 1, 0);
}

const Isa& isa_up_to(int32_t level) { return isa_of(level < oct_isa_best() ? level : oct_isa_best()); }

}  // namespace

OCT_API void oct_sample(OctModel* model, int32_t level, int32_t vocabulary, OctDraw* asks, int32_t count) {
    const Isa& isa = isa_up_to(level);
    each(model, asks, count, [&isa, vocabulary](OctDraw& ask) { ask.token = isa.sample(ask, vocabulary); });
}

OCT_API void oct_likely(OctModel* model, int32_t level, int32_t vocabulary, OctLikely* asks, int32_t count) {
    const Isa& isa = isa_up_to(level);
    each(model, asks, count, [&isa, vocabulary](OctLikely& ask) { isa.likely(ask, vocabulary); });
}
