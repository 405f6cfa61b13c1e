// A model and its step: the program's operations as phases of a job, and what each of their chunks does.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "isa.h"
#include "team.h"

using namespace octavo;

namespace {

// With so few tokens every thread prepares all rows for itself: cheaper than to wait for each other once more.
constexpr int FEW = 2;
constexpr uint64_t CHUNK_BYTES = 256 << 10;  // of weights: they stay in a core's cache while rows pass by

int least(int a, int b) { return a < b ? a : b; }

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

private:
    void swap(Region& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Room for `rows` rows of activations of up to `columns` columns, in panels.
struct Prepared {
    Region x, q, scale, scaled_sum, sum;
    Prepared() = default;
    Prepared(size_t rows, int columns) : Prepared((rows + LANES - 1) / LANES * LANES * size_t(columns)) {}

private:
    explicit Prepared(size_t n)
        : x(n * 4), q(n), scale(n / GROUP * 4), scaled_sum(n / GROUP * 4), sum(n / GROUP * 4) {}
};

Activations view(const Prepared& p) {
    return {p.x.as<float>(), p.q.as<int8_t>(), p.scale.as<float>(), p.scaled_sum.as<float>(), p.sum.as<int32_t>()};
}

// Put a row at `at`.
void place(const Isa& isa, const float* x, int cols, size_t at, bool int8, const Prepared& to) {
    const size_t panel = at / LANES * LANES, slot = at % LANES, groups = size_t(cols) / GROUP;
    if (!int8) return isa.spread(x, cols, to.x.as<float>() + panel * size_t(cols) + slot);
    const size_t group = panel * groups + slot;
    isa.quantise(x, cols, to.q.as<int8_t>() + panel * size_t(cols) + slot * GROUP, to.scale.as<float>() + group,
                 to.scaled_sum.as<float>() + group, to.sum.as<int32_t>() + group);
}

struct Scratch {
    Prepared rows;
    uint64_t holds = 0;  // the step and phase whose rows these are
    Region row, scores, queries, key, tile;
};

struct Tile {  // queries [first, first + count) of one sequence
    int first, count;
};

}  // namespace

struct OctModel final : Job {
    OctModel(const OctShape& s, const OctOp* program, int32_t count, const int32_t* buffer_widths, int32_t buffers,
             const float* angle_table)
        : shape(s),
          isa(isa_of(least(s.isa, oct_isa_best()))),
          ops(program, program + count),
          widths(buffer_widths, buffer_widths + buffers),
          angles(angle_table),
          padded_dim((s.head_dim + LANES - 1) / LANES * LANES),
          cell(s.kv_kind == OCT_BF16 ? 2 : 4),
          head_bytes(size_t(s.block_size) * size_t(s.head_dim + padded_dim) * cell),
          block_bytes(head_bytes * size_t(s.kv_heads)),
          layer_bytes(block_bytes * size_t(s.blocks)),
          pool(layer_bytes * size_t(s.layers)),
          rows(buffers),
          scratch(size_t(s.threads)),
          team(s.threads) {
        for (const OctOp& op : ops)
            if (op.matrix) widest = op.matrix->cols > widest ? op.matrix->cols : widest;
        for (int width : widths) widest = width > widest ? width : widest;
        widest = (widest + GROUP - 1) / GROUP * GROUP;
        stride = size_t(s.context + LANES - 1) / LANES * LANES;
        for (Scratch& one : scratch) {
            one.rows = Prepared(FEW, widest);
            one.row = Region(size_t(widest) * 4);
            one.scores = Region(stride * MOST_SEEING * 4);
            one.queries = Region(size_t(MOST_SEEING) * size_t(s.head_dim) * 4);
            one.key = Region(size_t(s.head_dim) * 4);
            one.tile = Region(size_t(s.head_dim) * LANES * 4);
        }
        chunks.resize(ops.size() * 2);
    }

    void reserve(int tokens) {
        if (tokens <= capacity) return;
        capacity = tokens;
        for (size_t i = 0; i < widths.size(); i++) rows[i] = Region(size_t(capacity) * size_t(widths[i]) * 4);
        shared = Prepared(size_t(capacity), widest);
        checks = Region(size_t(capacity) * LANES * 4);
    }

