// A model and its step: the program's operations as phases of a job, and what each of their chunks does.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "adapt.h"
#include "check.h"
#include "isa.h"
#include "model.h"
#include "region.h"
#include "team.h"

using namespace octavo;

namespace {

// With so few tokens every thread prepares all rows for itself: cheaper than to wait for each other once more.
constexpr int FEW = 2;
constexpr uint64_t CHUNK_BYTES = 256 << 10;  // of weights: they stay in a core's cache while rows pass by

int least(int a, int b) { return a < b ? a : b; }

// Room for `rows` rows of activations of up to `columns` columns, in panels.
struct Prepared {
    Region x, q, scale, scaled_sum, excess, low, half;
    Prepared() = default;
    Prepared(size_t rows, int columns) : Prepared(cells(rows, columns)) {}
    explicit Prepared(size_t n)
        : x(n * 4), q(n), scale(n / GROUP * 4), scaled_sum(n / GROUP * 4), excess(n / GROUP * 4), low(n / GROUP * 4), half(n * 2) {}
    void touch(size_t most) const {
        for (const Region* region : {&x, &q, &scale, &scaled_sum, &excess, &low, &half}) region->touch(0, most);
    }
    static size_t cells(size_t rows, int columns) { return (rows + LANES - 1) / LANES * LANES * size_t(columns); }
};

Activations view(const Prepared& p) {
    return {p.x.as<float>(),          p.q.as<int8_t>(),    p.scale.as<float>(),
            p.scaled_sum.as<float>(), p.excess.as<int32_t>(), p.low.as<int32_t>(), p.half.as<uint16_t>()};
}

// The first block of a chunk: an even one, so that gates stay with what they gate and kernels find their blocks in pairs.
int block_of(const OctMatrix& w, int chunk, int total) {
    return least(w.blocks, 2 * int(int64_t((w.blocks + 1) / 2) * chunk / total));
}

// How products want rows.
enum Form { FLOATS, INTEGERS, HALVES };

// Columns from part/parts to (part + 1)/parts of a panel; a part begins at a whole group.
void make_panel(const Isa& isa, const float* const* rows, int n, int cols, Form form, int part, int parts, const Activations& to) {
    const int groups = (cols + GROUP - 1) / GROUP;
    const int first = groups * part / parts, last = groups * (part + 1) / parts;
    if (form == INTEGERS) return isa.quantise(rows, n, first, last, to);
    (form == HALVES ? isa.halve : isa.spread)(rows, n, first * GROUP, least(last * GROUP, cols), to);
}

// Whether a prompt's rows are computed in a way of their own. Not where a weight would lose more than its format has lost.
bool prompts(const Isa& isa, int kind) { return isa.prompt_product && kind != OCT_F32; }

int up(int n) { return (n + LANES - 1) / LANES * LANES; }
int grouped(int n) { return (n + GROUP - 1) / GROUP * GROUP; }

// Per position a head takes (padded_dim + head_dim) cells, as bytes head_dim up to fours and two scales a group.
HeadLayout layout_of(const OctShape& s, const Isa& isa) {
    HeadLayout l{s.kv_kind, s.head_dim, up(s.head_dim), s.block_size, 0, 0, 0, 0, false, 1};
    l.tiles = isa.tiles && s.kv_kind != OCT_F32 && !s.latent;
    l.pair = l.tiles && s.kv_kind == OCT_BF16 && s.head_dim % 2 == 0 && s.block_size % 2 == 0 ? 2 : 1;
    if (s.latent) {
        l.bytes = size_t(s.block_size) * size_t(l.padded_dim) * (s.kv_kind == OCT_BF16 ? 2 : 4);
        return l;
    }
    const size_t size = size_t(s.block_size), dims = size_t(s.head_dim), groups = (dims + GROUP - 1) / GROUP;
    const bool bytes = s.kv_kind == OCT_I8;
    const size_t cell = bytes ? 1 : s.kv_kind == OCT_BF16 ? 2 : 4;
    l.value_scales = bytes ? size * groups * 4 : 0;
    l.keys = 2 * l.value_scales;
    l.values = l.keys + size * (bytes ? (dims + 3) / 4 * 4 : dims) * cell;
    l.bytes = l.values + size * size_t(l.padded_dim) * cell;
    return l;
}

struct Scratch {
    Prepared rows;
    uint64_t holds = 0;  // the step and phase whose rows these are
    Region row, moved, scores, queries, slopes, rounded, head, key, tile, parts;
    AdaptScratch adapt;
};

struct Tile {  // queries [first, first + count) of one sequence
    int first, count;
};

// A token's row in what an expert computes.
struct Choice {
    int expert, slot;
    float weight;
};

// What one thread attends to at a time: a tile through one key head, all of it or one segment.
struct Unit {
    int tile, head, segment;
};

// Rows that attend together, and what each sees.
struct Looking {
    Attention at;
    int rows;
    const float* queries;
    int first[MOST_SEEING], seen[MOST_SEEING];
};

}  // namespace

struct OctModel final : Job, Rest {
    OctModel(const OctShape& s, const OctOp* program, int32_t count, const int32_t* buffer_widths, int32_t buffers,
             const OctAngles* angle_tables, int32_t angle_count)
        : shape(s),
          isa(isa_of(least(s.isa, oct_isa_best()))),
          ops(program, program + count),
          widths(buffer_widths, buffer_widths + buffers),
          angles(angle_tables, angle_tables + angle_count),
          head_layout(layout_of(s, isa)),
          block_bytes(head_layout.bytes * size_t(s.kv_heads)),
          layer_bytes(block_bytes * size_t(s.blocks)),
          pool(layer_bytes * size_t(s.layers)),
          ahead(pool, layer_bytes, s.layers),
          rows(size_t(buffers)),
          scratch(size_t(s.threads)),
          team(s.threads, this) {
        for (const OctOp& op : ops) {
            if (op.matrix) widest = op.matrix->cols > widest ? op.matrix->cols : widest;
            if (op.kind == OCT_ATTEND) group = op.heads / shape.kv_heads;
            if (op.kind == OCT_ROUTE) experts = op.experts, used = op.used;
        }
        for (int width : widths) widest = width > widest ? width : widest;
        widest = (widest + GROUP - 1) / GROUP * GROUP;
        const size_t dims = size_t(s.head_dim), padded = size_t(head_layout.padded_dim);
        for (Scratch& one : scratch) {
            one.rows = Prepared(FEW, widest);
            one.row = Region(size_t(widest) * LANES * 4);
            one.moved = Region(size_t(widest) * LANES * 4);
            one.scores = Region(size_t(SEGMENT + LANES) * LANES * 4);
            one.queries = Region(size_t(MOST_SEEING) * padded * 4);
            one.slopes = Region(size_t(MOST_SEEING) * 4);
            one.rounded = Region(size_t(MOST_SEEING) * size_t(grouped(s.head_dim)) * 2);
            one.head = Region(padded * 4);
            one.key = Region(padded * 4);
            one.tile = Region(head_layout.tiles ? size_t(grouped(s.head_dim)) * SEGMENT * 4
                                                : (dims + (dims + GROUP - 1) / GROUP) * LANES * 4);
            one.parts = Region(2 * size_t(MOST_SEEING) * (padded + LANES) * 4);
        }
        chunks.resize(ops.size() * 2);
    }

