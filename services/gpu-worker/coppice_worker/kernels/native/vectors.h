// As many float32 at a time as a register of the CPU has, in the words of GCC. Vectors of more than one register would be
// kept in memory.

#pragma once

#include <cstdint>

namespace {

#if defined(__AVX512F__)
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
constexpr int LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#else
#define LANE_NUMBERS 0, 1, 2, 3
constexpr int LANES = 4;
constexpr int REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

constexpr Ints NUMBERED = {LANE_NUMBERS};  // each lane has its number

inline Floats spread(float value) { return value - (Floats){}; }

inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }  // a NaN in `a` stays

// e^x = 2^n (1 + r p), for x in [-87, 88]: r in [-ln 2 / 2, ln 2 / 2], and 1 + r p Taylor's polynomial of degree 7.
struct Power {
    Floats r, p, two_to_n;
};

inline Power power_of_e(Floats x) {
    Floats shifted = x * 1.44269504f + 12582912.0f;  // the sum's low bits are the nearest whole number
    Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    return {r, p, (Floats)((__builtin_convertvector(n, Ints) + 127) << 23)};
}

// e^x for x <= 88, 0 below -87.
inline Floats exponential(Floats x) {
    Words vanishes = (Words)(x < -87.0f);
    Power power = power_of_e(larger(x, spread(-87.0f)));
    return (Floats)((Words)((power.p * power.r + 1.0f) * power.two_to_n) & ~vanishes);
}

// (e^2|x| - 1) / (e^2|x| + 1) with the sign of x. The numerator is a sum of what is left of the power and of what
// 2^n is above 1, so nothing cancels and small results are as exact as large ones.
inline Floats tangent(Floats x) {
    Words sign = ~Words{} << 31;
    Floats twice = 2.0f * (Floats)((Words)x & ~sign);
    Power power = power_of_e(twice > 20.0f ? spread(20.0f) : twice);  // further out the result is 1 to float32
    Floats above_one = power.two_to_n * (power.p * power.r) + (power.two_to_n - 1.0f);
    return (Floats)((Words)(above_one / (above_one + 2.0f)) | ((Words)x & sign));
}

// Lanes against those so many places apart, until all have met.
template <int APART = LANES / 2, class Join>
inline float joined(Floats v, Join join) {
    constexpr Ints others = NUMBERED ^ APART;
    v = join(v, __builtin_shuffle(v, others));
    if constexpr (APART > 1)
        return joined<APART / 2>(v, join);
    else
        return v[0];
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

// x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written as silu is: what is small does not cancel.
inline Floats gelu_tanh(Floats x) {
    x = larger(x, spread(-10.0f));
    return x / (1.0f + exponential(x * (-1.5957691216f - 0.0713548162726f * x * x)));
}

// Which activation, as library.py counts them.
inline Floats activated(Floats x, int64_t activation) { return activation == 1 ? silu(x) : gelu_tanh(x); }

}  // namespace
