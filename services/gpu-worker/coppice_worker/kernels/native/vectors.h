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

// Lanes against those so many places further, until all have met.
template <class Join>
inline float joined(Floats v, Join join) {
    constexpr Ints by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    constexpr Ints by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    constexpr Ints by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
    constexpr Ints by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    v = join(v, __builtin_shuffle(v, by8));
    v = join(v, __builtin_shuffle(v, by4));
    v = join(v, __builtin_shuffle(v, by2));
    return join(v, __builtin_shuffle(v, by1))[0];
}

inline float sum(Floats v) {
    return joined(v, [](Floats a, Floats b) { return a + b; });
}

inline float largest(Floats v) {
    return joined(v, [](Floats a, Floats b) { return larger(a, b); });
}

// x / (1 + e^-x)
inline Floats silu(Floats x) {
    // Further down the result is zero to float32, and e^-x would leave the range of the polynomial.
    x = larger(x, spread(-80.0f));
    return x / (1.0f + exponential(-x));
}

}  // namespace
