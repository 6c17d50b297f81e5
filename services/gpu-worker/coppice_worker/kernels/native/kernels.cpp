// Kernels for CPUs. Built at first use (build.py), called through ctypes (library.py), one build per element type and
// head size:
//
//     -DBFLOAT16 or not      type of activations and of KV; all arithmetic is float32
//     -DHEAD_DIM=64          a multiple of 16
//
// Rows are independent of each other, so neither the number of threads nor batch mates change a result.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

constexpr int VECTORS = HEAD_DIM / LANES;  // of one head
constexpr int TILE_ROWS = 64;              // query heads of a tile, at most
constexpr int KEYS = 16;                   // keys that are looked at together: one vector of scores
constexpr int LINE = 64;                   // bytes of a line of the caches
constexpr int64_t SERIAL_ELEMENTS = 32768; // waking a thread costs more than passing over so few

typedef uint16_t Halves __attribute__((vector_size(32)));

static_assert(HEAD_DIM % LANES == 0, "heads are read in whole vectors");

#ifdef BFLOAT16
typedef uint16_t Element;

inline Floats load(const Element* at) {
    Halves narrow;
    std::memcpy(&narrow, at, sizeof narrow);
    return (Floats)(__builtin_convertvector(narrow, Words) << 16);
}

inline void store(Element* at, Floats values) {
    Words bits = (Words)values;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words is_nan = (Words)(values != values);
    Halves narrow = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
    std::memcpy(at, &narrow, sizeof narrow);
}