    int check(const OctStep& s) const;
    void step(const OctStep& s);
    void run(uint32_t phase, uint32_t chunk, uint32_t total, int thread) override;

    OctShape shape;
    const Isa& isa;
    std::vector<OctOp> ops;
    std::vector<int> widths;
    const float* angles;
    int padded_dim;
    size_t cell, head_bytes, block_bytes, layer_bytes;
    Region pool;
    std::vector<Region> rows;

private:
    float* row(int buffer, int token) const {
        return rows[size_t(buffer)].as<float>() + size_t(token) * size_t(widths[size_t(buffer)]);
    }
    bool int8(const OctOp& op) const { return !shape.exact && (op.matrix->kind == OCT_W4 || op.matrix->kind == OCT_W8); }
    uint32_t product_chunks(const OctOp& op) const;
    void plan();
    void copy();
    void prepare(const OctOp& op, int token, int at, const Prepared& to, int thread) const;
    void linear(const OctOp& op, uint32_t phase, int chunk, int total, int thread);
    void remember(const OctOp& op, int token, int head, int thread) const;
    void attend(const OctOp& op, int unit, int thread) const;
    void head(const OctOp& op, int chunk, int total) const;

    int widest = 0, capacity = 0, group = 1;
    size_t stride = 0;
    Prepared shared;
    Region checks;
    std::vector<Scratch> scratch;
    std::vector<uint32_t> chunks;
    std::vector<Tile> tiles;
    std::vector<float> bests;
    std::vector<int32_t> best_ids;
    uint64_t steps = 0;
    const OctStep* now = nullptr;
    Team team;
};

enum Error { OK, BAD_COUNT, BAD_ID, BAD_POSITION, BAD_SEQUENCE, BAD_TABLE, BAD_SAMPLE, BAD_COPY };

int OctModel::check(const OctStep& s) const {
    if (s.tokens < 0 || s.samples < 0 || s.copies < 0 || s.samples > s.tokens) return BAD_COUNT;
    int vocabulary = INT32_MAX;
    for (const OctOp& op : ops)
        if (op.kind == OCT_EMBED) vocabulary = op.matrix->rows;
    for (int i = 0; i < s.tokens; i++) {
        if (s.ids[i] < 0 || s.ids[i] >= vocabulary) return BAD_ID;
        if (s.positions[i] < 0 || s.positions[i] >= shape.context) return BAD_POSITION;
        if (s.sequences[i] < 0 || s.sequences[i] >= s.tables_count) return BAD_SEQUENCE;
        if (i && s.sequences[i] < s.sequences[i - 1]) return BAD_SEQUENCE;
        if (i && s.sequences[i] == s.sequences[i - 1] && s.positions[i] != s.positions[i - 1] + 1) return BAD_SEQUENCE;
    }
    for (int i = 0; i < s.tokens; i++) {
        if (i + 1 < s.tokens && s.sequences[i + 1] == s.sequences[i]) continue;  // the last one needs most
        const int from = s.table_start[s.sequences[i]], to = s.table_start[s.sequences[i] + 1];
        const int needed = s.positions[i] / shape.block_size + 1;
        if (from < 0 || to - from < needed) return BAD_TABLE;
        for (int b = from; b < from + needed; b++)
            if (s.tables[b] < 0 || s.tables[b] >= shape.blocks) return BAD_TABLE;
    }
    for (int i = 0; i < s.samples; i++)
        if (s.sample_rows[i] < 0 || s.sample_rows[i] >= s.tokens) return BAD_SAMPLE;
    for (int i = 0; i < s.copies; i++)
        if (s.copy_source[i] < 0 || s.copy_source[i] >= shape.blocks || s.copy_target[i] < 0 ||
            s.copy_target[i] >= shape.blocks)
            return BAD_COPY;
    return OK;
}

void OctModel::copy() {
    std::vector<uint8_t> held(block_bytes * size_t(now->copies));
    for (int layer = 0; layer < shape.layers; layer++) {
        uint8_t* base = pool.as<uint8_t>() + size_t(layer) * layer_bytes;
        for (int i = 0; i < now->copies; i++)
            memcpy(held.data() + size_t(i) * block_bytes, base + size_t(now->copy_source[i]) * block_bytes, block_bytes);
        for (int i = 0; i < now->copies; i++)
            memcpy(base + size_t(now->copy_target[i]) * block_bytes, held.data() + size_t(i) * block_bytes, block_bytes);
    }
}

uint32_t OctModel::product_chunks(const OctOp& op) const {
    const int units = op.mode == OCT_GATED ? op.matrix->blocks / 2 : op.matrix->blocks;
    const uint64_t bytes = uint64_t(op.matrix->blocks) * op.matrix->block_bytes;
    int wanted = int((bytes + CHUNK_BYTES - 1) / CHUNK_BYTES);
    if (shape.threads > 1) wanted = wanted > 4 * shape.threads ? wanted : 4 * shape.threads;
    return uint32_t(least(units, wanted));
}

void OctModel::plan() {
    group = 1;
    for (const OctOp& op : ops)
        if (op.kind == OCT_ATTEND) group = op.heads / shape.kv_heads;
    const int most = group < MOST_SEEING ? MOST_SEEING / group : 1;
    tiles.clear();
    for (int i = 0; i < now->tokens; i++) {
        if (i && now->sequences[i] == now->sequences[i - 1] && tiles.back().count < most) tiles.back().count++;
        else tiles.push_back({i, 1});
    }
    bool alone = true;
    for (int i = 1; i < now->tokens; i++) alone = alone && now->sequences[i] != now->sequences[i - 1];
    const uint32_t some = shape.threads > 1 ? uint32_t(8 * shape.threads) : 1;
    const uint32_t tokens = uint32_t(now->tokens), by_token = tokens < some ? tokens : some;
    for (size_t i = 0; i < ops.size(); i++) {
        uint32_t &first = chunks[2 * i], &second = chunks[2 * i + 1];
        first = second = 0;
        switch (ops[i].kind) {
            case OCT_EMBED: second = by_token; break;
            case OCT_LINEAR:
                first = now->tokens > FEW ? by_token : 0;
                second = product_chunks(ops[i]);
                break;
            case OCT_ATTEND: {
                const uint32_t units = uint32_t(tiles.size()) * uint32_t(shape.kv_heads);
                first = alone ? 0 : by_token;
                second = units < 4 * some ? units : 4 * some;
                break;
            }
            case OCT_HEAD:
                first = by_token;
                second = now->samples ? product_chunks(ops[i]) : 0;
                bests.assign(size_t(second) * size_t(now->samples), -3.4e38f);
                best_ids.assign(size_t(second) * size_t(now->samples), 0);
                memset(checks.as<float>(), 0, size_t(now->samples) * LANES * 4);
                break;
        }
    }
}

void OctModel::step(const OctStep& s) {
    now = &s;
    steps++;
    if (s.copies) copy();
    if (!s.tokens) return;
    reserve(s.tokens);
    plan();
    team.run(*this, chunks);
    const size_t samples = size_t(s.samples), parts = samples ? bests.size() / samples : 0;
    for (size_t m = 0; m < samples; m++) {
        float best = -3.4e38f;
        s.best[m] = 0;
        for (size_t part = 0; part < parts; part++)
            if (bests[part * samples + m] > best) {
                best = bests[part * samples + m];
                s.best[m] = best_ids[part * samples + m];
            }
        s.sample_finite[m] = isa.finite(checks.as<float>() + m * LANES, LANES);
    }
}

void OctModel::run(uint32_t phase, uint32_t part, uint32_t parts, int thread) {
    const OctOp& op = ops[phase / 2];
    const bool second = phase % 2;
    const int chunk = int(part), total = int(parts);
    const auto range = [&](int n, int& from, int& to) {
        from = int(int64_t(n) * chunk / total);
        to = int(int64_t(n) * (chunk + 1) / total);
    };
    int from, to;
    switch (op.kind) {
        case OCT_EMBED:
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) isa.embed(*op.matrix, now->ids[i], row(op.out, i));
            break;
        case OCT_LINEAR:
            if (second) return linear(op, phase, chunk, total, thread);
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) prepare(op, i, i, shared, thread);
            break;
        case OCT_ATTEND:
            if (second) {
                range(int(tiles.size()) * shape.kv_heads, from, to);
                for (int unit = from; unit < to; unit++) attend(op, unit, thread);
            } else {
                range(now->tokens, from, to);
                for (int i = from; i < to; i++)
                    for (int h = 0; h < shape.kv_heads; h++) remember(op, i, h, thread);
            }
            break;
        case OCT_HEAD:
            if (second) return head(op, chunk, total);
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) now->finite[i] = isa.finite(row(op.in, i), widths[size_t(op.in)]);
            range(now->samples, from, to);
            for (int i = from; i < to; i++) prepare(op, now->sample_rows[i], i, shared, thread);
            break;
    }
}

