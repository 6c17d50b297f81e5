// A vector of numbers of the type in memory, as float32: float32, or bfloat16 with -DBFLOAT16.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

#ifdef BFLOAT16
typedef uint16_t Element;

namespace {

typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Floats load(const Element* at) {
    Halves narrow;
    std::memcpy(&narrow, at, sizeof narrow);
    return (Floats)(__builtin_convertvector(narrow, Words) << 16);
}

inline void store(Element* at, Floats values) {
    Words bits = (Words)values;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words is_nan = (Words)(values != values);
    Halves narrow = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
    std::memcpy(at, &narrow, sizeof narrow);
}

inline Floats load(const float* at) {
    Floats values;
    std::memcpy(&values, at, sizeof values);
    return values;
}

inline float load_one(const Element* at) {
    uint32_t bits = (uint32_t)*at << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline const float* as_floats(const Element*) { return nullptr; }

inline void store_one(Element* at, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    *at = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

}  // namespace
#else
typedef float Element;

namespace {

inline Floats load(const Element* at) {
    Floats values;
    std::memcpy(&values, at, sizeof values);
    return values;
}

inline void store(Element* at, Floats values) { std::memcpy(at, &values, sizeof values); }
inline const float* as_floats(const Element* at) { return at; }  // null: they are not
inline float load_one(const Element* at) { return *at; }
inline void store_one(Element* at, float value) { *at = value; }

}  // namespace
#endif