    void reserve(int tokens) {
        if (tokens <= capacity) return;
        std::vector<size_t> counts(widths.size(), size_t(tokens));
        const size_t slots = size_t(tokens) * size_t(used) + size_t(experts) * LANES, most = std::max(slots, size_t(tokens));
        for (const OctOp& op : ops)
            if (op.kind == OCT_RISE || op.kind == OCT_FALL) counts[size_t(op.out)] = slots;
        for (size_t i = 0; i < widths.size(); i++) rows[i] = Region(counts[i] * size_t(widths[i]) * 4);
        size_t cells = Prepared::cells(most, widest);
        for (const OctOp& op : ops)
            if (op.kind == OCT_HEADS)
                cells = std::max(cells, Prepared::cells(size_t(op.heads) * size_t(up(tokens)), grouped(op.matrix->cols)));
        shared = Prepared(cells);
        choices.resize(size_t(tokens) * size_t(used));
        seated.resize(slots);
        seats.resize(most);
        for (size_t i = 0; i < seats.size(); i++) seats[i] = int(i);
        checks = Region(size_t(tokens) * size_t(shape.threads) * LANES * 4);
        capacity = tokens;  // only now: without memory for all of it, all is tried again
    }

    // Room for so many tokens, and what a first step would take from the system: some of it, where it is much.
    void ready(int tokens) {
        constexpr size_t MUCH = 8 << 20, FIRST_BLOCKS = 512 << 10;  // of each layer: mostly one huge page
        reserve(tokens);
        for (const Region& region : rows) region.touch(0, MUCH);
        shared.touch(MUCH);
        for (const Scratch& one : scratch) {
            one.rows.touch(MUCH);
            for (const Region* region : {&one.row, &one.moved, &one.scores, &one.queries, &one.rounded, &one.head, &one.key,
                                         &one.tile, &one.parts})
                region->touch(0, MUCH);
        }
        const size_t first = layer_bytes < FIRST_BLOCKS ? layer_bytes : FIRST_BLOCKS;
        for (int layer = 0; layer < shape.layers; layer++) pool.touch(size_t(layer) * layer_bytes, first);
        ahead.has(first);
    }
    void rest() override { ahead.take(); }

    int copy_cells(int count, const int32_t* source, const int32_t* target);
    void step(const OctStep& s);
    void run(uint32_t phase, uint32_t chunk, uint32_t total, int thread) override;

    OctShape shape;
    const Isa& isa;
    std::vector<OctOp> ops;
    std::vector<int> widths;
    std::vector<OctAngles> angles;
    HeadLayout head_layout;
    size_t block_bytes, layer_bytes;
    Region pool;
    Ahead ahead;
    std::vector<Region> rows;
    double* seconds = nullptr;  // by operation, its first and its second phase: see `oct_times`

private:
    float* row(int buffer, int token) const {
        return rows[size_t(buffer)].as<float>() + size_t(token) * size_t(widths[size_t(buffer)]);
    }
    Form form(const OctOp& op) const { return !shape.exact && op.matrix->kind > OCT_BF16 ? INTEGERS : FLOATS; }
    // Not what chooses experts: a choice must not hang on a rounding. HEAD is the last operation.
    bool splits(const OctOp& op) const {
        return !prompt.empty() && !shape.exact && prompts(isa, op.matrix->kind) && (&op)[1].kind != OCT_ROUTE;
    }
    uint32_t product_chunks(const OctOp& op) const;
    void plan();
    void plan_prompt();
    void plan_attention();
    uint32_t attention_chunks() const;
    // Rows that attend at a time.
    int seeing() const {
        return !head_layout.tiles ? VECTOR_SEEING : shape.kv_kind == OCT_I8 ? MOST_SEEING : TILES_SEEING;
    }
    void copy();
    void run_all();
    void run_part(const std::vector<uint32_t>& all, size_t from, size_t to);
    int path_length(int token) const { return now->paths ? now->path_start[token + 1] - now->path_start[token] : 0; }
    int cell_of(int token) const {
        return path_length(token) ? now->paths[now->path_start[token + 1] - 1] : now->positions[token];
    }
    // The block that a token is written to.
    int written_block(int token) const {
        return now->tables[now->table_start[now->sequences[token]] + cell_of(token) / shape.block_size];
    }
    bool follows(int token) const;
    uint32_t panel_chunks(const OctOp& op, int count) const;
    void prepare(const OctOp& op, Form as, const int* from, int count, int part, int parts, const Activations& to,
                 int thread) const;
    void prepare_chunk(const OctOp& op, Form as, const int* from, int count, int chunk, int total, int thread) const;
    void prepare_linear(const OctOp& op, int chunk, int total, int thread) const;
    bool few(const OctOp& op) const { return now->tokens <= FEW && !splits(op); }
    void prepare_seats(const OctOp& op, int chunk, int total, int thread) const;
    void prepare_head(const OctOp& op, int panel) const;
    void adapt_panel(const OctOp& op, const Panel& panel, int thread);
    void linear(const OctOp& op, uint32_t phase, int chunk, int total, int thread);
    void normed(const OctOp& op, int token, int thread) const;
    void bound(const OctOp& op, int token) const;
    void turn(const OctOp& op, const float* x, const float* norm, int position, float scale, float* out, int thread) const;
    void remember(const OctOp& op, int token, int head, int thread) const;
    void attend(const OctOp& op, const Unit& unit, int thread);
    Looking look(const OctOp& op, const Unit& unit, int from, int count, int thread) const;
    void see(const Looking& look, int segment, float* part) const;
    void show(const OctOp& op, int token, int thread) const;
    void remember_latent(const OctOp& op, int token, int thread) const;
    void absorbed(const OctOp& op, int token, int head, float* out) const;
    void part_product(const OctOp& op, const OctMatrix& w, size_t start, int count, float* out, int part, int parts);
    void head(const OctOp& op, int chunk, int total, int thread) const;
    void choose(const OctOp& op, int token);
    void seat();
    void expert(const OctOp& op, int chunk, int total);
    void blend(const OctOp& op, int token) const;

