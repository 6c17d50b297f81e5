// How the tile unit of a CPU (AMX) is set up.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

constexpr int64_t TILE = 16;  // rows of a tile, and its columns of float32
constexpr int64_t LINE = 64;  // bytes of a row of a tile, and of a line of the caches

struct TileConfig {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0..3 sum: 0, 1 the upper rows, 2, 3 the lower ones. 4, 5 hold these rows of the input, 6, 7 are whole.
void configure(int64_t upper, int64_t lower) {
    TileConfig config;
    const int64_t counts[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = counts[tile];
        config.row_bytes[tile] = LINE;
    }
    _tile_loadconfig(&config);
}

}  // namespace

// Whether the system lets this process use the tiles; asked once, before they are used.
extern "C" int may_use_tiles() {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */) == 0;
}
