// Kernels for CPUs. Built at first use (build.py), called through ctypes (library.py), one build per element type and
// head size:
//
//     -DBFLOAT16 or not      type of activations and of KV; all arithmetic is float32
//     -DHEAD_DIM=64          a multiple of LANES, whatever the CPU
//
// Rows are independent of each other, so neither the number of threads nor batch mates change a result.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "attention.h"

namespace {

constexpr int VECTORS = HEAD_DIM / LANES;  // of one head
constexpr int TILE_ROWS = 64;              // query rows of a tile, at most
constexpr int KEYS = LANES;                // keys that are looked at together: one vector of scores
constexpr int64_t SET = 4;                 // query rows that are multiplied together
constexpr int64_t SERIAL_ELEMENTS = 32768; // waking a thread costs more than passing over so few

static_assert(HEAD_DIM % LANES == 0, "heads are read in whole vectors");

// As many vectors as lanes, rows for columns: halves of pairs change places, then quarters, and so on.
template <int APART = LANES / 2>
inline void transpose(Floats* v) {
    // Of the upper one the lanes whose bit APART is 0, of the lower one these very lanes in the other places.
    constexpr Ints low = (NUMBERED & ~APART) + ((NUMBERED & APART) != 0 ? Ints{} + LANES : Ints{});
    for (int i = 0; i < LANES; ++i)
        if (!(i & APART)) {
            Floats upper = v[i], lower = v[i + APART];
            v[i] = __builtin_shuffle(upper, lower, low);
            v[i + APART] = __builtin_shuffle(upper, lower, low + APART);
        }
    if constexpr (APART > 1) transpose<APART / 2>(v);
}

// What a thread needs for one tile.
struct Work {
    float query[TILE_ROWS][HEAD_DIM] __attribute__((aligned(64)));
    float out[TILE_ROWS][HEAD_DIM] __attribute__((aligned(64)));
    float keys[KEYS][HEAD_DIM] __attribute__((aligned(64)));
    float columns[HEAD_DIM][KEYS] __attribute__((aligned(64)));  // the keys, side by side
    float values[KEYS][HEAD_DIM] __attribute__((aligned(64)));
    float total[TILE_ROWS][LANES] __attribute__((aligned(64)));  // sums of exp(score - most) so far, lane by lane
    float most[TILE_ROWS];  // largest score so far
    Ahead ahead;
    int64_t lines_at_once;  // that are asked for with each step of a set of rows
};

inline Floats part_of(const float* head, int part) {
    Floats values;
    std::memcpy(&values, head + part * LANES, sizeof values);
    return values;
}

inline void store_floats(float* to, int part, Floats values) {
    std::memcpy(to + part * LANES, &values, sizeof values);
}

// KEYS tokens as float32, of which those in [first, end) count; the others are never read, as they may hold anything.
inline const float* widen(const Element* from, int64_t first, int64_t end, float (*to)[HEAD_DIM]) {
    bool is_whole = first == 0 && end == KEYS;
    if (const float* as_it_is = is_whole ? as_floats(from) : nullptr) return as_it_is;
    for (int64_t token = 0; token < KEYS; ++token)
        for (int part = 0; part < VECTORS; ++part) {
            bool counts = token >= first && token < end;
            Floats values = counts ? load(from + token * HEAD_DIM + part * LANES) : Floats{};
            std::memcpy(&to[token][part * LANES], &values, sizeof values);
        }
    return to[0];
}

inline void turn_keys(const float* keys, float (*to)[KEYS]) {
    for (int part = 0; part < VECTORS; ++part) {
        Floats square[KEYS];
        for (int key = 0; key < KEYS; ++key) square[key] = part_of(keys + key * HEAD_DIM, part);
        transpose(square);
        std::memcpy(to[part * LANES], square, sizeof square);
    }
}

// One row of scores becomes weights; the row sees keys [first, end) of these.
inline void weigh(const Layer& layer, Floats scores, int64_t row, int64_t first, int64_t end, Work& work,
                  float* weights) {
    if (first >= end) {
        std::memset(weights, 0, sizeof(float) * KEYS);
        return;
    }
    if (layer.soft_cap != 0) scores = layer.soft_cap * tangent(scores * (1.0f / layer.soft_cap));
    scores = (NUMBERED >= (int)first) & (NUMBERED < (int)end) ? scores : spread(-INFINITY);
    float most = largest(scores), before = work.most[row];
    Floats total = part_of(work.total[row], 0);
    if (most > before) {
        work.most[row] = most;
        Floats fade = exponential(spread(before - most));  // what was nothing before stays nothing
        for (int part = 0; part < VECTORS; ++part) store_floats(work.out[row], part, part_of(work.out[row], part) * fade);
        total *= fade;
    } else {
        most = before;
    }
    Floats found = exponential(scores - most);
    store_floats(work.total[row], 0, total + found);
    store_floats(weights, 0, found);
}

// Parts of the head from FIRST on, for as many rows and parts at a time as there are registers for their sums.
template <int COUNT, int FIRST = 0>
inline void add_values(const float (*weights)[KEYS], const float* values, int64_t row, Work& work) {
    constexpr int SUMS = REGISTERS / 2, PARTS = VECTORS - FIRST < SUMS ? VECTORS - FIRST : SUMS;
    constexpr int AT_ONCE = SUMS / PARTS, TAKEN = COUNT < AT_ONCE ? COUNT : AT_ONCE;
    Floats out[TAKEN][PARTS];
    for (int i = 0; i < TAKEN; ++i)
        for (int part = 0; part < PARTS; ++part) out[i][part] = part_of(work.out[row + i], FIRST + part);
    for (int key = 0; key < KEYS; ++key) {
        work.ahead.ask(2 * work.lines_at_once);
        for (int part = 0; part < PARTS; ++part) {
            Floats value = part_of(values + key * HEAD_DIM, FIRST + part);
            for (int i = 0; i < TAKEN; ++i) out[i][part] += weights[i][key] * value;
        }
    }
    for (int i = 0; i < TAKEN; ++i) std::memcpy(work.out[row + i] + FIRST * LANES, out[i], sizeof out[i]);
    if constexpr (COUNT > TAKEN) add_values<COUNT - TAKEN, FIRST>(weights + TAKEN, values, row + TAKEN, work);
}

// All parts of the head.
template <int COUNT, int FIRST = 0>
inline void add_all_values(const float (*weights)[KEYS], const float* values, int64_t row, Work& work) {
    add_values<COUNT, FIRST>(weights, values, row, work);
    if constexpr (FIRST + REGISTERS / 2 < VECTORS)
        add_all_values<COUNT, FIRST + REGISTERS / 2>(weights, values, row, work);
}

// COUNT query rows against the keys from `key` on that lie in work.columns, of which `taken` are there.
template <int COUNT>
inline void take_keys(const Layer& layer, const Tile& tile, int64_t key, int64_t taken, const float* values, int64_t row,
                      Work& work) {
    if (tile.seen(row + COUNT - 1) <= key || tile.seen(row) - layer.window >= key + taken) return;
    Floats even[COUNT] = {}, odd[COUNT] = {};
    for (int at = 0; at < HEAD_DIM; at += 2) {
        work.ahead.ask(work.lines_at_once);
        Floats left = part_of(work.columns[at], 0), right = part_of(work.columns[at + 1], 0);
        for (int i = 0; i < COUNT; ++i) {
            even[i] += work.query[row + i][at] * left;
            odd[i] += work.query[row + i][at + 1] * right;
        }
    }
    float weights[COUNT][KEYS] __attribute__((aligned(64)));
    for (int i = 0; i < COUNT; ++i) {
        int64_t seen = tile.seen(row + i) - key, first = at_least(seen - layer.window, 0), end = at_most(seen, taken);
        weigh(layer, even[i] + odd[i], row + i, first, end, work, weights[i]);
    }
    add_all_values<COUNT>(weights, values, row, work);
}

void begin(const Layer& layer, const Tile& tile, const Element* query, int64_t stride, Work& work) {
    int64_t steps = (tile.num_rows + SET - 1) / SET * (HEAD_DIM / 2 + 2 * KEYS);
    work.lines_at_once = (KEYS * HEAD_DIM * (int64_t)sizeof(Element) / 64 + steps - 1) / steps;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
        const Element* head = query + tile.token(i) * stride + tile.head(i) * HEAD_DIM;
        for (int part = 0; part < VECTORS; ++part) {
            Floats values = load(head + part * LANES) * layer.scale;
            std::memcpy(&work.query[i][part * LANES], &values, sizeof values);
        }
        // A sink is a key without a value that was seen before all others.
        work.most[i] = layer.sinks ? layer.sinks[tile.head(i)] : -INFINITY;
        std::memset(work.total[i], 0, sizeof work.total[i]);
        if (layer.sinks) work.total[i][0] = 1;
        std::memset(work.out[i], 0, sizeof work.out[i]);
    }
}