    int experts = 0, used = 0;
    std::vector<Choice> choices;             // by token, its best experts
    std::vector<int> seat_start, seat_count;  // by expert: its slots, which begin a panel
    std::vector<int> seated, seats;           // by slot: its token; the slots themselves
    std::vector<int> prompt, others;          // a prompt's tokens, and those that are not; both empty if there are none

    int widest = 0, capacity = 0, group = 1;
    Prepared shared;
    Region checks;  // by thread and sample: a NaN where a logit is not finite
    std::vector<Scratch> scratch;
    std::vector<uint32_t> chunks;
    Panels adapted;
    std::vector<Tile> tiles;
    std::vector<Unit> units;
    bool alone = false;  // no two tokens of this step are of one sequence
    // Where segments are computed apart: by head and tile, its parts and how many of them are still to come.
    std::vector<size_t> part_start;
    std::unique_ptr<std::atomic<int>[]> pending;
    size_t pending_size = 0, parts_size = 0;
    Region parts;
    std::vector<float> bests;
    std::vector<int32_t> best_ids;
    uint64_t steps = 0;
    const OctStep* now = nullptr;
    Team team;
    friend Team& octavo::team_of(OctModel&);
};

Team& octavo::team_of(OctModel& model) { return model.team; }

// Whether a token sees what the one before it in the batch sees, and itself.
bool OctModel::follows(int token) const {
    if (!token || now->sequences[token] != now->sequences[token - 1]) return false;
    const int mine = path_length(token), before = path_length(token - 1);
    if (!mine && !before) return true;
    return mine == before + 1 && now->positions[token] == now->positions[token - 1] + 1 &&
           memcmp(now->paths + now->path_start[token], now->paths + now->path_start[token - 1], size_t(before) * 4) == 0;
}

int OctModel::copy_cells(int count, const int32_t* source, const int32_t* target) {
    const int size = shape.block_size;
    const int64_t cells = int64_t(shape.blocks) * size;
    for (int i = 0; i < count; i++)
        if (source[i] < 0 || source[i] >= cells || target[i] < 0 || target[i] >= cells) return -1;
    const HeadLayout& l = head_layout;
    const size_t dims = shape.latent ? 0 : size_t(l.head_dim);  // a latent lies where values would
    const size_t groups = l.value_scales ? (dims + GROUP - 1) / GROUP : 0;
    const size_t cell = l.kind == OCT_I8 ? 1 : l.kind == OCT_BF16 ? 2 : 4, row = size_t(l.padded_dim) * cell;
    const size_t one = dims * cell + row + 2 * groups * 4;
    std::vector<uint8_t> held(one * size_t(count));
    const auto each = [&](uint8_t* base, const int32_t* numbers, auto move) {
        for (int i = 0; i < count; i++) {
            uint8_t *head = base + size_t(numbers[i] / size) * block_bytes, *spare = held.data() + size_t(i) * one;
            const size_t slot = size_t(numbers[i] % size);
            for (size_t d = 0; d < dims; d++, spare += cell) move(head + l.keys + l.key(int(slot), int(d)) * cell, spare, cell);
            for (size_t d = 0; d < size_t(l.padded_dim); d++, spare += cell)
                move(head + l.values + l.value(int(slot), int(d)) * cell, spare, cell);
            for (size_t g = 0; g < groups; g++, spare += 4) move(head + (g * size_t(size) + slot) * 4, spare, 4);
            move(head + l.value_scales + slot * groups * 4, spare, groups * 4);
        }
    };
    for (int layer = 0; layer < shape.layers; layer++)
        for (int h = 0; h < shape.kv_heads; h++) {
            uint8_t* base = pool.as<uint8_t>() + size_t(layer) * layer_bytes + size_t(h) * l.bytes;
            each(base, source, [](uint8_t* there, uint8_t* spare, size_t n) { memcpy(spare, there, n); });
            each(base, target, [](uint8_t* there, uint8_t* spare, size_t n) { memcpy(there, spare, n); });
        }
    return 0;
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
    const int units = (op.matrix->blocks + 1) / 2;
    const uint64_t bytes = uint64_t(op.matrix->blocks) * op.matrix->block_bytes;
    int wanted = int((bytes + CHUNK_BYTES - 1) / CHUNK_BYTES);
    if (shape.threads > 1) wanted = wanted > 4 * shape.threads ? wanted : 4 * shape.threads;
    return uint32_t(least(units, wanted));
}

// Where there are many tiles, one thread takes all heads of a tile, whose keys and values lie side by side.
uint32_t OctModel::attention_chunks() const {
    const size_t threads = size_t(shape.threads), most = 32 * threads;
    const size_t wanted = tiles.size() >= 4 * threads && part_start.empty() ? tiles.size() : units.size();
    return uint32_t(wanted < most ? wanted : most);
}

void OctModel::plan_attention() {
    const int most = group < seeing() ? seeing() / group : 1;
    tiles.clear();
    alone = true;
    for (int i = 0; i < now->tokens; i++) {
        const bool same = i && now->sequences[i] == now->sequences[i - 1];
        alone = alone && !same;
        if (follows(i) && tiles.back().count < most) tiles.back().count++;
        else tiles.push_back({i, 1});
    }
    const auto segments = [&](const Tile& tile) { return now->positions[tile.first + tile.count - 1] / SEGMENT + 1; };
    const size_t pairs = tiles.size() * size_t(shape.kv_heads);
    bool split = false;
    if (shape.threads > 1 && pairs < size_t(4 * shape.threads))
        for (const Tile& tile : tiles) split = split || segments(tile) > 1;
    units.clear();
    part_start.assign(split ? pairs : 0, 0);
    if (split && pairs > pending_size) pending.reset(new std::atomic<int>[pairs]), pending_size = pairs;
    size_t floats = 0;
    for (int t = int(tiles.size()) - 1; t >= 0; t--)  // late tiles, which see most, come first
        for (int head = 0; head < shape.kv_heads; head++) {
            if (!split) {
                units.push_back({t, head, -1});
                continue;
            }
            const size_t pair = size_t(head) * tiles.size() + size_t(t);
            const int count = segments(tiles[size_t(t)]);
            part_start[pair] = floats;
            pending[pair].store(count, std::memory_order_relaxed);
            floats += size_t(count * tiles[size_t(t)].count * group) * size_t(head_layout.padded_dim + LANES);
            for (int segment = 0; segment < count; segment++) units.push_back({t, head, segment});
        }
    if (floats > parts_size) parts = Region(floats * 4), parts_size = floats;
}

