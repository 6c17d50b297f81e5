// Sixteen float32 at a time, in words that every compiler of vectors knows.

#pragma once

#include <cstdint>

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

inline Floats spread(float value) { return value - (Floats){}; }

inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }  // a NaN in `a` stays

// e^x for x <= 88, 0 below -87. 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; Taylor's, to the seventh power.
inline Floats exponential(Floats x) {
    Words vanishes = (Words)(x < -87.0f);
    x = larger(x, spread(-87.0f));
    Floats shifted = x * 1.44269504f + 12582912.0f;  // the sum's low bits are the nearest whole number
    Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return (Floats)((Words)(p * (Floats)power) & ~vanishes);
}

// x / (1 + e^-x)
inline Floats silu(Floats x) {
    // Further down the result is zero to float32, and e^-x would leave the range of the polynomial.
    x = larger(x, spread(-80.0f));
    return x / (1.0f + exponential(-x));
}

}  // namespace