// Row `token` of the input as row `at` of `to`: normed if there is a norm, and as the matrix wants it.
void OctModel::prepare(const OctOp& op, int token, int at, const Prepared& to, int thread) const {
    const float* x = row(op.in, token);
    const int cols = op.matrix->cols;
    if (op.norm) {
        float* normed = scratch[size_t(thread)].row.as<float>();
        isa.norm(x, op.norm, (cols + LANES - 1) / LANES * LANES, cols, op.eps, normed);
        x = normed;
    }
    place(isa, x, cols, size_t(at), int8(op), to);
}

void OctModel::linear(const OctOp& op, uint32_t phase, int chunk, int total, int thread) {
    const Prepared* from = &shared;
    if (now->tokens <= FEW) {
        Scratch& own = scratch[size_t(thread)];
        from = &own.rows;
        if (const uint64_t wanted = steps << 12 | phase; own.holds != wanted) {
            own.holds = wanted;
            for (int i = 0; i < now->tokens; i++) prepare(op, i, i, own.rows, thread);
        }
    }
    const int unit = op.mode == OCT_GATED ? 2 : 1, units = op.matrix->blocks / unit;
    Sink sink{};
    sink.mode = op.mode == OCT_GATED ? Sink::GATED : op.mode == OCT_ADD ? Sink::ADD : Sink::STORE;
    sink.out = row(op.out, 0);
    sink.stride = size_t(widths[size_t(op.out)]);
    sink.bias = op.bias;
    isa.product(*op.matrix, unit * int(int64_t(units) * chunk / total), unit * int(int64_t(units) * (chunk + 1) / total),
                view(*from), now->tokens, shape.exact, sink);
}