void OctModel::plan_prompt() {
    prompt.clear();
    others.clear();
    if (!now->prompt_ends) return;
    for (int i = 0; i < now->tokens; i++)
        (now->positions[i] < now->prompt_ends[now->sequences[i]] ? prompt : others).push_back(i);
    if (prompt.empty()) others.clear();
}

void OctModel::plan() {
    plan_attention();
    plan_prompt();
    adapted.plan(*now);
    const uint32_t some = shape.threads > 1 ? uint32_t(8 * shape.threads) : 1;
    const uint32_t tokens = uint32_t(now->tokens), by_token = tokens < some ? tokens : some;
    for (size_t i = 0; i < ops.size(); i++) {
        uint32_t &first = chunks[2 * i], &second = chunks[2 * i + 1];
        first = second = 0;
        if (int(i) >= now->skip_from && int(i) < now->skip_to) continue;
        switch (ops[i].kind) {
            case OCT_EMBED: case OCT_NORMED: case OCT_BOUND: second = by_token; break;
            case OCT_LINEAR:
                if (splits(ops[i])) first = panel_chunks(ops[i], int(others.size())) + panel_chunks(ops[i], int(prompt.size()));
                else first = few(ops[i]) ? 0 : panel_chunks(ops[i], now->tokens);
                second = product_chunks(ops[i]);
                break;
            case OCT_ATTEND:
                first = alone ? 0 : by_token;
                second = attention_chunks();
                break;
            case OCT_HEADS:
                first = by_token;
                second = uint32_t(ops[i].heads) * (ops[i].heads < 2 * shape.threads ? product_chunks(ops[i]) : 1);
                break;
            case OCT_ADAPT:
                first = uint32_t(adapted.panels.size());
                second = first && ops[i].wide ? by_token : 0;
                break;
            case OCT_ROUTE: first = by_token, second = 1; break;
            case OCT_BLEND: second = by_token; break;
            case OCT_RISE: case OCT_FALL:
                first = by_token;
                second = product_chunks(ops[i]) * uint32_t(experts);
                break;
            case OCT_HEAD:
                first = panel_chunks(ops[i], now->samples);
                if (first < by_token) first = by_token;
                second = now->samples ? product_chunks(ops[i]) : 0;
                bests.assign(size_t(second) * size_t(now->samples), -3.4e38f);
                best_ids.assign(size_t(second) * size_t(now->samples), 0);
                memset(checks.as<float>(), 0, size_t(shape.threads) * size_t(now->samples) * LANES * 4);
                break;
        }
    }
}

// With taps, in parts: what an operation reads is there when all before it are done.
void OctModel::run_all() {
    if (!now->taps) return team.run(*this, chunks, seconds);
    const std::vector<uint32_t> all = chunks;
    size_t from = 0;
    for (int tap = 0; tap < now->taps; tap++) {
        const size_t at = size_t(now->tap_ops[tap]);
        run_part(all, from, at);
        from = at;
        const size_t cols = size_t(ops[at].matrix->cols);
        float* out = now->tapped + size_t(tap) * size_t(now->tokens) * cols;
        for (int i = 0; i < now->tokens; i++) memcpy(out + size_t(i) * cols, row(ops[at].in, i), cols * 4);
    }
    run_part(all, from, ops.size());
}

void OctModel::run_part(const std::vector<uint32_t>& all, size_t from, size_t to) {
    if (from == to) return;
    std::fill(chunks.begin(), chunks.end(), 0u);
    std::copy(all.begin() + long(2 * from), all.begin() + long(2 * to), chunks.begin() + long(2 * from));
    team.run(*this, chunks, seconds);
}

void OctModel::step(const OctStep& s) {
    now = &s;
    steps++;
    if (s.copies) copy();
    if (!s.tokens) return;
    reserve(s.tokens);
    plan();
    int last = 0;
    for (int i = 0; i < s.tokens; i++) last = std::max(last, written_block(i));
    ahead.wrote(size_t(s.tokens) * block_bytes / size_t(shape.block_size) * size_t(shape.layers),
                size_t(last + 1) * block_bytes);
    run_all();
    if (shape.threads == 1) rest();
    const size_t samples = size_t(s.samples), parts = samples ? bests.size() / samples : 0;
    for (size_t m = 0; m < samples; m++) {
        float best = -3.4e38f;
        s.best[m] = 0;
        for (size_t part = 0; part < parts; part++)
            if (bests[part * samples + m] > best) {
                best = bests[part * samples + m];
                s.best[m] = best_ids[part * samples + m];
            }
        s.sample_finite[m] = 1;
        for (size_t t = 0; t < size_t(shape.threads); t++)
            s.sample_finite[m] &= uint8_t(isa.finite(checks.as<float>() + (t * samples + m) * LANES, LANES));
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
            for (int i = from; i < to; i++)
                isa.embed(*op.matrix, op.mode == OCT_ADD ? now->positions[i] : now->ids[i], op.scale, op.mode == OCT_ADD,
                          scratch[size_t(thread)].row.as<float>(), row(op.out, i));
            break;
        case OCT_NORMED:
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) normed(op, i, thread);
            break;
        case OCT_BOUND:
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) bound(op, i);
            break;
        case OCT_LINEAR:
            if (second) return linear(op, phase, chunk, total, thread);
            prepare_linear(op, chunk, total, thread);
            break;
        case OCT_ATTEND:
            if (second) {
                range(int(units.size()), from, to);
                for (int unit = from; unit < to; unit++) attend(op, units[size_t(unit)], thread);
            } else {
                range(now->tokens, from, to);
                for (int i = from; i < to; i++)
                    for (int h = 0; h < shape.kv_heads; h++) remember(op, i, h, thread);
            }
            break;
        case OCT_HEADS:
            if (second) {
                const int each = total / op.heads, head = chunk / each;
                return part_product(op, op.matrix[head], size_t(head) * size_t(up(now->tokens)), now->tokens,
                                    row(op.out, 0) + head * up(op.matrix->rows), chunk % each, each);
            }
            range(op.heads * up(now->tokens) / LANES, from, to);
            for (int panel = from; panel < to; panel++) prepare_head(op, panel);
            break;
        case OCT_ADAPT:
            if (!second) return adapt_panel(op, adapted.panels[part], thread);
            range(now->tokens, from, to);
            for (int i = from; i < to; i++)
                isa.activate(op.act, op.mode == OCT_GATED, row(op.wide, i), widths[size_t(op.out)], row(op.out, i));
            break;
        case OCT_ROUTE:
            if (second) return seat();
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) choose(op, i);
            break;
        case OCT_RISE: case OCT_FALL:
            if (second) return expert(op, chunk, total);
            prepare_seats(op, chunk, total, thread);
            break;
        case OCT_BLEND:
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) blend(op, i);
            break;
        case OCT_HEAD:
            if (second) return head(op, chunk, total, thread);
            range(now->tokens, from, to);
            for (int i = from; i < to; i++) {
                now->finite[i] = isa.finite(row(op.in, i), widths[size_t(op.in)]);
                if (now->hidden) show(op, i, thread);
            }
            if (const int panels = int(panel_chunks(op, now->samples)); chunk < panels)
                prepare_chunk(op, form(op), now->sample_rows, now->samples, chunk, panels, thread);
            break;
    }
}

