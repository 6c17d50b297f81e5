// Attention over blocks in bfloat16 with the CPU's matrix tiles (AMX); one build per head size, -DHEAD_DIM=64, a
// multiple of 16. The tile unit goes along a head in steps of 32: where half a step is left over, zeros fill it.
//
// Keys go by in chunks of 32, brought into the tile unit's order once for all the query rows of a tile:
//
//     scores [16 rows, 32 keys] = query x keys^T        exact products, float32 sums
//     out    [16 rows, D]      += weights x values      weights as two bfloat16 numbers, high + low: 16 bits of them
//
// Rows are independent of each other, so neither the number of threads nor batch mates change a result.

#if !defined(__AMX_TILE__) || !defined(__AMX_BF16__) || !defined(__AVX512BF16__)
#error "this CPU has no bfloat16 tiles"
#endif

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t Element;  // bfloat16

#include "attention.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int ROWS = 16;                  // of a tile
constexpr int KEYS = 32;                  // of a chunk
constexpr int GROUPS = 4;                 // of 16 query rows, in a tile
constexpr int STEPS = (HEAD_DIM + 31) / 32;  // of the tile unit, along a head
constexpr int DEPTH = STEPS * 32;         // of a head, with the zeros that fill its last step
constexpr int PARTS = DEPTH / LANES;      // of that, in tiles of the output
constexpr int HALF_LINES = 16 * HEAD_DIM / 32;  // of the caches, in the keys of half a chunk

static_assert(HEAD_DIM % 16 == 0, "heads are read in whole vectors");

// What a thread needs for one tile.
struct Work {
    Element query[GROUPS * ROWS][DEPTH];
    Element keys[2][STEPS][ROWS][KEYS];   // by half of the chunk: pairs along the head x 16 keys
    Element values[PARTS][ROWS][KEYS];    // pairs of keys x 16 of the head
    Element high[ROWS][KEYS], low[ROWS][KEYS];
    float scores[ROWS][KEYS];
    float out[GROUPS * ROWS][DEPTH];
    float total[GROUPS * ROWS][LANES];    // sums of exp(score - most), lane by lane
    float most[GROUPS * ROWS];            // largest score so far
    Ahead ahead;
} __attribute__((aligned(64)));