void attend_tile(const Step& s, const Layer& layer, const Tile& tile, Work& work) {
    // Where the first keys begin does not depend on the tile, or a row's sums would.
    int64_t key = tile.first_key - tile.first_key % s.block_size % KEYS;
    while (key < tile.num_keys) {
        int64_t taken = at_most(at_most(KEYS, s.block_size - key % s.block_size), tile.num_keys - key);
        if (key + taken < tile.num_keys) work.ahead.expect(layer, offset_of(s, tile, key + taken), KEYS);
        int64_t from = offset_of(s, tile, key), first = at_least(tile.first_key - key, 0);
        const float* keys = widen(layer.keys + from, first, taken, work.keys);
        const float* values = widen(layer.values + from, first, taken, work.values);
        turn_keys(keys, work.columns);
        for (int64_t row = 0; row < tile.num_rows; row += SET) {
            switch (at_most(SET, tile.num_rows - row)) {
                case 1: take_keys<1>(layer, tile, key, taken, values, row, work); break;
                case 2: take_keys<2>(layer, tile, key, taken, values, row, work); break;
                case 3: take_keys<3>(layer, tile, key, taken, values, row, work); break;
                default: take_keys<SET>(layer, tile, key, taken, values, row, work);
            }
        }
        key += taken;
    }
}

