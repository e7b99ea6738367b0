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

static inline unsigned short float_to_half(float value) {
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    value = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (value >= 65520.0f) return sign | 0x7c00;
    if (value < 6.103515625e-05f) return sign | (unsigned short)std::nearbyint(std::ldexp(value, 24));
    int exponent;
    std::frexp(value, &exponent);  // 2^(exponent - 1) <= value
    const unsigned int fraction = (unsigned int)std::nearbyint(std::ldexp(value, 11 - exponent));
    return sign | (unsigned short)(((exponent + 13) << 10) + fraction);  // a fraction of 2048 carries over
}
