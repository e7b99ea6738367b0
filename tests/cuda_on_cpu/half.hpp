// 16-bit floats by their bits: g++ before version 13 has no type for them in C++.
#pragma once

#include <cmath>

static inline float half_to_float(unsigned short bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    float value;
    if (exponent == 31)
        value = fraction ? NAN : INFINITY;
    else if (exponent)
        value = std::ldexp((float)(1024 + fraction), exponent - 25);
    else
        value = std::ldexp((float)fraction, -24);
    return bits & 0x8000 ? -value : value;
}
