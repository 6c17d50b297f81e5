// Projections in float32. Built at first use (build.py), called through ctypes.
//
//     out [rows, columns] = in [rows, depth] x weight^T (+ bias)
//     out [rows, columns] = activation(in x gate^T) * (in x up^T)      gate and up are halves of one weight
//
// The weight is packed once, in the order in which it is read: a panel is 32 columns wide, or 16 of gate and 16 of up,
// and its 32 weights for one step in depth lie side by side. Few rows are bound by reading it, so it is read once for
// as many rows as there are registers for, and from the caches for all others.
//
//     panel 0 | depth 0: 32 columns | depth 1: 32 columns | ...
//     panel 1 | ...
//
// Each sum runs over the depth in one order, so neither the number of threads nor batch mates change a result.

#include <cstdint>
#include <cstring>

#include "elements.h"
#include "product.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t ROWS = 12;          // whose sums stay in registers: 2 vectors each, of 32
#else
constexpr int64_t ROWS = 3;           // a vector takes several registers
#endif
constexpr int64_t FEW_ROWS = 48;      // up to here the weights count, beyond it the products
constexpr int64_t BLOCK_ROWS = 264;   // that stay in the second-level cache while panels pass by
constexpr int64_t FEW_DEPTH = 128;    // of a panel that stays, with the next, in the first-level cache while rows pass
constexpr int64_t MANY_DEPTH = 192;   // the same for many rows
constexpr int64_t IN_STRIDE = MANY_DEPTH + HALF;  // no power of two, which caches do not like
constexpr int64_t FETCH_TURNS = 4;    // sets of rows while which the next block is asked for
constexpr int64_t SERIAL_WEIGHTS = 1 << 16;  // waking a thread costs more than multiplying by so few

struct Sums {
    Floats left, right;
};

// What a block of a panel is multiplied by, and what is asked for meanwhile: `share` bytes from two places in a step.
struct Block {
    const float* in;      // the first of some rows
    int64_t stride;
    const float* weight;
    int64_t depth;
    const char* next;
    int64_t share;
};

// COUNT rows by a block of a panel.
template <int64_t COUNT, bool FETCH>
void multiply(const Block& block, Sums* sums) {
    Sums sum[COUNT];
    const float* weight = block.weight;
#pragma GCC unroll 16
    for (int64_t row = 0; row < COUNT; ++row) sum[row] = sums[row];
    for (int64_t step = 0; step < block.depth; ++step, weight += PANEL) {
        if (FETCH) {
            __builtin_prefetch(block.next + step * block.share);
            __builtin_prefetch(block.next + (block.depth + step) * block.share);
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

template <bool FETCH, int64_t COUNT = ROWS>
void multiply_rows(int64_t count, const Block& block, Sums* sums) {
    if (count == COUNT)
        multiply<COUNT, FETCH>(block, sums);
    else if constexpr (COUNT > 1)
        multiply_rows<FETCH, COUNT - 1>(count, block, sums);
}

inline Floats load_some(const float* from, int64_t count) {
    Floats values = {};
    if (count > 0) std::memcpy(&values, from, sizeof(float) * at_most(count, HALF));
    return values;
}

inline void store_some(float* to, Floats values, int64_t count) {
    if (count >= HALF)
        store(to, values);
    else if (count > 0)
        std::memcpy(to, &values, sizeof(float) * count);
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
        float* to = p.out + (first_row + row) * p.columns + column;
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
};

struct Part {
    int64_t first_row, rows, first_panel, panels;
};

const float* weight_of(const Product& p, int64_t panel, int64_t step) {
    return p.weight + (panel * p.depth + step) * PANEL;
}

// Rows by a block of a panel. What comes next is asked for while the first sets of rows are multiplied.
void multiply_all(const float* in, int64_t stride, int64_t rows, const float* weight, int64_t depth, const float* next,
                  Sums* sums) {
    int64_t turns = at_most((rows + ROWS - 1) / ROWS, FETCH_TURNS), share = 64 / turns;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const char* ahead = (const char*)next + row / ROWS * 2 * depth * share;
        Block block = {in + row * stride, stride, weight, depth, ahead, share};
        int64_t count = at_most(ROWS, rows - row);
        row < turns * ROWS ? multiply_rows<true>(count, block, sums + row)
                           : multiply_rows<false>(count, block, sums + row);
    }
}

void multiply_few(const Product& p, const Part& part, Work& work) {
    const float* in = p.in + part.first_row * p.stride;
    for (int64_t panel = 0; panel < part.panels; ++panel)
        for (int64_t step = 0; step < p.depth; step += FEW_DEPTH) {
            int64_t depth = at_most(FEW_DEPTH, p.depth - step);
            const float* weight = weight_of(p, part.first_panel + panel, step);
            multiply_all(in + step, p.stride, part.rows, weight, depth, weight + depth * PANEL, work.sums[panel]);
        }
}

// Steps of the rows are brought together, as whole rows would meet in few lines of a cache.
void multiply_many(const Product& p, const Part& part, Work& work) {
    for (int64_t step = 0; step < p.depth; step += MANY_DEPTH) {
        int64_t depth = at_most(MANY_DEPTH, p.depth - step);
        for (int64_t row = 0; row < part.rows; ++row)
            std::memcpy(work.in[row], p.in + (part.first_row + row) * p.stride + step, sizeof(float) * depth);
        for (int64_t panel = part.first_panel; panel < part.first_panel + part.panels; ++panel)
            multiply_all(work.in[0], IN_STRIDE, part.rows, weight_of(p, panel, step), depth,
                         weight_of(p, panel + 1, step), work.sums[panel - part.first_panel]);
    }
}

}  // namespace

// Elements of a packed weight with so many columns of the output.
extern "C" int64_t packed_size(int64_t columns, int64_t depth, int64_t gated) {
    return panels_of(columns, gated) * PANEL * depth;
}

// weight [columns, depth], or gate and up [2 columns, depth], into `packed`; what is beyond the last column is zero.
extern "C" void pack(const float* weight, float* packed, int64_t columns, int64_t depth, int64_t gated,
                     int64_t threads) {
    int64_t panels = panels_of(columns, gated);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t at = 0; at < PANEL; ++at) {
            int64_t source = source_row(panel, at, columns, gated);
            float* to = packed + panel * depth * PANEL + at;
            for (int64_t step = 0; step < depth; ++step)
                to[step * PANEL] = source < 0 ? 0 : weight[source * depth + step];
        }
}

extern "C" void product(const Product* call, int64_t threads) {
    const Product& p = *call;
    int64_t panels = panels_of(p.columns, p.activation), blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t rows = ((p.rows + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS;
    int64_t group = panels_at_once(panels, blocks, threads), groups = (panels + group - 1) / group;
#pragma omp parallel num_threads(threads) if (p.rows * p.columns * p.depth > SERIAL_WEIGHTS)
    {
        Work work;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks * groups; ++task) {
            int64_t row = task / groups * rows, panel = task % groups * group;
            Part part = {row, at_most(rows, p.rows - row), panel, at_most(group, panels - panel)};
            for (int64_t i = 0; i < part.panels; ++i) std::memset(work.sums[i], 0, sizeof(Sums) * part.rows);
            part.rows > FEW_ROWS ? multiply_many(p, part, work) : multiply_few(p, part, work);
            for (int64_t i = 0; i < part.panels; ++i) finish(p, work.sums[i], row, part.rows, panel + i);
        }
    }
}
