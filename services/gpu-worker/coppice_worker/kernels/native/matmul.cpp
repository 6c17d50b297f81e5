// Projections in float32, or with -DBFLOAT16 of bfloat16 without tiles. Built at first use (build.py), called through
// ctypes.
//
//     out [rows, columns] = in [rows, depth] x weight^T (+ bias)       sums are float32, rounded once
//     out [rows, columns] = activation(in x gate^T) * (in x up^T)      gate and up are halves of one weight
//
// The weight is packed once, in the order in which it is read: a panel is two vectors of columns wide, or one of gate and
// one of up, and its weights for one step in depth lie side by side. Few rows are bound by reading it, so it is read once
// for as many rows as there are registers for, and from the caches for all others.
//
//     panel 0 | depth 0: two vectors | depth 1: two vectors | ...
//     panel 1 | ...
//
// Each sum runs over the depth in one order, so neither the number of threads nor batch mates change a result.

#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "product.h"

namespace {

constexpr int64_t ROWS = (REGISTERS - 4) / 2 / 6 * 6;  // whose sums stay in registers, 2 vectors each
constexpr int64_t FEW_ROWS = 48;      // up to here the weights count, beyond it the products
constexpr int64_t BLOCK_ROWS = 264;   // that stay in the second-level cache while panels pass by
constexpr int64_t FEW_DEPTH = 128;    // of a panel that stays, with the next, in the first-level cache while rows pass
constexpr int64_t MANY_DEPTH = 192;   // the same for many rows
constexpr int64_t IN_STRIDE = MANY_DEPTH + HALF;  // no power of two, which caches do not like
constexpr int64_t FETCH_TURNS = 4;    // sets of rows while which the next block is asked for
constexpr int64_t SERIAL_WEIGHTS = 1 << 16;  // waking a thread costs more than multiplying by so few
constexpr int64_t STEP_BYTES = PANEL * sizeof(Element);  // of a panel for one step in depth
constexpr int64_t LINE = 64;                             // bytes of a line of the caches
constexpr bool HAS_TWO_LINES = STEP_BYTES > LINE;

struct Sums {
    Floats left, right;
};

// What a block of a panel is multiplied by, and what is asked for meanwhile: `share` bytes in a step, from as many
// places as it has lines.
template <class Weight>
struct Block {
    const float* in;      // the first of some rows
    int64_t stride;
    const Weight* weight;  // elements, or the same widened
    int64_t depth;
    const char* next;
    int64_t share;
};

// COUNT rows by a block of a panel.
template <int64_t COUNT, bool FETCH, class Weight>
void multiply(const Block<Weight>& block, Sums* sums) {
    Sums sum[COUNT];
    const Weight* weight = block.weight;
#pragma GCC unroll 16
    for (int64_t row = 0; row < COUNT; ++row) sum[row] = sums[row];
    for (int64_t step = 0; step < block.depth; ++step, weight += PANEL) {
        if (FETCH) {
            __builtin_prefetch(block.next + step * block.share);
            if (HAS_TWO_LINES) __builtin_prefetch(block.next + (block.depth + step) * block.share);
        }
        Floats left = load(weight), right = load(weight + HALF);
#pragma GCC unroll 16
        for (int64_t row = 0; row < COUNT; ++row) {
            Floats value = spread(block.in[row * block.stride + step]);
            sum[row].left += value * left;
            sum[row].right += value * right;
        }
    }
#pragma GCC unroll 16
    for (int64_t row = 0; row < COUNT; ++row) sums[row] = sum[row];
}

template <bool FETCH, int64_t COUNT = ROWS, class Weight>
void multiply_rows(int64_t count, const Block<Weight>& block, Sums* sums) {
    if (count == COUNT)
        multiply<COUNT, FETCH>(block, sums);
    else if constexpr (COUNT > 1)
        multiply_rows<FETCH, COUNT - 1>(count, block, sums);
}

inline Floats load_some(const Element* from, int64_t count) {
    Element some[HALF] = {};
    if (count > 0) std::memcpy(some, from, sizeof(Element) * at_most(count, HALF));
    return load(some);
}

inline void store_some(Element* to, Floats values, int64_t count) {
    if (count >= HALF) {
        store(to, values);
    } else if (count > 0) {
        Element some[HALF];
        store(some, values);
        std::memcpy(to, some, sizeof(Element) * count);
    }
}

// `count` elements as float32.
inline void widen(const Element* from, float* to, int64_t count) {
    if (const float* same = as_floats(from)) {
        std::memcpy(to, same, sizeof(float) * count);
        return;
    }
    int64_t at = 0;
    for (; at + HALF <= count; at += HALF) {
        Floats values = load(from + at);
        std::memcpy(to + at, &values, sizeof values);
    }
    for (; at < count; ++at) to[at] = load_one(from + at);
}

void finish(const Product& p, const Sums* sums, int64_t first_row, int64_t rows, int64_t panel) {
    int64_t width = panel_width(p.activation), column = panel * width, count = p.columns - column;
    Sums bias = {};
    if (p.bias) {
        bias.left = load_some(p.bias + column, count);
        bias.right = p.activation ? load_some(p.bias + p.columns + column, count)
                                  : load_some(p.bias + column + HALF, count - HALF);
    }
    for (int64_t row = 0; row < rows; ++row) {
        Floats left = sums[row].left + bias.left, right = sums[row].right + bias.right;
        Element* to = p.out + (first_row + row) * p.columns + column;
        if (p.activation) {
            store_some(to, activated(left, p.activation) * right, count);
        } else {
            store_some(to, left, count);
            store_some(to + HALF, right, count - HALF);
        }
    }
}

// What a thread needs for its part of the output.
struct Work {
    Sums sums[PANELS_MAX][BLOCK_ROWS];
    float in[BLOCK_ROWS][IN_STRIDE];
    float weight[MANY_DEPTH * PANEL];
};

struct Part {
    int64_t first_row, rows, first_panel, panels;
};

const Element* weight_of(const Product& p, int64_t panel, int64_t step) {
    return p.weight + (panel * p.depth + step) * PANEL;
}

// Rows by a block of a panel. What comes next is asked for while the first sets of rows are multiplied.
template <class Weight>
void multiply_sets(const float* in, int64_t stride, int64_t rows, const Weight* weight, int64_t depth,
                   const Element* next, Sums* sums) {
    int64_t turns = at_most((rows + ROWS - 1) / ROWS, FETCH_TURNS), share = at_most(STEP_BYTES, LINE) / turns;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const char* ahead = (const char*)next + row / ROWS * (HAS_TWO_LINES + 1) * depth * share;
        Block<Weight> block = {in + row * stride, stride, weight, depth, ahead, share};
        int64_t count = at_most(ROWS, rows - row);
        row < turns * ROWS ? multiply_rows<true>(count, block, sums + row)
                           : multiply_rows<false>(count, block, sums + row);
    }
}

