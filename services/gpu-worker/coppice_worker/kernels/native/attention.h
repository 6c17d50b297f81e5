// What the two kinds of attention share. `Element` and HEAD_DIM are defined by who includes it.

#pragma once

#include <cstdint>

// One layer, for as long as its pool lives; mirrored field by field in library.py.
struct Layer {
    Element* keys;            // [num_blocks, HK, block, D]
    Element* values;
    const float* query_norm;  // [D], or null
    const float* key_norm;    // [D], or null
    const float* sinks;       // [H], or null
    int64_t window;           // keys that a token sees, its own included
    float norm_eps;
    float scale;              // of scores
    float soft_cap;           // 0: none
};

// One step, shared by its layers; mirrored field by field in library.py.
struct Step {
    const Layer* layers;
    const int64_t* slots;         // [T]
    const int32_t* tables;        // [S, W]
    const int32_t* context_lens;  // [S]
    const int32_t* query_starts;  // [S + 1]
    const int32_t* tile_rows;     // [tiles] of S
    const int32_t* tile_starts;   // [tiles] the tile's first token, counted from its row's first
    int64_t num_tokens, num_tiles, table_width, num_heads, num_kv_heads, block_size;
    int64_t tile_tokens;          // tokens of a tile, at most
    int64_t threads;
};

namespace {

inline int64_t at_most(int64_t value, int64_t bound) { return value < bound ? value : bound; }
inline int64_t at_least(int64_t value, int64_t bound) { return value > bound ? value : bound; }

// Some tokens of one sequence and all query heads of one KV head: query rows, a token's heads side by side.
struct Tile {
    int64_t row, group, kv_head, first_token, num_rows;
    int64_t first_seen;           // keys up to the first token's own: it sees no other
    int64_t first_key, num_keys;  // keys [first_key, num_keys) are seen by somebody here

    int64_t token(int64_t i) const { return first_token + i / group; }
    int64_t head(int64_t i) const { return kv_head * group + i % group; }
    int64_t seen(int64_t i) const { return first_seen + i / group; }  // the i-th query row sees keys before this
};

inline Tile tile_of(const Step& s, const Layer& layer, int64_t task) {
    int64_t index = task / s.num_kv_heads, row = s.tile_rows[index], group = s.num_heads / s.num_kv_heads;
    int64_t new_tokens = s.query_starts[row + 1] - s.query_starts[row], start = s.tile_starts[index];
    int64_t count = at_most(s.tile_tokens, new_tokens - start);
    int64_t seen = s.context_lens[row] - new_tokens + start + 1;
    return {row, group, task % s.num_kv_heads, s.query_starts[row] + start, count * group,
            seen, at_least(seen - layer.window, 0), seen + count - 1};
}

// Where a key lies in the pool.
inline int64_t offset_of(const Step& s, const Tile& tile, int64_t key) {
    int64_t block = s.tables[tile.row * s.table_width + key / s.block_size];
    return ((block * s.num_kv_heads + tile.kv_head) * s.block_size + key % s.block_size) * HEAD_DIM;
}

// Keys and values that come next: blocks lie anywhere, so no cache knows them. They are asked for a little at a time, as
// a processor has room for few requests, and whoever finds none waits.
struct Ahead {
    const char* keys;
    const char* values;
    int64_t lines = 0;  // of each that are left to be asked for

    void expect(const Layer& layer, int64_t from, int64_t count) {
        keys = (const char*)(layer.keys + from);
        values = (const char*)(layer.values + from);
        lines = count * HEAD_DIM * (int64_t)sizeof(Element) / 64;
    }

    void ask(int64_t count) {
        for (int64_t i = at_most(count, lines); i > 0; --i, --lines, keys += 64, values += 64) {
            __builtin_prefetch(keys);
            __builtin_prefetch(values);
        }
    }
};

}  // namespace
