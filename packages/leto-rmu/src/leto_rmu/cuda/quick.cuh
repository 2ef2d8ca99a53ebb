// Quotients and roots without branches, rounded to nearest as div.rn and sqrt.rn round them, for operands in ranges
// that nearly all of a training's are in. Outside them the results mean nothing, and the caller computes again.
//
// div.rn and sqrt.rn are short programs with a way out for rare operands, a call. With two of one and one of the other
// for each element, in a loop over five elements, the ways out keep the compiler from computing the five at
// once, and a multiprocessor with 16 warps waits for each in turn. These are the short programs without the way out: a
// reciprocal (root) that is nearly right, one step of Newton's, and a correction by the remainder, which fma
// gives exactly. As long as nothing over- or underflows on the way, scaling by powers of two changes nothing, so the
// ranges are chosen by exponents: remainders are 2^-24 of the dividend and have to be normal numbers.
#pragma once

namespace leto_rmu {

using leto_ec::u32;

struct Range {
    u32 low, span;  // of the bits of a number that is not negative
};
static constexpr u32 exponent(int e) { return (u32)(127 + e) << 23; }
static constexpr Range between(int low, int high) { return {exponent(low), exponent(high) - exponent(low)}; }
static constexpr Range SQUARE = between(-96, 116);     // what a root is taken of; or zero
static constexpr Range DIVIDEND = between(-96, 60);    // its absolute value; or zero, but not minus zero
static constexpr Range DIVISOR = between(-60, 20);

__device__ __forceinline__ bool inside(u32 bits, Range range) { return bits - range.low <= range.span; }
__device__ __forceinline__ bool fit_for_root(float a) {
    const u32 bits = __float_as_uint(a);
    return inside(bits, SQUARE) || bits == 0;
}
__device__ __forceinline__ bool fit_dividend(float a) {
    const u32 bits = __float_as_uint(a);
    return inside(bits & 0x7fffffffu, DIVIDEND) || bits == 0;
}
__device__ __forceinline__ bool fit_divisor(float a) { return inside(__float_as_uint(a), DIVISOR); }

// The root of a number that is fit.
__device__ __forceinline__ float quick_root(float a) {
    const float y = near_reciprocal_root(a), r = mul(a, y);
    const float rest = fma(-r, r, a);
    return a == 0 ? a : fma(rest, mul(y, 0.5f), r);
}

// The reciprocal of a fit divisor, as good as division needs it.
__device__ __forceinline__ float reciprocal(float b) {
    const float r = near_reciprocal(b);
    return fma(r, fma(-b, r, 1.0f), r);
}

// a / b of fit numbers, with what `reciprocal` made of b.
__device__ __forceinline__ float quick_div(float a, float b, float r) {
    const float q = mul(a, r);
    return fma(r, fma(-b, q, a), q);
}

}  // namespace leto_rmu
