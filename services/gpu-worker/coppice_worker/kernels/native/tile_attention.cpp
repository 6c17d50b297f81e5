// Attention over blocks in bfloat16 with the CPU's matrix tiles (AMX); one build per head size, -DHEAD_DIM=64.
//
// Keys go by in chunks of 32, brought into the tile unit's order once for all the query rows of a task:
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
constexpr int GROUPS = 4;                 // of 16 query rows, in a task
constexpr int STEPS = HEAD_DIM / 32;      // of the tile unit, along a head
constexpr int PARTS = HEAD_DIM / LANES;   // of a head, in tiles of the output

static_assert(HEAD_DIM % 32 == 0, "heads are read in whole tiles");

struct Task {
    Element query[GROUPS * ROWS][HEAD_DIM];
    Element keys[2][STEPS][ROWS][KEYS];   // by half of the chunk: pairs along the head x 16 keys
    Element values[PARTS][ROWS][KEYS];    // pairs of keys x 16 of the head
    Element high[ROWS][KEYS], low[ROWS][KEYS];
    float scores[ROWS][KEYS];
    float out[GROUPS * ROWS][HEAD_DIM];
    float total[GROUPS * ROWS][LANES];    // sums of exp(score - most), lane by lane
    float most[GROUPS * ROWS];            // largest score so far
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

// 16 keys. Those past the sequence's last token may hold anything: their scores are never looked at.
inline void lay_out_keys(const Element* from, Element (*to)[ROWS][KEYS]) {
    for (int step = 0; step < STEPS; ++step) {
        __m512i rows[16];
        for (int key = 0; key < 16; ++key) rows[key] = _mm512_loadu_si512(from + key * HEAD_DIM + step * 32);
        transpose(rows);
        for (int pair = 0; pair < 16; ++pair) _mm512_store_si512(to[step][pair], rows[pair]);
    }
}

// 16 values, of which the first `count` are tokens and the others nothing, as nothing times NaN would be NaN.
inline void lay_out_values(const Element* from, int count, Element (*to)[ROWS][KEYS], int first_pair) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int pair = 0; pair < 8; ++pair)
        for (int part = 0; part < PARTS; part += 2) {
            const Element* at = from + 2 * pair * HEAD_DIM + part * LANES;
            __m512i even = 2 * pair < count ? _mm512_loadu_si512(at) : _mm512_setzero_si512();
            __m512i odd = 2 * pair + 1 < count ? _mm512_loadu_si512(at + HEAD_DIM) : _mm512_setzero_si512();
            _mm512_store_si512(to[part][first_pair + pair], _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to[part + 1][first_pair + pair], _mm512_permutex2var_epi16(even, high, odd));
        }
}

inline Floats load_floats(const float* at) { return (Floats)_mm512_load_ps(at); }

inline void scale_row(float* out, Floats by) {
    for (int part = 0; part < PARTS; ++part)
        _mm512_store_ps(out + part * LANES, (__m512)(load_floats(out + part * LANES) * by));
}

// One row of scores becomes weights; the row sees the first `seen` keys of the chunk.
inline void weigh(Task& task, int row, int in_group, int seen, float scale) {
    constexpr Ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats nothing = spread(-INFINITY);
    Floats left = load_floats(task.scores[in_group]) * scale;
    Floats right = load_floats(task.scores[in_group] + LANES) * scale;
    left = index < seen ? left : nothing;
    right = index + LANES < seen ? right : nothing;
    float before = task.most[row], most = largest(larger(left, right));
    if (most > before) {
        task.most[row] = most;
        Floats fade = exponential(spread(before - most));  // what was nothing before stays nothing
        scale_row(task.out[row], fade);
        _mm512_store_ps(task.total[row], (__m512)(load_floats(task.total[row]) * fade));
    } else {
        most = before;
    }
    left = exponential(left - most);
    right = exponential(right - most);
    _mm512_store_ps(task.total[row], (__m512)(load_floats(task.total[row]) + left + right));
    __m512i high = (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left);
    __m512i wide_left = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
    __m512i wide_right = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
    _mm512_store_si512(task.high[in_group], high);
    _mm512_store_si512(task.low[in_group], (__m512i)_mm512_cvtne2ps_pbh((__m512)(right - (Floats)wide_right),
                                                                       (__m512)(left - (Floats)wide_left)));
}

