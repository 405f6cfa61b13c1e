#include "check.h"

using namespace octavo;

namespace {

// A path ends within the sequence's text and within its table, which holds all that is before the path.
int check_path(const OctShape& shape, const OctStep& s, int token) {
    const int from = s.path_start[token], to = s.path_start[token + 1], trunk = s.positions[token] + 1 - (to - from);
    const int table = s.table_start[s.sequences[token]], blocks = s.table_start[s.sequences[token] + 1] - table;
    if (from < 0 || trunk < 0) return BAD_SEQUENCE;
    int most = trunk - 1;
    for (int i = from; i < to; i++) {
        if (s.paths[i] < 0) return BAD_SEQUENCE;
        most = s.paths[i] > most ? s.paths[i] : most;
    }
    if (table < 0 || most / shape.block_size >= blocks) return BAD_TABLE;
    for (int b = 0; b <= most / shape.block_size; b++)
        if (s.tables[table + b] < 0 || s.tables[table + b] >= shape.blocks) return BAD_TABLE;
    return OK;
}

}  // namespace

int octavo::check(const OctStep& s, const OctShape& shape, const std::vector<OctOp>& ops) {
    if (s.tokens < 0 || s.samples < 0 || s.copies < 0 || s.samples > s.tokens) return BAD_COUNT;
    int vocabulary = INT32_MAX;
    for (const OctOp& op : ops)
        if (op.kind == OCT_EMBED && op.mode == OCT_STORE) vocabulary = op.matrix->rows;
    for (int i = 0; i < s.tokens; i++) {
        if (s.ids[i] < 0 || s.ids[i] >= vocabulary) return BAD_ID;
        if (s.positions[i] < 0 || s.positions[i] >= shape.context) return BAD_POSITION;
        if (s.sequences[i] < 0 || s.sequences[i] >= s.tables_count) return BAD_SEQUENCE;
        if (i && s.sequences[i] < s.sequences[i - 1]) return BAD_SEQUENCE;
        if (s.paths && s.path_start[i + 1] > s.path_start[i]) {
            if (const int error = check_path(shape, s, i)) return error;
            continue;
        }
        if (i && s.sequences[i] == s.sequences[i - 1] && s.positions[i] != s.positions[i - 1] + 1) return BAD_SEQUENCE;
    }
    for (int i = 0; i < s.tokens; i++) {
        const auto branched = [&](int token) { return s.paths && s.path_start[token + 1] > s.path_start[token]; };
        if (branched(i)) continue;
        if (i + 1 < s.tokens && s.sequences[i + 1] == s.sequences[i] && !branched(i + 1)) continue;  // that needs more
        const int from = s.table_start[s.sequences[i]], to = s.table_start[s.sequences[i] + 1];
        const int needed = s.positions[i] / shape.block_size + 1;
        if (from < 0 || to - from < needed) return BAD_TABLE;
        for (int b = from; b < from + needed; b++)
            if (s.tables[b] < 0 || s.tables[b] >= shape.blocks) return BAD_TABLE;
    }
    for (int i = 0; i < s.taps; i++)
        if (s.tap_ops[i] < (i ? s.tap_ops[i - 1] : 0) || size_t(s.tap_ops[i]) >= ops.size() ||
            ops[size_t(s.tap_ops[i])].kind != OCT_LINEAR)
            return BAD_TAP;
    for (int i = 0; i < s.samples; i++)
        if (s.sample_rows[i] < 0 || s.sample_rows[i] >= s.tokens) return BAD_SAMPLE;
    for (int i = 0; i < s.copies; i++)
        if (s.copy_source[i] < 0 || s.copy_source[i] >= shape.blocks || s.copy_target[i] < 0 ||
            s.copy_target[i] >= shape.blocks)
            return BAD_COPY;
    for (int i = 0; s.loaded_count && i < s.tokens; i++)
        if (s.adapters[i] < -1 || s.adapters[i] >= s.loaded_count) return BAD_ADAPTER;
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
        case BAD_TAP: return "a tap on what is no linear operation, or taps out of order";
        case BAD_ADAPTER: return "a token with an adapter that is not there";
        case NO_MEMORY: return "the system has no memory for so many tokens";
        default: return "an unknown error";
    }
}