void finish(const Step& s, const Tile& tile, const Work& work, Element* out) {
    for (int64_t i = 0; i < tile.num_rows; ++i) {
        Element* to = out + (tile.token(i) * s.num_heads + tile.head(i)) * HEAD_DIM;
        float scale = 1.0f / sum(part_of(work.total[i], 0));
        for (int part = 0; part < VECTORS; ++part) store(to + part * LANES, part_of(work.out[i], part) * scale);
    }
}

// One head: norm, where there is a weight, and rotation.
inline void turn(const Element* from, const float* norm, float eps, const Element* cos, const Element* sin, Element* to) {
    constexpr int HALF = HEAD_DIM / 2;
    float head[HEAD_DIM] __attribute__((aligned(64)));
    Floats squares = {};
    for (int at = 0; at < HEAD_DIM; at += LANES) {
        Floats values = load(from + at);
        squares += values * values;
        std::memcpy(head + at, &values, sizeof values);
    }
    if (norm) {
        float scale = 1.0f / std::sqrt(sum(squares) / HEAD_DIM + eps);
        for (int at = 0; at < HEAD_DIM; ++at) head[at] *= scale * norm[at];
    }
    for (int at = 0; at + LANES <= HALF; at += LANES) {
        Floats a = part_of(head + at, 0), b = part_of(head + HALF + at, 0);
        store(to + at, a * load(cos + at) - b * load(sin + at));
        store(to + HALF + at, b * load(cos + at) + a * load(sin + at));
    }
    for (int at = HALF / LANES * LANES; at < HALF; ++at) {
        float a = head[at], b = head[HALF + at];
        store_one(to + at, a * load_one(cos + at) - b * load_one(sin + at));
        store_one(to + HALF + at, b * load_one(cos + at) + a * load_one(sin + at));
    }
}

}  // namespace

// qkv [T, H + 2 HK, D]: norms and rotates the queries in place; keys, which are too, and values go to their slots.
// cos and sin [T, D / 2]; `stride` elements from token to token.
extern "C" void write(const Step* step, int64_t index, Element* qkv, int64_t stride, const Element* cos,
                      const Element* sin) {
    const Step& s = *step;
    const Layer& layer = s.layers[index];
#pragma omp parallel for schedule(static) num_threads(s.threads) if (s.num_tokens * stride > SERIAL_ELEMENTS)
    for (int64_t token = 0; token < s.num_tokens; ++token) {
        const Element* c = cos + token * (HEAD_DIM / 2);
        const Element* i = sin + token * (HEAD_DIM / 2);
        Element* query = qkv + token * stride;
        Element* key = query + s.num_heads * HEAD_DIM;
        Element* value = key + s.num_kv_heads * HEAD_DIM;
        int64_t block = s.slots[token] / s.block_size, offset = s.slots[token] % s.block_size;
        for (int64_t head = 0; head < s.num_heads; ++head, query += HEAD_DIM)
            turn(query, layer.query_norm, layer.norm_eps, c, i, query);
        for (int64_t head = 0; head < s.num_kv_heads; ++head, key += HEAD_DIM, value += HEAD_DIM) {
            int64_t to = ((block * s.num_kv_heads + head) * s.block_size + offset) * HEAD_DIM;
            turn(key, layer.key_norm, layer.norm_eps, c, i, layer.keys + to);
            std::memcpy(layer.values + to, value, sizeof(Element) * HEAD_DIM);
        }
    }
}

// Attends for all tiles: query [T, H, D], `stride` elements from token to token, to out [T, H, D], contiguous.
extern "C" void attend(const Step* step, int64_t index, const Element* query, int64_t stride, Element* out) {
    const Step& s = *step;
    const Layer& layer = s.layers[index];
    int64_t tasks = s.num_tiles * s.num_kv_heads;
#pragma omp parallel num_threads(s.threads) if (tasks > 1)
    {
        Work work;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) {
            Tile tile = tile_of(s, layer, task);
            begin(layer, tile, query, stride, work);
            attend_tile(s, layer, tile, work);
            finish(s, tile, work, out);
        }
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

// both [rows, 2 size] = gate and up; out [rows, size] = activation(gate) * up.
extern "C" void gate(const Element* both, Element* out, int64_t rows, int64_t size, int64_t activation, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SERIAL_ELEMENTS)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* g = both + row * 2 * size;
        const Element* u = g + size;
        Element* o = out + row * size;
        for (int64_t i = 0; i < size / LANES * LANES; i += LANES)
            store(o + i, activated(load(g + i), activation) * load(u + i));
        for (int64_t i = size / LANES * LANES; i < size; ++i)
            store_one(o + i, activated(spread(load_one(g + i)), activation)[0] * load_one(u + i));
    }
}

// out [rows] = the first of the largest of logits [rows, size]; one that is not a number counts as the largest.
extern "C" void argmax(const Element* logits, int64_t* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > SERIAL_ELEMENTS)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* from = logits + row * size;
        Floats most = spread(-INFINITY);
        Ints at = {}, here = NUMBERED;
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