void OctModel::remember(const OctOp& op, int token, int head, int thread) const {
    const int d = shape.head_dim, half = d / 2, position = now->positions[token];
    const float* key = row(op.in, token) + (op.heads + head) * d;
    const float* cosines = angles + size_t(position) * size_t(half);
    float* turned = scratch[size_t(thread)].key.as<float>();
    isa.rotate(key, cosines, cosines + size_t(shape.context) * size_t(half), half, 1.f, turned);
    const int block = now->tables[now->table_start[now->sequences[token]] + position / shape.block_size];
    isa.remember(turned, key + shape.kv_heads * d, d, padded_dim, shape.block_size, position % shape.block_size,
                 shape.kv_kind == OCT_BF16,
                 pool.as<uint8_t>() + size_t(op.layer) * layer_bytes + size_t(block) * block_bytes +
                     size_t(head) * head_bytes);
}

// A unit is a tile of queries through one key head; late tiles, which see most, come first.
void OctModel::attend(const OctOp& op, int unit, int thread) const {
    const Scratch& own = scratch[size_t(thread)];
    const int count = int(tiles.size()), head = unit / count, d = shape.head_dim, half = d / 2;
    const Tile tile = tiles[size_t(count - 1 - unit % count)];
    const int sequence = now->sequences[tile.first];
    if (chunks[size_t(2 * (&op - ops.data()))] == 0) remember(op, tile.first, head, thread);
    Attention a{};
    a.pool = pool.as<uint8_t>() + size_t(op.layer) * layer_bytes;
    a.block_bytes = block_bytes;
    a.head_bytes = head_bytes;
    a.table = now->tables + now->table_start[sequence];
    a.kv_head = head;
    a.head_dim = d;
    a.padded_dim = padded_dim;
    a.block_size = shape.block_size;
    a.bf16 = shape.kv_kind == OCT_BF16;
    a.scores = own.scores.as<float>();
    a.stride = stride;
    a.tile = own.tile.as<uint8_t>();
    float* queries = own.queries.as<float>();
    int seen[MOST_SEEING], n = 0;
    float* out[MOST_SEEING];
    const auto flush = [&] {
        if (n) isa.attend(a, queries, n, seen, out);
        n = 0;
    };
    for (int i = tile.first; i < tile.first + tile.count; i++) {
        const int position = now->positions[i];
        const float* cosines = angles + size_t(position) * size_t(half);
        for (int g = 0; g < group; g++) {
            const int h = head * group + g;
            isa.rotate(row(op.in, i) + h * d, cosines, cosines + size_t(shape.context) * size_t(half), half, op.scale,
                       queries + n * d);
            seen[n] = position + 1;
            out[n] = row(op.out, i) + h * d;
            if (++n == MOST_SEEING) flush();
        }
    }
    flush();
}