// Chunks to make the panels of `count` rows: where few panels do not go evenly to threads, parts of them, as many of each.
// No more than that: whoever makes a part norms whole rows.
uint32_t OctModel::panel_chunks(const OctOp& op, int count) const {
    const int panels = (count + LANES - 1) / LANES, threads = shape.threads;
    if (panels == 0 || panels >= 4 * threads) return uint32_t(least(panels, 16 * threads));
    int parts = 1;
    while (panels * parts % threads) parts++;
    parts = least(parts, op.matrix->cols / (4 * GROUP));
    return uint32_t(panels * (parts > 1 ? parts : 1));
}

// Rows that are no prompt's, then those that are.
void OctModel::prepare_linear(const OctOp& op, int chunk, int total, int thread) const {
    if (!splits(op)) return prepare_chunk(op, form(op), seats.data(), now->tokens, chunk, total, thread);
    const int count = int(others.size()), first = int(panel_chunks(op, count));
    if (chunk < first) prepare_chunk(op, form(op), others.data(), count, chunk, first, thread);
    else prepare_chunk(op, HALVES, prompt.data(), int(prompt.size()), chunk - first, total - first, thread);
}

void OctModel::prepare_chunk(const OctOp& op, Form as, const int* from, int count, int chunk, int total, int thread) const {
    const int panels = (count + LANES - 1) / LANES, parts = total > panels ? total / panels : 1;
    const int64_t all = int64_t(panels) * parts;
    for (int i = int(all * chunk / total); i < int(all * (chunk + 1) / total); i++) {
        const int first = i / parts * LANES;
        prepare(op, as, from + first, least(LANES, count - first), i % parts, parts,
                view(shared).from(size_t(first), as == HALVES ? grouped(op.matrix->cols) : op.matrix->cols), thread);
    }
}

// Panels of slots: experts begin a panel each, so the rows of one are without gaps.
void OctModel::prepare_seats(const OctOp& op, int chunk, int total, int thread) const {
    for (int e = 0, panel = 0; e < experts; e++)
        for (int first = 0; first < seat_count[size_t(e)]; first += LANES, panel++) {
            if (panel % total != chunk) continue;
            const int at = seat_start[size_t(e)] + first;
            prepare(op, form(op), (op.kind == OCT_RISE ? seated : seats).data() + at, least(LANES, seat_count[size_t(e)] - first), 0, 1,
                    view(shared).from(size_t(at), op.matrix->cols), thread);
        }
}

// HEADS: head after head, the columns that are its own of a panel of tokens.
void OctModel::prepare_head(const OctOp& op, int panel) const {
    const int panels = up(now->tokens) / LANES, head = panel / panels, first = panel % panels * LANES;
    const int count = least(LANES, now->tokens - first);
    const float* rows[LANES];
    for (int r = 0; r < count; r++) rows[r] = row(op.in, first + r) + head * op.width;
    make_panel(isa, rows, count, op.matrix->cols, form(op), 0, 1, view(shared).from(size_t(panel) * LANES, op.matrix->cols));
}

// Rows `from` of the input as a panel, or a part of it: normed if there is a norm, and as the matrix wants them.
void OctModel::prepare(const OctOp& op, Form as, const int* from, int count, int part, int parts, const Activations& to,
                       int thread) const {
    const int cols = op.matrix->cols;
    const float* rows[LANES];
    for (int r = 0; r < count; r++) {
        const size_t at = size_t(r) * size_t(widest);
        rows[r] = row(op.in, from[r]);
        if (op.norm) {
            float* normed = scratch[size_t(thread)].row.as<float>() + at;
            isa.norm(op.norm_kind, rows[r], op.norm, op.norm_bias, up(cols), cols, op.eps, normed);
            rows[r] = normed;
        }
        if (op.order) {
            float* moved = scratch[size_t(thread)].moved.as<float>() + at;
            for (int k = 0; k < cols; k++) moved[k] = rows[r][op.order[k]];
            rows[r] = moved;
        }
    }
    make_panel(isa, rows, count, cols, as, part, parts, to);
}

void OctModel::linear(const OctOp& op, uint32_t phase, int chunk, int total, int thread) {
    const Prepared* from = &shared;
    if (few(op)) {
        Scratch& own = scratch[size_t(thread)];
        from = &own.rows;
        if (const uint64_t wanted = steps << 12 | phase; own.holds != wanted) {
            own.holds = wanted;
            prepare(op, form(op), seats.data(), now->tokens, 0, 1, view(own.rows), thread);
        }
    }
    Sink sink{};
    sink.mode = op.mode == OCT_GATED ? Sink::GATED
                : op.mode == OCT_ADD ? Sink::ADD
                : op.mode == OCT_ACT ? Sink::ACT
                                     : Sink::STORE;
    sink.act = op.act;
    const bool waits = op.wide && !adapted.panels.empty();
    if (waits) sink.mode = Sink::STORE;
    sink.out = row(waits ? op.wide : op.out, 0) + op.column;
    sink.stride = size_t(widths[size_t(waits ? op.wide : op.out)]);
    sink.bias = op.bias;
    const int first = block_of(*op.matrix, chunk, total), last = block_of(*op.matrix, chunk + 1, total);
    if (!splits(op)) return isa.product(*op.matrix, first, last, view(*from), now->tokens, shape.exact, sink);
    sink.rows_of = others.data();
    isa.product(*op.matrix, first, last, view(shared), int(others.size()), shape.exact, sink);
    sink.rows_of = prompt.data();
    isa.prompt_product(*op.matrix, first, last, view(shared), int(prompt.size()), sink);
}