inline void score(Task& task, int group) {
    _tile_zero(0);
    _tile_zero(1);
    for (int step = 0; step < STEPS; ++step) {
        _tile_loadd(4, task.query[group * ROWS] + step * 32, sizeof task.query[0]);
        _tile_loadd(6, task.keys[0][step], LINE);
        _tile_loadd(7, task.keys[1][step], LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, task.scores[0], sizeof task.scores[0]);
    _tile_stored(1, task.scores[0] + LANES, sizeof task.scores[0]);
}

inline void add_values(Task& task, int group) {
    constexpr int64_t row = sizeof task.out[0];
    float* out = task.out[group * ROWS];
    _tile_loadd(4, task.high, LINE);
    _tile_loadd(5, task.low, LINE);
    for (int part = 0; part < PARTS; part += 2) {
        _tile_loadd(0, out + part * LANES, row);
        _tile_loadd(1, out + (part + 1) * LANES, row);
        _tile_loadd(6, task.values[part], LINE);
        _tile_loadd(7, task.values[part + 1], LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, out + part * LANES, row);
        _tile_stored(1, out + (part + 1) * LANES, row);
    }
}

void ask_for(const Element* keys) {
    for (int at = 0; at < 16 * HEAD_DIM; at += LINE / (int)sizeof(Element)) __builtin_prefetch(keys + at);
}

// Tokens of one sequence and all query heads of one KV head.
struct Place {
    int64_t row, group, first_token, first_seen, num_rows, kv_head;  // first_seen: keys that the first token sees
};

void begin(const Attention& a, const Place& place, Task& task) {
    for (int64_t i = 0; i < (place.num_rows + ROWS - 1) / ROWS * ROWS; ++i) {
        int64_t token = place.first_token + i / place.group, head = place.kv_head * place.group + i % place.group;
        if (i < place.num_rows)
            std::memcpy(task.query[i], a.query + token * a.query_stride + head * HEAD_DIM, sizeof task.query[i]);
        else
            std::memset(task.query[i], 0, sizeof task.query[i]);
        std::memset(task.out[i], 0, sizeof task.out[i]);
        std::memset(task.total[i], 0, sizeof task.total[i]);
        task.most[i] = -INFINITY;
    }
}

// Where 16 keys of a row lie in the pool.
inline int64_t offset_of(const Attention& a, const Place& place, int64_t key) {
    int64_t block = a.tables[place.row * a.table_width + key / a.block_size];
    return ((block * a.num_kv_heads + place.kv_head) * a.block_size + key % a.block_size) * HEAD_DIM;
}

void take_chunk(const Attention& a, const Place& place, int64_t key, int64_t num_keys, float scale, Task& task) {
    for (int half = 0; half < 2; ++half) {
        int64_t first = key + half * 16, count = at_most(num_keys - first, 16);
        // A half that is not there: its scores are not looked at, its values are nothing.
        int64_t from = offset_of(a, place, count > 0 ? first : key);
        if (first + KEYS < num_keys) {
            int64_t next = offset_of(a, place, first + KEYS);
            ask_for(a.key_pool + next);
            ask_for(a.value_pool + next);
        }
        lay_out_keys(a.key_pool + from, task.keys[half]);
        lay_out_values(a.value_pool + from, (int)count, task.values, half * 8);
    }
    for (int64_t group = 0; group * ROWS < place.num_rows; ++group) {
        int64_t first = group * ROWS, count = at_most(place.num_rows - first, ROWS);
        if (place.first_seen + (first + count - 1) / place.group <= key) continue;  // sees nothing of it
        score(task, (int)group);
        for (int64_t i = 0; i < count; ++i) {
            int64_t seen = at_most(place.first_seen + (first + i) / place.group - key, KEYS);
            if (seen > 0) {
                weigh(task, (int)(first + i), (int)i, (int)seen, scale);
            } else {
                std::memset(task.high[i], 0, sizeof task.high[i]);
                std::memset(task.low[i], 0, sizeof task.low[i]);
            }
        }
        add_values(task, (int)group);
    }
}

void attend_tile(const Attention& a, int64_t tile, int64_t kv_head, Task& task) {
    int64_t row = a.tile_rows[tile], group = a.num_heads / a.num_kv_heads, start = a.tile_starts[tile];
    int64_t new_tokens = a.query_starts[row + 1] - a.query_starts[row];
    int64_t count = at_most(a.tile_tokens, new_tokens - start);
    Place place = {row, group, a.query_starts[row] + start, a.context_lens[row] - new_tokens + start + 1, count * group,
                   kv_head};
    begin(a, place, task);
    int64_t num_keys = place.first_seen + count - 1;
    for (int64_t key = 0; key < num_keys; key += KEYS)
        take_chunk(a, place, key, num_keys, a.scale, task);
    for (int64_t i = 0; i < place.num_rows; ++i) {
        int64_t token = place.first_token + i / group, head = kv_head * group + i % group;
        Element* to = a.out + (token * a.num_heads + head) * HEAD_DIM;
        Floats by = spread(1.0f / sum(load_floats(task.total[i])));
        for (int part = 0; part < PARTS; part += 2) {
            Floats left = load_floats(task.out[i] + part * LANES) * by;
            Floats right = load_floats(task.out[i] + (part + 1) * LANES) * by;
            _mm512_storeu_si512(to + part * LANES, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
        }
    }
}

}  // namespace

// Writes the new tokens' KV, then attends for all tiles. Blocks hold a multiple of 16 tokens.
extern "C" void attend(const Attention* call, int threads) {
    const Attention& a = *call;
    int64_t tasks = a.num_tiles * a.num_kv_heads;
#pragma omp parallel num_threads(threads)
    {
        Task task;
        std::memset(task.high, 0, sizeof task.high);
        std::memset(task.low, 0, sizeof task.low);
        configure(ROWS, ROWS);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a.num_tokens; ++token) write_token(a, token);
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < tasks; ++index)
            attend_tile(a, index / a.num_kv_heads, index % a.num_kv_heads, task);
        _tile_release();
    }
}
