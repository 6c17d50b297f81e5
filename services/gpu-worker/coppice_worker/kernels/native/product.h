// What the two kinds of projections share. `Element` is defined by who includes it.

#pragma once

#include <cstdint>

#include "vectors.h"

// Mirrored field by field in packed.py.
struct Product {
    const Element* in;      // [rows, depth]
    const Element* weight;  // packed
    const Element* bias;    // [columns], of gate and up [2 columns], or null
    Element* out;           // [rows, columns], contiguous
    int64_t rows, columns, depth;
    int64_t stride;         // elements from row to row of `in`
    int64_t activation;     // of the gate, or 0: there is none
};

namespace {

constexpr int64_t HALF = LANES;     // columns: one vector of sums
constexpr int64_t PANEL = 2 * HALF; // columns of a panel, or of gate and of up half as many each

inline int64_t at_most(int64_t value, int64_t bound) { return value < bound ? value : bound; }

inline int64_t panel_width(bool gated) { return gated ? HALF : PANEL; }

inline int64_t panels_of(int64_t columns, bool gated) {
    return (columns + panel_width(gated) - 1) / panel_width(gated);
}

// Which row of a weight [columns, depth], or [2 columns, depth] of gate above up, is a panel's column; -1: none.
inline int64_t source_row(int64_t panel, int64_t at, int64_t columns, bool gated) {
    int64_t column = panel * panel_width(gated) + (gated ? at % HALF : at);
    return column < columns ? column + (gated && at >= HALF ? columns : 0) : -1;
}

constexpr int64_t PANELS_MAX = 8;

// Panels that a thread takes at a time, with one of `blocks` blocks of rows: few enough to share out, many for one set
// of rows.
inline int64_t panels_at_once(int64_t panels, int64_t blocks, int64_t threads) {
    return at_most(PANELS_MAX, panels * blocks / (4 * threads) + 1);
}

}  // namespace