void OctModel::adapt_panel(const OctOp& op, const Panel& panel, int thread) {
    const OctAdapter& adapter = now->loaded[panel.adapter];
    const int32_t *first = adapter.first + op.site, *tokens = adapted.tokens.data() + panel.first;
    if (first[0] == first[1]) return;
    Scratch& own = scratch[size_t(thread)];
    const int cols = op.width;
    float *rows = room(own.adapt.rows, size_t(LANES) * size_t(cols)), *normed = own.row.as<float>();
    for (int i = 0; i < panel.count; i++) {
        const float* x = row(op.in, tokens[i]);
        if (op.norm) isa.norm(op.norm_kind, x, op.norm, op.norm_bias, up(cols), cols, op.eps, normed);
        put(op.norm ? normed : x, cols, rows + i);
    }
    const auto out_of = [&](int i) { return row(op.wide ? op.wide : op.out, tokens[i]); };
    for (const OctPart* part = adapter.parts + first[0]; part < adapter.parts + first[1]; part++)
        adapt(isa, *part, rows, panel.count, own.adapt, out_of);
}

void OctModel::normed(const OctOp& op, int token, int thread) const {
    const bool added = op.mode == OCT_ADD;
    float* out = added ? scratch[size_t(thread)].row.as<float>() : row(op.out, token);
    isa.norm(op.norm_kind, row(op.in, token), op.norm, op.norm_bias, up(op.width), op.width, op.eps, out);
    if (added) isa.add_rows(out, up(op.width), row(op.out, token));
}

// What is no number stays none, for those who look for it.
void OctModel::bound(const OctOp& op, int token) const {
    float* x = row(op.out, token);
    for (int i = 0; i < op.width; i++) x[i] = x[i] > op.cap ? op.cap : x[i] < -op.cap ? -op.cap : x[i];
}

// A head's query or key as attention wants it.
void OctModel::turn(const OctOp& op, const float* x, const float* norm, int position, float scale, float* out,
                    int thread) const {
    const int d = shape.head_dim;
    if (norm) {
        float* normed = scratch[size_t(thread)].head.as<float>();
        memcpy(normed, x, size_t(d) * 4);
        isa.norm(OCT_RMS, normed, norm, nullptr, head_layout.padded_dim, d, op.eps, normed);
        x = normed;
    }
    if (op.angles < 0) return isa.rotate(x, nullptr, nullptr, 0, d, scale, out);
    const OctAngles& table = angles[size_t(op.angles)];
    const float* cosines = table.data + size_t(position) * size_t(table.half);
    isa.rotate(x, cosines, cosines + size_t(shape.context) * size_t(table.half), table.half, d, scale, out);
}

// A token's cell: its latent, normed, then the key that rotates.
void OctModel::remember_latent(const OctOp& op, int token, int thread) const {
    const int position = now->positions[token], rotated = shape.head_dim - shape.latent;
    const float* given = row(op.keys, token);
    float* cell = scratch[size_t(thread)].key.as<float>();
    isa.norm(OCT_RMS, given, op.k_norm, nullptr, shape.latent, shape.latent, op.eps, cell);
    const OctAngles& table = angles[size_t(op.angles)];
    const float* cosines = table.data + size_t(position) * size_t(table.half);
    isa.rotate(given + shape.latent, cosines, cosines + size_t(shape.context) * size_t(table.half), table.half, rotated, 1.f,
               cell + shape.latent);
    const int at = cell_of(token), block = written_block(token);
    isa.remember_latent(cell, head_layout, at % shape.block_size,
                        pool.as<uint8_t>() + size_t(op.layer) * layer_bytes + size_t(block) * block_bytes);
}

// A head's query in the space of the cells, scaled.
void OctModel::absorbed(const OctOp& op, int token, int head, float* out) const {
    const int position = now->positions[token], rotated = shape.head_dim - shape.latent;
    const float* x = row(op.in, token) + head * shape.latent;
    for (int i = 0; i < shape.latent; i++) out[i] = x[i] * op.scale;
    const OctAngles& table = angles[size_t(op.angles)];
    const float* cosines = table.data + size_t(position) * size_t(table.half);
    isa.rotate(row(op.queries, token) + (head + 1) * op.width - rotated, cosines,
               cosines + size_t(shape.context) * size_t(table.half), table.half, rotated, op.scale, out + shape.latent);
}

void OctModel::remember(const OctOp& op, int token, int head, int thread) const {
    if (shape.latent) return remember_latent(op, token, thread);
    const int d = shape.head_dim, position = now->positions[token];
    const float* key = row(op.in, token) + (op.heads + head) * d;
    float* turned = scratch[size_t(thread)].key.as<float>();
    turn(op, key, op.k_norm, position, 1.f, turned, thread);
    const int cell = cell_of(token), block = written_block(token);
    isa.remember(turned, key + shape.kv_heads * d, head_layout, cell % shape.block_size,
                 pool.as<uint8_t>() + size_t(op.layer) * layer_bytes + size_t(block) * block_bytes +
                     size_t(head) * head_layout.bytes);
}