inline float load_one(const Element* at) {
    uint32_t bits = (uint32_t)*at << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store_one(Element* at, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    *at = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
typedef float Element;

inline Floats load(const Element* at) {
    Floats values;
    std::memcpy(&values, at, sizeof values);
    return values;
}

inline void store(Element* at, Floats values) { std::memcpy(at, &values, sizeof values); }
inline float load_one(const Element* at) { return *at; }
inline void store_one(Element* at, float value) { *at = value; }
#endif

// Sums of 16 vectors, as one vector: halves the number of vectors four times.
inline Floats sums(Floats* v) {
    constexpr Ints even8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    constexpr Ints odd8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    constexpr Ints even4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    constexpr Ints odd4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
    constexpr Ints even2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    constexpr Ints odd2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    constexpr Ints even1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    constexpr Ints odd1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
    for (int i = 0; i < 8; ++i) v[i] = __builtin_shuffle(v[i], v[i + 8], even8) + __builtin_shuffle(v[i], v[i + 8], odd8);
    for (int i = 0; i < 4; ++i) v[i] = __builtin_shuffle(v[i], v[i + 4], even4) + __builtin_shuffle(v[i], v[i + 4], odd4);
    for (int i = 0; i < 2; ++i) v[i] = __builtin_shuffle(v[i], v[i + 2], even2) + __builtin_shuffle(v[i], v[i + 2], odd2);
    return __builtin_shuffle(v[0], v[1], even1) + __builtin_shuffle(v[0], v[1], odd1);
}

struct Tile {
    float query[TILE_ROWS][HEAD_DIM] __attribute__((aligned(64)));
    float out[TILE_ROWS][HEAD_DIM] __attribute__((aligned(64)));
    float keys[KEYS][HEAD_DIM] __attribute__((aligned(64)));
    float values[KEYS][HEAD_DIM] __attribute__((aligned(64)));
    float most[TILE_ROWS];   // largest score so far
    float total[TILE_ROWS];  // sum of exp(score - most) so far
};

// Slots past the sequence's last token are never read: they may hold anything.
inline void widen(const Element* from, int count, float (*to)[HEAD_DIM]) {
    for (int token = 0; token < count; ++token)
        for (int part = 0; part < VECTORS; ++part) {
            Floats values = load(from + token * HEAD_DIM + part * LANES);
            std::memcpy(&to[token][part * LANES], &values, sizeof values);
        }
    if (count < KEYS) std::memset(to[count], 0, sizeof(float) * HEAD_DIM * (KEYS - count));
}

// Blocks lie anywhere, so no cache knows which keys come next.
inline void ask_for(const Element* keys) {
    for (int at = 0; at < KEYS * HEAD_DIM; at += LINE / (int)sizeof(Element)) __builtin_prefetch(keys + at);
}

inline Floats part_of(const float* head, int part) {
    Floats values;
    std::memcpy(&values, head + part * LANES, sizeof values);
    return values;
}

// One query row against the tile's keys, of which it sees the first `seen`.
inline void take_keys(Tile& tile, int row, int seen) {
    Floats dots[KEYS];
    for (int key = 0; key < KEYS; ++key) {
        dots[key] = part_of(tile.query[row], 0) * part_of(tile.keys[key], 0);
        for (int part = 1; part < VECTORS; ++part)
            dots[key] += part_of(tile.query[row], part) * part_of(tile.keys[key], part);
    }
    Floats scores = sums(dots);
    constexpr Ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    scores = index < seen ? scores : spread(-INFINITY);
    float most = largest(scores);
    most = most > tile.most[row] ? most : tile.most[row];
    Floats weights = exponential(scores - most);
    // The first keys are always seen, so `most` is finite; what was nothing before stays nothing.
    float fade = exponential(spread(tile.most[row] - most))[0];
    tile.most[row] = most;
    tile.total[row] = tile.total[row] * fade + sum(weights);
    Floats out[VECTORS];
    for (int part = 0; part < VECTORS; ++part) out[part] = part_of(tile.out[row], part) * fade;
    for (int key = 0; key < KEYS; ++key)
        for (int part = 0; part < VECTORS; ++part) out[part] += weights[key] * part_of(tile.values[key], part);
    std::memcpy(tile.out[row], out, sizeof out);
}

}  // namespace

#include "attention.h"

namespace {

// Tokens of one sequence and all query heads of one KV head.
void attend_tile(const Attention& a, int64_t tile_index, int64_t kv_head, Tile& tile) {
    int64_t row = a.tile_rows[tile_index], group = a.num_heads / a.num_kv_heads;
    int64_t new_tokens = a.query_starts[row + 1] - a.query_starts[row];
    int64_t start = a.tile_starts[tile_index], count = at_most(a.tile_tokens, new_tokens - start);
    int64_t first_token = a.query_starts[row] + start;
    int64_t first_seen = a.context_lens[row] - new_tokens + start + 1;  // keys that the first token sees
    for (int64_t i = 0; i < count * group; ++i) {
        const Element* head = a.query + (first_token + i / group) * a.query_stride + (kv_head * group + i % group) * HEAD_DIM;
        for (int part = 0; part < VECTORS; ++part) {
            Floats values = load(head + part * LANES) * a.scale;
            std::memcpy(&tile.query[i][part * LANES], &values, sizeof values);
        }
        tile.most[i] = -INFINITY;
        tile.total[i] = 0;
        std::memset(tile.out[i], 0, sizeof tile.out[i]);
    }
    int64_t num_keys = first_seen + count - 1;
    for (int64_t key = 0; key < num_keys;) {
        int64_t offset = key % a.block_size;
        int64_t taken = at_most(at_most(KEYS, a.block_size - offset), num_keys - key);
        int64_t block = a.tables[row * a.table_width + key / a.block_size];
        int64_t from = ((block * a.num_kv_heads + kv_head) * a.block_size + offset) * HEAD_DIM;
        if (key + taken < num_keys) {
            int64_t next = a.tables[row * a.table_width + (key + taken) / a.block_size];
            int64_t at = ((next * a.num_kv_heads + kv_head) * a.block_size + (key + taken) % a.block_size) * HEAD_DIM;
            ask_for(a.key_pool + at);
            ask_for(a.value_pool + at);
        }
        widen(a.key_pool + from, taken, tile.keys);
        widen(a.value_pool + from, taken, tile.values);
        for (int64_t i = 0; i < count * group; ++i) {
            int64_t seen = at_most(taken, first_seen + i / group - key);
            if (seen > 0) take_keys(tile, i, seen);
        }
        key += taken;
    }
    for (int64_t i = 0; i < count * group; ++i) {
        Element* to = a.out + ((first_token + i / group) * a.num_heads + kv_head * group + i % group) * HEAD_DIM;
        for (int part = 0; part < VECTORS; ++part)
            store(to + part * LANES, part_of(tile.out[i], part) * (1.0f / tile.total[i]));
    }
}

}  // namespace

// Writes the new tokens' KV, then attends for all tiles.
extern "C" void attend(const Attention* call, int threads) {
    const Attention& a = *call;
    int64_t tasks = a.num_tiles * a.num_kv_heads;
#pragma omp parallel num_threads(threads) if (tasks > 1 || a.num_tokens * a.num_kv_heads * HEAD_DIM > SERIAL_ELEMENTS)
    {
        Tile tile;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a.num_tokens; ++token) write_token(a, token);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) attend_tile(a, task / a.num_kv_heads, task % a.num_kv_heads, tile);
    }
}