void OctModel::head(const OctOp& op, int chunk, int total) const {
    Sink sink{};
    sink.mode = Sink::HEAD;
    sink.out = now->logits;
    sink.stride = size_t(op.matrix->rows);
    sink.rows = op.matrix->rows;
    sink.logit_rows = now->logit_rows;
    sink.best = const_cast<float*>(bests.data()) + size_t(chunk) * size_t(now->samples);
    sink.best_id = const_cast<int32_t*>(best_ids.data()) + size_t(chunk) * size_t(now->samples);
    sink.check = checks.as<float>();
    const int blocks = op.matrix->blocks;
    isa.product(*op.matrix, int(int64_t(blocks) * chunk / total), int(int64_t(blocks) * (chunk + 1) / total),
                view(shared), now->samples, shape.exact, sink);
}

OCT_API OctModel* oct_model_new(const OctShape* shape, const OctOp* ops, int32_t count, const int32_t* widths,
                                int32_t buffers, const float* angles) {
    if (size_t(count) * 2 >= Team::MOST_PHASES - 1) return nullptr;
    try {
        return new OctModel(*shape, ops, count, widths, buffers, angles);
    } catch (const std::exception&) {
        return nullptr;
    }
}

OCT_API void oct_model_free(OctModel* model) { delete model; }

OCT_API int32_t oct_step(OctModel* model, const OctStep* step) {
    if (const int error = model->check(*step)) return error;
    model->step(*step);
    return OK;
}

OCT_API const char* oct_error(int32_t code) {
    switch (code) {
        case OK: return "nothing is wrong";
        case BAD_COUNT: return "a negative count, or more samples than tokens";
        case BAD_ID: return "a token id outside of the vocabulary";
        case BAD_POSITION: return "a position outside of the context";
        case BAD_SEQUENCE: return "tokens of a sequence that do not stand together in order";
        case BAD_TABLE: return "a block table that is too short, or a block outside of the pool";
        case BAD_SAMPLE: return "a sample of a token that is not in the step";
        case BAD_COPY: return "a copy from or to a block outside of the pool";
        default: return "an unknown error";
    }
}

OCT_API float* oct_buffer(OctModel* model, int32_t buffer, int32_t tokens) {
    model->reserve(tokens);
    return model->rows[size_t(buffer)].as<float>();
}

OCT_API void oct_linear(int32_t level, const OctMatrix* w, const float* x, int32_t n, int32_t exact, float* y) {
    const Isa& isa = isa_of(least(level, oct_isa_best()));
    const Prepared rows(size_t(n), (w->cols + GROUP - 1) / GROUP * GROUP);
    const bool int8 = !exact && (w->kind == OCT_W4 || w->kind == OCT_W8);
    for (size_t m = 0; m < size_t(n); m++) place(isa, x + m * size_t(w->cols), w->cols, m, int8, rows);
    Sink sink{};
    sink.mode = Sink::STORE;
    sink.out = y;
    sink.stride = size_t(w->blocks) * LANES;
    isa.product(*w, 0, w->blocks, view(rows), n, exact, sink);
}