void OctModel::attend(const OctOp& op, const Unit& unit, int thread) {
    const Tile tile = tiles[size_t(unit.tile)];
    const int count = tile.count * group, padded = head_layout.padded_dim, stride = padded + LANES;
    const int sees_from = now->positions[tile.first] - (op.window ? op.window - 1 : now->positions[tile.first]);
    const int low = (sees_from > 0 ? sees_from : 0) / SEGMENT;
    const int high = now->positions[tile.first + tile.count - 1] / SEGMENT;
    if (alone && (unit.segment < 0 || unit.segment == high)) remember(op, tile.first, unit.head, thread);
    const int most = shape.latent ? 8 : seeing();  // latent.h has eight rows at a time
    const int dims = shape.latent ? shape.latent : shape.head_dim;
    const auto done = [&](const float* part, int from, int n) {
        for (int r = 0; r < n; r++)
            isa.finish(part + r * stride, dims, padded,
                       row(op.out, tile.first + (from + r) / group) + (unit.head * group + (from + r) % group) * dims);
    };
    if (unit.segment < 0) {
        float *sum = scratch[size_t(thread)].parts.as<float>(), *part = sum + most * stride;
        for (int from = 0; from < count; from += most) {
            const int n = least(most, count - from);
            const Looking rows = look(op, unit, from, n, thread);
            for (int segment = low; segment <= high; segment++) {
                see(rows, segment, segment == low ? sum : part);
                if (segment > low) isa.merge(part, padded, n, sum);
            }
            done(sum, from, n);
        }
        return;
    }
    const size_t pair = size_t(unit.head) * tiles.size() + size_t(unit.tile), size = size_t(count) * size_t(stride);
    float* base = parts.as<float>() + part_start[pair];
    if (unit.segment >= low)
        for (int from = 0; from < count; from += most)
            see(look(op, unit, from, least(most, count - from), thread), unit.segment,
                base + size_t(unit.segment) * size + size_t(from) * size_t(stride));
    if (pending[pair].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    pending[pair].store(high + 1, std::memory_order_relaxed);  // for the next layer
    float* sum = base + size_t(low) * size;
    for (int segment = low + 1; segment <= high; segment++) isa.merge(base + size_t(segment) * size, padded, count, sum);
    done(sum, 0, count);
}

// Rows [from, from + count) of a tile, their queries as attention wants them.
Looking OctModel::look(const OctOp& op, const Unit& unit, int from, int count, int thread) const {
    const Scratch& own = scratch[size_t(thread)];
    const Tile tile = tiles[size_t(unit.tile)];
    const int d = shape.head_dim;
    Looking look{};
    look.rows = count;
    Attention& a = look.at;
    a.head = head_layout;
    a.pool = pool.as<uint8_t>() + size_t(op.layer) * layer_bytes;
    a.block_bytes = block_bytes;
    a.table = now->tables + now->table_start[now->sequences[tile.first]];
    const int last = tile.first + tile.count - 1, path = path_length(last);
    a.trunk = now->positions[last] + 1 - path;
    a.cells = path ? now->paths + now->path_start[last] : nullptr;
    a.kv_head = unit.head;
    a.cap = op.cap;
    float* slopes = own.slopes.as<float>();
    a.slopes = op.slopes ? slopes : nullptr;
    a.scores = own.scores.as<float>();
    a.tile = own.tile.as<uint8_t>();
    a.queries = own.rounded.as<uint16_t>();
    a.latent = shape.latent;
    float* queries = own.queries.as<float>();
    look.queries = queries;
    for (int r = 0; r < count; r++) {
        const int token = tile.first + (from + r) / group, position = now->positions[token];
        const int head = unit.head * group + (from + r) % group;
        if (shape.latent) absorbed(op, token, head, queries + r * d);
        else turn(op, row(op.in, token) + head * d, op.q_norm, position, op.scale, queries + r * d, thread);
        if (op.slopes) slopes[r] = op.slopes[head];
        look.first[r] = op.window && position >= op.window ? position - op.window + 1 : 0;
        look.seen[r] = position + 1;
    }
    a.from = look.first[0] / LANES * LANES;
    a.end = look.seen[count - 1];
    return look;
}

void OctModel::see(const Looking& look, int segment, float* part) const {
    (shape.latent ? isa.attend_latent : isa.attend)(look.at, look.queries, look.rows, look.first, look.seen, segment, part);
}

// A token's experts, the best first, of equals the first; and their weights.
void OctModel::choose(const OctOp& op, int token) {
    static thread_local std::vector<float> scores, corrected;  // by expert
    const float* logits = row(op.in, token);
    Choice* best = choices.data() + size_t(token * used);
    scores.resize(size_t(experts));
    float top = logits[0], total = 0, kept = 0;
    for (int e = 1; e < experts; e++) top = logits[e] > top ? logits[e] : top;
    for (int e = 0; e < experts; e++)
        total += scores[size_t(e)] = op.sigmoid ? 1.f / (1.f + std::exp(-logits[e])) : std::exp(logits[e] - top);
    if (!op.sigmoid)
        for (float& score : scores) score /= total;
    const float* rank = logits;  // of which the best are chosen
    if (op.sigmoid) {
        corrected = scores;
        for (int e = 0; e < experts; e++) corrected[size_t(e)] += op.bias[e];
        rank = corrected.data();
    }
    uint64_t looked_at = ~uint64_t(0);
    const int size = op.groups ? experts / op.groups : experts;
    const auto worth = [&](int g) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            if (rank[e] > first)
                second = first, first = rank[e];
            else if (rank[e] > second)
                second = rank[e];
        }
        return op.sigmoid ? first + second : first;
    };
    if (op.groups) {
        looked_at = 0;
        for (int n = 0; n < op.groups_used; n++) {
            int found = -1;
            for (int g = 0; g < op.groups; g++)
                if (!(looked_at >> g & 1) && (found < 0 || worth(g) > worth(found))) found = g;
            looked_at |= uint64_t(1) << found;
        }
    }
    for (int j = 0; j < used; j++) {
        best[j] = {-1, 0, 0.f};
        for (int e = 0; e < experts; e++) {
            bool taken = best[j].expert >= 0 && !(rank[e] > rank[best[j].expert]);
            taken = taken || (op.groups && !(looked_at >> (e / size) & 1));
            for (int i = 0; i < j; i++) taken = taken || best[i].expert == e;
            if (!taken) best[j].expert = e;
        }
        best[j].weight = scores[size_t(best[j].expert)];
        kept += best[j].weight;
    }
    if (op.mode == OCT_ADD)
        for (int j = 0; j < used; j++) best[j].weight /= kept;
    if (op.scale != 1.f)
        for (int j = 0; j < used; j++) best[j].weight *= op.scale;
}

// Slots in the order of experts, then of tokens.
void OctModel::seat() {
    seat_count.assign(size_t(experts), 0);
    seat_start.assign(size_t(experts), 0);
    const int all = now->tokens * used;
    for (int i = 0; i < all; i++) seat_count[size_t(choices[size_t(i)].expert)]++;
    for (int e = 1; e < experts; e++) seat_start[size_t(e)] = seat_start[size_t(e - 1)] + up(seat_count[size_t(e - 1)]);
    std::vector<int> next = seat_start;
    for (int i = 0; i < all; i++) {
        const int slot = choices[size_t(i)].slot = next[size_t(choices[size_t(i)].expert)]++;
        seated[size_t(slot)] = i / used;
    }
}

void OctModel::expert(const OctOp& op, int chunk, int total) {
    const int parts = total / experts, e = chunk / parts, part = chunk % parts, count = seat_count[size_t(e)];
    if (count == 0) return;
    const size_t start = size_t(seat_start[size_t(e)]);
    part_product(op, op.matrix[e], start, count, row(op.out, int(start)), part, parts);
}

