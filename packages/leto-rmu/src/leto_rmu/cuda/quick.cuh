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

// Bits of the smallest number, and how far from it the greatest is; exponents are biased by 127.
static constexpr u32 SQUARE = (127u - 96) << 23, SQUARES = (96u + 116) << 23;     // what a root is taken of; or zero
static constexpr u32 DIVIDEND = (127u - 96) << 23, DIVIDENDS = (96u + 60) << 23;  // without sign; or zero, not minus zero
static constexpr u32 DIVISOR = (127u - 60) << 23, DIVISORS = (60u + 20) << 23;

__device__ __forceinline__ bool fit_for_root(float a) {
    const u32 bits = __float_as_uint(a);
    return bits - SQUARE <= SQUARES || bits == 0;
}
__device__ __forceinline__ bool fit_dividend(float a) {
    const u32 bits = __float_as_uint(a);
    return (bits & 0x7fffffffu) - DIVIDEND <= DIVIDENDS || bits == 0;
}
__device__ __forceinline__ bool fit_divisor(float a) { return __float_as_uint(a) - DIVISOR <= DIVISORS; }

// The root of a number that is fit.
__device__ __forceinline__ float quick_root(float a) {
    const float y = near_reciprocal_root(a), r = mul(a, y);
    const float rest = fma(negative(r), r, a);
    return a == 0 ? a : fma(rest, mul(y, 0.5f), r);
}

// The reciprocal of a fit divisor, as good as division needs it.
__device__ __forceinline__ float reciprocal(float b) {
    const float r = near_reciprocal(b);
    return fma(r, fma(negative(b), r, 1.0f), r);
}

// a / b of fit numbers, with what `reciprocal` made of b.
__device__ __forceinline__ float quick_div(float a, float b, float r) {
    const float q = mul(a, r);
    return fma(r, fma(negative(b), q, a), q);
}

}  // namespace leto_rmu