// Rows of 16 words of 32 bits become columns.
inline void transpose(__m512i* v) {
    __m512i w[16];
    for (int i = 0; i < 16; i += 2) {
        w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(w[i + j], w[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(w[i + j], w[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        w[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        w[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        w[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        w[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        v[i] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
    }
}

// 32 numbers of a head, from the given step on.
inline __m512i load_step(const Element* head, int step) {
    bool whole = HEAD_DIM % 32 == 0 || step + 1 < STEPS;
    return whole ? _mm512_loadu_si512(head + step * 32)
                 : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(head + step * 32)));
}

// 16 keys. Those that are not seen may hold anything: their scores are never looked at.
inline void lay_out_keys(const Element* from, Element (*to)[ROWS][KEYS], Ahead& ahead) {
    for (int step = 0; step < STEPS; ++step) {
        __m512i rows[16];
        ahead.ask(HALF_LINES / STEPS / 2);
        for (int key = 0; key < 16; ++key) rows[key] = load_step(from + key * HEAD_DIM, step);
        transpose(rows);
        for (int pair = 0; pair < 16; ++pair) _mm512_store_si512(to[step][pair], rows[pair]);
    }
}

// 16 values, of which those in [first, end) are seen and the others nothing, as nothing times NaN would be NaN.
inline void lay_out_values(const Element* from, int64_t first, int64_t end, Element (*to)[ROWS][KEYS], int first_pair,
                           Ahead& ahead) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    auto value = [=](int token, int step) {
        bool is_seen = token >= first && token < end;
        return is_seen ? load_step(from + token * HEAD_DIM, step) : _mm512_setzero_si512();
    };
    for (int pair = 0; pair < 8; ++pair) {
        ahead.ask(HALF_LINES / 16 + 1);
        for (int step = 0; step < STEPS; ++step) {
            __m512i even = value(2 * pair, step), odd = value(2 * pair + 1, step);
            _mm512_store_si512(to[2 * step][first_pair + pair], _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to[2 * step + 1][first_pair + pair], _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

inline Floats load_floats(const float* at) { return (Floats)_mm512_load_ps(at); }

inline void scale_row(float* out, Floats by) {
    for (int part = 0; part < PARTS; ++part)
        _mm512_store_ps(out + part * LANES, (__m512)(load_floats(out + part * LANES) * by));
}

// One row of scores becomes weights; the row sees keys [first, end) of the chunk.
inline void weigh(const Layer& layer, Work& work, int64_t row, int64_t in_group, int first, int end) {
    Floats nothing = spread(-INFINITY);
    Floats left = load_floats(work.scores[in_group]) * layer.scale;
    Floats right = load_floats(work.scores[in_group] + LANES) * layer.scale;
    if (layer.soft_cap != 0) {
        left = layer.soft_cap * tangent(left * (1.0f / layer.soft_cap));
        right = layer.soft_cap * tangent(right * (1.0f / layer.soft_cap));
    }
    left = (NUMBERED >= first) & (NUMBERED < end) ? left : nothing;
    right = (NUMBERED + LANES >= first) & (NUMBERED + LANES < end) ? right : nothing;
    float before = work.most[row], most = largest(larger(left, right));
    if (most > before) {
        work.most[row] = most;
        Floats fade = exponential(spread(before - most));  // what was nothing before stays nothing
        scale_row(work.out[row], fade);
        _mm512_store_ps(work.total[row], (__m512)(load_floats(work.total[row]) * fade));
    } else {
        most = before;
    }
    left = exponential(left - most);
    right = exponential(right - most);
    _mm512_store_ps(work.total[row], (__m512)(load_floats(work.total[row]) + left + right));
    __m512i high = (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left);
    __m512i wide_left = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
    __m512i wide_right = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
    _mm512_store_si512(work.high[in_group], high);
    _mm512_store_si512(work.low[in_group], (__m512i)_mm512_cvtne2ps_pbh((__m512)(right - (Floats)wide_right),
                                                                       (__m512)(left - (Floats)wide_left)));
}

inline void score(Work& work, int group) {
    _tile_zero(0);
    _tile_zero(1);
    for (int step = 0; step < STEPS; ++step) {
        _tile_loadd(4, work.query[group * ROWS] + step * 32, sizeof work.query[0]);
        _tile_loadd(6, work.keys[0][step], LINE);
        _tile_loadd(7, work.keys[1][step], LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, work.scores[0], sizeof work.scores[0]);
    _tile_stored(1, work.scores[0] + LANES, sizeof work.scores[0]);
}

inline void add_values(Work& work, int group) {
    constexpr int64_t row = sizeof work.out[0];
    float* out = work.out[group * ROWS];
    _tile_loadd(4, work.high, LINE);
    _tile_loadd(5, work.low, LINE);
    for (int part = 0; part < PARTS; part += 2) {
        _tile_loadd(0, out + part * LANES, row);
        _tile_loadd(1, out + (part + 1) * LANES, row);
        _tile_loadd(6, work.values[part], LINE);
        _tile_loadd(7, work.values[part + 1], LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, out + part * LANES, row);
        _tile_stored(1, out + (part + 1) * LANES, row);
    }
}

void begin(const Layer& layer, const Tile& tile, const Element* query, int64_t stride, Work& work) {
    std::memset(work.query, 0, sizeof work.query[0] * ((tile.num_rows + ROWS - 1) / ROWS * ROWS));
    for (int64_t i = 0; i < tile.num_rows; ++i) {
        const Element* from = query + tile.token(i) * stride + tile.head(i) * HEAD_DIM;
        std::memcpy(work.query[i], from, HEAD_DIM * sizeof(Element));
        // A sink is a key without a value that was seen before all others.
        work.most[i] = layer.sinks ? layer.sinks[tile.head(i)] : -INFINITY;
        std::memset(work.total[i], 0, sizeof work.total[i]);
        if (layer.sinks) work.total[i][0] = 1;
    }
    std::memset(work.out, 0, sizeof work.out[0] * ((tile.num_rows + ROWS - 1) / ROWS * ROWS));
}

// Brings half a chunk into the unit's order. A half that is not there: its scores are not looked at, its values are
// nothing.
void lay_out(const Step& s, const Layer& layer, const Tile& tile, int64_t key, int half, Work& work) {
    int64_t start = key + half * 16, first = at_least(tile.first_key - start, 0);
    int64_t end = at_most(tile.num_keys - start, 16), from = offset_of(s, tile, end > 0 ? start : key);
    lay_out_keys(layer.keys + from, work.keys[half], work.ahead);
    lay_out_values(layer.values + from, first, end, work.values, half * 8, work.ahead);
}

// The first half of the next chunk is asked for while this one is laid out, the second while its keys are weighed.
void expect(const Step& s, const Layer& layer, const Tile& tile, int64_t key, Work& work) {
    if (key < tile.num_keys) work.ahead.expect(layer, offset_of(s, tile, key), 16);
}

// A group of 16 query rows against the keys that were laid out.
void take_chunk(const Layer& layer, const Tile& tile, int64_t key, int64_t group, Work& work) {
    int64_t top = group * ROWS, count = at_most(tile.num_rows - top, ROWS);
    bool is_seen = tile.seen(top + count - 1) > key && tile.seen(top) - layer.window < key + KEYS;
    if (!is_seen) return;
    int64_t lines = (HALF_LINES + count - 1) / count;
    score(work, (int)group);
    for (int64_t i = 0; i < count; ++i) {
        int64_t seen = tile.seen(top + i) - key, first = at_least(seen - layer.window, 0), end = at_most(seen, KEYS);
        work.ahead.ask(lines);
        if (first < end) {
            weigh(layer, work, top + i, i, (int)first, (int)end);
        } else {
            std::memset(work.high[i], 0, sizeof work.high[i]);
            std::memset(work.low[i], 0, sizeof work.low[i]);
        }
    }
    add_values(work, (int)group);
}

void finish(const Step& s, const Tile& tile, const Work& work, Element* out) {
    for (int64_t i = 0; i < tile.num_rows; ++i) {
        Element* to = out + (tile.token(i) * s.num_heads + tile.head(i)) * HEAD_DIM;
        Floats by = spread(1.0f / sum(load_floats(work.total[i])));
        for (int part = 0; part < HEAD_DIM / LANES; ++part) {
            __m512 values = (__m512)(load_floats(work.out[i] + part * LANES) * by);
            _mm256_storeu_si256((__m256i*)(to + part * LANES), (__m256i)_mm512_cvtneps_pbh(values));
        }
    }
}

}  // namespace

// Attends for all tiles, as the function of this name in kernels.cpp. Blocks hold a multiple of 16 tokens.
extern "C" void attend(const Step* step, int64_t index, const Element* query, int64_t stride, Element* out) {
    const Step& s = *step;
    const Layer& layer = s.layers[index];
    int64_t tasks = s.num_tiles * s.num_kv_heads;
#pragma omp parallel num_threads(s.threads) if (tasks > 1)
    {
        Work work;
        std::memset(work.high, 0, sizeof work.high);
        std::memset(work.low, 0, sizeof work.low);
        configure(ROWS, ROWS);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) {
            Tile tile = tile_of(s, layer, task);
            begin(layer, tile, query, stride, work);
            // Where the first chunk begins does not depend on the tile, or a row's sums would.
            for (int64_t key = tile.first_key / KEYS * KEYS; key < tile.num_keys; key += KEYS) {
                expect(s, layer, tile, key + KEYS, work);
                lay_out(s, layer, tile, key, 0, work);
                lay_out(s, layer, tile, key, 1, work);
                expect(s, layer, tile, key + KEYS + 16, work);
                for (int64_t group = 0; group * ROWS < tile.num_rows; ++group)
                    take_chunk(layer, tile, key, group, work);
            }
            finish(s, tile, work, out);
        }
        _tile_release();
    }
}