// One of `parts` of a matrix, on `count` rows that are prepared from row `start` on.
void OctModel::part_product(const OctOp& op, const OctMatrix& w, size_t start, int count, float* out, int part, int parts) {
    const Activations from = view(shared).from(start, w.cols);
    Sink sink{};
    sink.mode = op.mode == OCT_GATED ? Sink::GATED : Sink::STORE;
    sink.act = op.act;
    sink.out = out;
    sink.stride = size_t(widths[size_t(op.out)]);
    isa.product(w, block_of(w, part, parts), block_of(w, part + 1, parts), from, count, shape.exact, sink);
}

void OctModel::blend(const OctOp& op, int token) const {
    float* out = row(op.out, token);
    for (int j = 0; j < used; j++) {
        const Choice& choice = choices[size_t(token * used + j)];
        const float* x = row(op.in, choice.slot);
        for (int i = 0; i < widths[size_t(op.out)]; i++) out[i] += choice.weight * x[i];
    }
}

// A token's last hidden state, for those who go on from it.
void OctModel::show(const OctOp& op, int token, int thread) const {
    const size_t cols = size_t(op.matrix->cols);
    float* normed = scratch[size_t(thread)].row.as<float>();
    isa.norm(op.norm_kind, row(op.in, token), op.norm, op.norm_bias, up(int(cols)), int(cols), op.eps, normed);
    memcpy(now->hidden + size_t(token) * cols, normed, cols * 4);
}

void OctModel::head(const OctOp& op, int chunk, int total, int thread) const {
    Sink sink{};
    sink.mode = Sink::HEAD;
    sink.out = now->logits;
    sink.stride = size_t(op.matrix->rows);
    sink.bias = op.bias;
    sink.cap = op.cap;
    sink.rows = op.matrix->rows;
    sink.logit_rows = now->logit_rows;
    sink.best = const_cast<float*>(bests.data()) + size_t(chunk) * size_t(now->samples);
    sink.best_id = const_cast<int32_t*>(best_ids.data()) + size_t(chunk) * size_t(now->samples);
    sink.check = checks.as<float>() + size_t(thread) * size_t(now->samples) * LANES;
    isa.product(*op.matrix, block_of(*op.matrix, chunk, total), block_of(*op.matrix, chunk + 1, total), view(shared),
                now->samples, shape.exact, sink);
}

OCT_API OctModel* oct_model_new(const OctShape* shape, const OctOp* ops, int32_t count, const int32_t* widths,
                                int32_t buffers, const OctAngles* angles, int32_t angle_count) {
    if (size_t(count) * 2 >= Team::MOST_PHASES - 1) return nullptr;
    try {
        return new OctModel(*shape, ops, count, widths, buffers, angles, angle_count);
    } catch (const std::exception&) {
        return nullptr;
    }
}

OCT_API int32_t oct_prompts(int32_t isa, int32_t kind) { return prompts(isa_of(least(isa, oct_isa_best())), kind); }

OCT_API uint64_t oct_block_bytes(const OctShape* shape) {
    return layout_of(*shape, isa_of(shape->isa)).bytes * uint64_t(shape->kv_heads);
}

OCT_API int32_t oct_ready(OctModel* model, int32_t tokens) {
    try {
        model->ready(tokens);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return OK;
}

OCT_API void oct_model_free(OctModel* model) { delete model; }

OCT_API int32_t oct_step(OctModel* model, const OctStep* step) {
    if (const int error = check(*step, model->shape, model->ops)) return error;
    try {
        model->step(*step);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return OK;
}

OCT_API int32_t oct_copy_cells(OctModel* model, int32_t count, const int32_t* source, const int32_t* target) {
    return model->copy_cells(count, source, target);
}

OCT_API void oct_times(OctModel* model, double* seconds) { model->seconds = seconds; }

OCT_API float* oct_buffer(OctModel* model, int32_t buffer, int32_t tokens) {
    model->reserve(tokens);
    return model->rows[size_t(buffer)].as<float>();
}

OCT_API void oct_linear(int32_t level, const OctMatrix* w, const float* x, int32_t n, int32_t how, float* y) {
    const Isa& isa = isa_of(least(level, oct_isa_best()));
    const int wide = grouped(w->cols);
    const Prepared rows(size_t(n), wide);
    const Form form = how == OCT_PROMPT ? HALVES : how == OCT_FAST && w->kind > OCT_BF16 ? INTEGERS : FLOATS;
    for (int m = 0; m < n; m += LANES) {
        const float* panel[LANES];
        for (int r = 0; r < least(LANES, n - m); r++) panel[r] = x + size_t(m + r) * size_t(w->cols);
        make_panel(isa, panel, least(LANES, n - m), w->cols, form, 0, 1,
                   view(rows).from(size_t(m), form == HALVES ? wide : w->cols));
    }
    Sink sink{};
    sink.mode = Sink::STORE;
    sink.out = y;
    sink.stride = size_t(w->blocks) * LANES;
    if (how == OCT_PROMPT) isa.prompt_product(*w, 0, w->blocks, view(rows), n, sink);
    else isa.product(*w, 0, w->blocks, view(rows), n, how == OCT_EXACT, sink);
}

OCT_API int32_t oct_embed(int32_t level, const OctMatrix* w, const int32_t* ids, int32_t count, float scale, float* out) {
    const Isa& isa = isa_of(least(level, oct_isa_best()));
    const size_t width = size_t(up(w->cols));
    std::vector<float> spare((width + GROUP - 1) / GROUP * GROUP), wide(width);
    for (int i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->rows) return -1;
    for (int i = 0; i < count; i++) {
        isa.embed(*w, ids[i], scale, false, spare.data(), wide.data());
        memcpy(out + size_t(i) * size_t(w->cols), wide.data(), size_t(w->cols) * 4);
    }
    return 0;
}

OCT_API double oct_byte_rate(int32_t level, int32_t threads, int32_t repeats) {
    struct Multiply : octavo::Job {
        const octavo::Isa* isa;
        std::vector<int64_t> done;
        void run(uint32_t, uint32_t chunk, uint32_t, int) override { done[chunk] = isa->byte_products(5000); }
    } job;
    job.isa = &octavo::isa_of(level < oct_isa_best() ? level : oct_isa_best());
    job.done.assign(size_t(threads) * 8, 0);
    octavo::Team team(threads);
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        team.run(job, {uint32_t(threads) * 8});
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        double all = 0;
        for (int64_t one : job.done) all += double(one);
        if (all / took.count() > best) best = all / took.count();
    }
    return best;
}
