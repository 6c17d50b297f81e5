// What the two kinds of attention share. `Element` and HEAD_DIM are defined by who includes it.

#pragma once

#include <cstdint>
#include <cstring>

// What an attention call works on; mirrored field by field in library.py.
struct Attention {
    const Element* query;         // [T, H, D]
    const Element* key;           // [T, HK, D]
    const Element* value;         // [T, HK, D]
    Element* out;                 // [T, H, D], contiguous
    Element* key_pool;            // [num_blocks, HK, block, D]
    Element* value_pool;
    const int64_t* slots;         // [T]
    const int32_t* tables;        // [S, W]
    const int32_t* context_lens;  // [S]
    const int32_t* query_starts;  // [S + 1]
    const int32_t* tile_rows;     // [tiles] of S
    const int32_t* tile_starts;   // [tiles] the tile's first token, counted from its row's first
    int64_t query_stride, key_stride, value_stride;  // elements from token to token
    int64_t num_tokens, num_tiles, table_width, num_heads, num_kv_heads, block_size;
    int64_t tile_tokens;          // tokens of a tile, at most
    float scale;                  // of scores
};

namespace {

inline int64_t at_most(int64_t value, int64_t bound) { return value < bound ? value : bound; }

inline void write_token(const Attention& a, int64_t token) {
    int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        int64_t to = ((block * a.num_kv_heads + head) * a.block_size + offset) * HEAD_DIM;
        std::memcpy(a.key_pool + to, a.key + token * a.key_stride + head * HEAD_DIM, sizeof(Element) * HEAD_DIM);
        std::memcpy(a.value_pool + to, a.value + token * a.value_stride + head * HEAD_DIM, sizeof(Element) * HEAD_DIM);
    }
}

}  // namespace
