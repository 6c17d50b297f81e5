// Projections in bfloat16 with the CPU's matrix tiles (AMX). Built at first use (build.py), called through ctypes.
//
//     out [rows, columns] = in [rows, depth] x weight^T (+ bias)       sums are float32, rounded once
//     out [rows, columns] = activation(in x gate^T) * (in x up^T)      gate and up are halves of one weight
//
// The weight is packed once, in the order in which it is read. A tile is 16 columns of 32 steps in depth, as the tile
// unit wants them: pairs of steps side by side. A panel is two tiles wide: 32 columns, or 16 of gate and 16 of up.
//
//     panel 0 | steps 0..31: left tile | steps 0..31: right tile | steps 32..63: left tile | ...
//     panel 1 | ...
//
// Each sum runs over the depth in one order, so neither the number of threads nor batch mates change a result.

#if !defined(__AMX_TILE__) || !defined(__AMX_BF16__) || !defined(__AVX512BF16__)
#error "this CPU has no bfloat16 tiles"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

typedef uint16_t Element;  // bfloat16

#include "product.h"
#include "tiles.h"

namespace {


constexpr int64_t DEPTH = 32;               // steps in depth of a tile
constexpr int64_t STEP = PANEL * DEPTH;     // elements of a panel for one step of the tiles
constexpr int64_t BLOCK_ROWS = 256;         // rows that stay in the second-level cache while panels pass by
constexpr int64_t BLOCK_DEPTH = 512;        // of a panel that stays in the first-level cache while rows pass by
constexpr int64_t AHEAD = 4 * 1024;         // bytes of the weight that are asked for early

struct Sums {
    float of[PANEL][PANEL] __attribute__((aligned(64)));
};

inline void ask_for(const Element* weight) {
    const char* at = (const char*)weight + AHEAD;
    for (int64_t line = 0; line < STEP * (int64_t)sizeof(Element); line += LINE) _mm_prefetch(at + line, _MM_HINT_T0);
}

// Up to 32 rows of the input by one panel, over `steps` steps of the tiles. `more`: go on from earlier sums.
template <bool BOTH, bool FETCH>
void multiply(const Element* in, int64_t stride, const Element* weight, int64_t steps, bool more, Sums& sums) {
    constexpr int64_t row = sizeof sums.of[0];
    if (more) {
        _tile_loadd(0, sums.of[0], row);
        _tile_loadd(1, sums.of[0] + TILE, row);
        if (BOTH) _tile_loadd(2, sums.of[TILE], row);
        if (BOTH) _tile_loadd(3, sums.of[TILE] + TILE, row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (BOTH) _tile_zero(2);
        if (BOTH) _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step, in += DEPTH, weight += STEP) {
        if (FETCH) ask_for(weight);
        _tile_loadd(6, weight, LINE);
        _tile_loadd(4, in, stride * sizeof(Element));
        _tile_loadd(7, weight + STEP / 2, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (BOTH) {
            _tile_loadd(5, in + TILE * stride, stride * sizeof(Element));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums.of[0], row);
    _tile_stored(1, sums.of[0] + TILE, row);
    if (BOTH) _tile_stored(2, sums.of[TILE], row);
    if (BOTH) _tile_stored(3, sums.of[TILE] + TILE, row);
}

inline __mmask32 first(int64_t count) { return (__mmask32)((1ull << count) - 1); }

inline __m512 load_bias(const Element* bias, int64_t count) {
    if (count <= 0) return _mm512_setzero_ps();
    __m256i narrow = _mm256_maskz_loadu_epi16((__mmask16)first(at_most(count, TILE)), bias);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

void store(const Product& p, const Sums& sums, int64_t first_row, int64_t rows, int64_t panel) {
    int64_t width = panel_width(p.activation), column = panel * width, count = at_most(p.columns - column, width);
    __m512 left_bias = _mm512_setzero_ps(), right_bias = left_bias;
    if (p.bias) {
        left_bias = load_bias(p.bias + column, count);
        right_bias = p.activation ? load_bias(p.bias + p.columns + column, count)
                             : load_bias(p.bias + column + TILE, count - TILE);
    }
    for (int64_t row = 0; row < rows; ++row) {
        __m512 left = _mm512_add_ps(_mm512_load_ps(sums.of[row]), left_bias);
        __m512 right = _mm512_add_ps(_mm512_load_ps(sums.of[row] + TILE), right_bias);
        if (p.activation) left = (__m512)(activated((Floats)left, p.activation) * (Floats)right);
        _mm512_mask_storeu_epi16(p.out + (first_row + row) * p.columns + column, first(count),
                                 (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
}

// Some rows of the output by some of its panels.
void multiply_block(const Product& p, int64_t first_row, int64_t rows, int64_t first_panel, int64_t panels,
                    Sums* sums) {
    int64_t steps = p.depth / DEPTH, block_steps = BLOCK_DEPTH / DEPTH, configured = 0;
    for (int64_t panel = first_panel; panel < first_panel + panels; ++panel)
        for (int64_t step = 0; step < steps; step += block_steps) {
            int64_t taken = at_most(block_steps, steps - step);
            const Element* weight = p.weight + (panel * steps + step) * STEP;
            for (int64_t row = 0; row < rows; row += PANEL) {
                int64_t count = at_most(PANEL, rows - row);
                if (count != configured) configure(at_most(count, TILE), count > TILE ? count - TILE : TILE);
                configured = count;
                const Element* in = p.in + (first_row + row) * p.stride + step * DEPTH;
                Sums& sum = sums[row / PANEL];
                if (count > TILE && !row)
                    multiply<true, true>(in, p.stride, weight, taken, step, sum);
                else if (count > TILE)
                    multiply<true, false>(in, p.stride, weight, taken, step, sum);
                else
                    multiply<false, true>(in, p.stride, weight, taken, step, sum);
                if (step + taken == steps) store(p, sum, first_row + row, count, panel);
            }
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
    int64_t panels = panels_of(columns, gated), tiles = depth / DEPTH * 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t pair = 0; pair < DEPTH / 2; ++pair)
                for (int64_t lane = 0; lane < TILE; ++lane) {
                    int64_t source = source_row(panel, tile % 2 * TILE + lane, columns, gated);
                    Element* to = packed + (panel * tiles + tile) * STEP / 2 + pair * DEPTH + lane * 2;
                    const Element nothing[2] = {};
                    const Element* from = weight + source * depth + tile / 2 * DEPTH + pair * 2;
                    std::memcpy(to, source < 0 ? nothing : from, 2 * sizeof(Element));
                }
}

extern "C" void product(const Product* call, int64_t threads) {
    const Product& p = *call;
    int64_t panels = panels_of(p.columns, p.activation), blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t group = panels_at_once(panels, blocks, threads), groups = (panels + group - 1) / group;
#pragma omp parallel num_threads(threads)
    {
        Sums sums[BLOCK_ROWS / PANEL];
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks * groups; ++task) {
            int64_t row = task / groups * BLOCK_ROWS, panel = task % groups * group;
            multiply_block(p, row, at_most(BLOCK_ROWS, p.rows - row), panel, at_most(group, panels - panel), sums);
        }
        _tile_release();
    }
}