// hidden [rows, size] += delta (if there is one); out = hidden / rms(hidden) * weight.
extern "C" void add_norm(Element* hidden, const Element* delta, const float* weight, Element* out, int64_t rows,
                         int64_t size, float eps, int threads) {
    int64_t whole = size / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SERIAL_ELEMENTS)
    for (int64_t row = 0; row < rows; ++row) {
        Element* h = hidden + row * size;
        const Element* d = delta ? delta + row * size : nullptr;
        Element* o = out + row * size;
        Floats squares = {};
        float rest = 0;
        for (int64_t i = 0; i < whole; i += LANES) {
            if (d) store(h + i, load(h + i) + load(d + i));
            Floats values = load(h + i);
            squares += values * values;
        }
        for (int64_t i = whole; i < size; ++i) {
            if (d) store_one(h + i, load_one(h + i) + load_one(d + i));
            rest += load_one(h + i) * load_one(h + i);
        }
        float scale = 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
        for (int64_t i = 0; i < whole; i += LANES) store(o + i, load(h + i) * scale * part_of(weight + i, 0));
        for (int64_t i = whole; i < size; ++i) store_one(o + i, load_one(h + i) * scale * weight[i]);
    }
}

// heads [tokens, num_heads, D], rotated in place by cos and sin [tokens, D / 2]; `stride` elements from token to token.
extern "C" void rotate(Element* heads, const Element* cos, const Element* sin, int64_t tokens, int64_t num_heads,
                       int64_t stride, int threads) {
    constexpr int HALF = HEAD_DIM / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * num_heads * HEAD_DIM > SERIAL_ELEMENTS)
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t head = 0; head < num_heads; ++head) {
            Element* first = heads + token * stride + head * HEAD_DIM;
            Element* second = first + HALF;
            const Element* c = cos + token * HALF;
            const Element* s = sin + token * HALF;
            for (int i = 0; i + LANES <= HALF; i += LANES) {
                Floats a = load(first + i), b = load(second + i);
                store(first + i, a * load(c + i) - b * load(s + i));
                store(second + i, b * load(c + i) + a * load(s + i));
            }
            for (int i = HALF / LANES * LANES; i < HALF; ++i) {
                float a = load_one(first + i), b = load_one(second + i);
                store_one(first + i, a * load_one(c + i) - b * load_one(s + i));
                store_one(second + i, b * load_one(c + i) + a * load_one(s + i));
            }
        }
}

// both [rows, 2 size] = gate and up; out [rows, size] = silu(gate) * up.
extern "C" void gate(const Element* both, Element* out, int64_t rows, int64_t size, int threads) {
    int64_t whole = size / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SERIAL_ELEMENTS)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* g = both + row * 2 * size;
        const Element* u = g + size;
        Element* o = out + row * size;
        for (int64_t i = 0; i < whole; i += LANES) {
            store(o + i, silu(load(g + i)) * load(u + i));
        }
        for (int64_t i = whole; i < size; ++i) {
            float x = load_one(g + i);
            store_one(o + i, x / (1.0f + std::exp(-x)) * load_one(u + i));
        }
    }
}

// out [rows] = the first of the largest of logits [rows, size]; one that is not a number counts as the largest.
extern "C" void argmax(const Element* logits, int64_t* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SERIAL_ELEMENTS)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* from = logits + row * size;
        Floats most = spread(-INFINITY);
        Ints at = {}, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t i = 0; i + LANES <= size; i += LANES, here += LANES) {
            Floats values = load(from + i);
            Ints better = (values > most) | ((values != values) & (most == most));
            most = better ? values : most;
            at = better ? here : at;
        }
        float best = load_one(from);
        int64_t index = 0;
        auto look = [&](float value, int64_t candidate) {
            bool better = value > best || (value != value && best == best);
            bool same = value == best || (value != value && best != best);
            if (better || (same && candidate < index)) best = value, index = candidate;
        };
        for (int lane = 0; lane < LANES && size >= LANES; ++lane)
            if (most[lane] != -INFINITY) look(most[lane], at[lane]);
        for (int64_t i = size / LANES * LANES; i < size; ++i) look(load_one(from + i), i);
        out[row] = index;
    }
}
