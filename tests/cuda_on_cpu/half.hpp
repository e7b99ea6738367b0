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

// Rounded once, ties to even; a float is a double first, which changes nothing.
static inline unsigned short half_of(double value) {
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (size >= 65520.0) return sign | 0x7c00;
    if (size < std::ldexp(1.0, -14)) return sign | (unsigned short)std::nearbyint(std::ldexp(size, 24));
    const int exponent = std::ilogb(size);
    return sign | (unsigned short)(((exponent + 14) << 10) + (int)std::nearbyint(std::ldexp(size, 10 - exponent)));
}