// Weights that several sets of rows meet are widened once.
void multiply_all(const float* in, int64_t stride, int64_t rows, const Element* weight, int64_t depth,
                  const Element* next, Sums* sums, Work& work) {
    if (as_floats(weight) || rows <= ROWS) return multiply_sets(in, stride, rows, weight, depth, next, sums);
    widen(weight, work.weight, depth * PANEL);
    multiply_sets(in, stride, rows, work.weight, depth, next, sums);
}

// `in` are the rows of the part, `stride` apart.
void multiply_few(const Product& p, const Part& part, const float* in, int64_t stride, Work& work) {
    for (int64_t panel = 0; panel < part.panels; ++panel)
        for (int64_t step = 0; step < p.depth; step += FEW_DEPTH) {
            int64_t depth = at_most(FEW_DEPTH, p.depth - step);
            const Element* weight = weight_of(p, part.first_panel + panel, step);
            multiply_all(in + step, stride, part.rows, weight, depth, weight + depth * PANEL, work.sums[panel],
                         work);
        }
}

// Steps of the rows are brought together, as whole rows would meet in few lines of a cache.
void multiply_many(const Product& p, const Part& part, Work& work) {
    for (int64_t step = 0; step < p.depth; step += MANY_DEPTH) {
        int64_t depth = at_most(MANY_DEPTH, p.depth - step);
        for (int64_t row = 0; row < part.rows; ++row)
            widen(p.in + (part.first_row + row) * p.stride + step, work.in[row], depth);
        for (int64_t panel = part.first_panel; panel < part.first_panel + part.panels; ++panel)
            multiply_all(work.in[0], IN_STRIDE, part.rows, weight_of(p, panel, step), depth,
                         weight_of(p, panel + 1, step), work.sums[panel - part.first_panel], work);
    }
}

}  // namespace

// Elements of a packed weight with so many columns of the output.
extern "C" int64_t packed_size(int64_t columns, int64_t depth, int64_t gated) {
    return panels_of(columns, gated) * PANEL * depth;
}

// weight [columns, depth], or gate and up [2 columns, depth], into `packed`; what is beyond the last column is zero.
extern "C" void pack(const Element* weight, Element* packed, int64_t columns, int64_t depth, int64_t gated,
                     int64_t threads) {
    int64_t panels = panels_of(columns, gated);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t at = 0; at < PANEL; ++at) {
            int64_t source = source_row(panel, at, columns, gated);
            Element* to = packed + panel * depth * PANEL + at;
            for (int64_t step = 0; step < depth; ++step)
                to[step * PANEL] = source < 0 ? 0 : weight[source * depth + step];
        }
}

extern "C" void product(const Product* call, int64_t threads) {
    const Product& p = *call;
    if (p.rows == 0) return;
    int64_t panels = panels_of(p.columns, p.activation), blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t rows = ((p.rows + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS;
    int64_t group = panels_at_once(panels, blocks, threads), groups = (panels + group - 1) / group;
    bool are_few = p.rows <= FEW_ROWS;
    const float* few = are_few ? as_floats(p.in) : nullptr;
    int64_t few_stride = p.stride;
    static thread_local std::vector<float> widened;  // of few rows, which every panel meets
    if (are_few && !few) {
        widened.resize(p.rows * p.depth);
        for (int64_t row = 0; row < p.rows; ++row) widen(p.in + row * p.stride, &widened[row * p.depth], p.depth);
        few = widened.data();
        few_stride = p.depth;
    }
#pragma omp parallel num_threads(threads) if (p.rows * p.columns * p.depth > SERIAL_WEIGHTS)
    {
        Work work;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks * groups; ++task) {
            int64_t row = task / groups * rows, panel = task % groups * group;
            Part part = {row, at_most(rows, p.rows - row), panel, at_most(group, panels - panel)};
            for (int64_t i = 0; i < part.panels; ++i) std::memset(work.sums[i], 0, sizeof(Sums) * part.rows);
            are_few ? multiply_few(p, part, few, few_stride, work) : multiply_many(p, part, work);
            for (int64_t i = 0; i < part.panels; ++i) finish(p, work.sums[i], row, part.rows, panel + i);
        }
    }
}
