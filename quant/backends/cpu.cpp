// The compiled CPU twin of reference.py: the same bits, one pass over memory; the error that it made, in another; or both
// at once, keeping nothing but the error. See cpu.py for how it is called.
//
// A tensor is [outer, axis, inner], row-major; a block is `block` neighbours along the axis. With inner = 1 the loops run
// along a block, else along up to STRIP neighbouring blocks, so that memory is read in order both ways.
//
// Compiled once for each VALUE (float, or uint16_t for bfloat16), number of TIERS, ROUNDING (0 nearest, 1 half away) and
// WIDE (1 for elements with float32's exponents), which are macros: a build of one combination takes a second, of all ten.
// Needs strict IEEE float32: no contraction, no reassociation, subnormals and signed zeros kept.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int MAX_TIERS = 8;
constexpr int64_t STRIP = 256;
constexpr float FLOAT32_MAX = 3.4028234663852886e38f;

enum Rule { NONE, FLOOR, CEIL, EVEN, RCEIL, AMAX, NVFP4 };
constexpr int NEAREST = 0, HALF_AWAY = 1;

}  // namespace

extern "C" struct Format {
    int32_t rule, signed_zero, emax, mantissa_bits;
    float max, limit;
    float lowest[MAX_TIERS];  // 2^(lowest exponent) of each tier
    float step[MAX_TIERS];    // 2^-(mantissa bits) of each tier
};

namespace {

inline int32_t to_bits(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float from_bits(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float load(const float* p) { return *p; }

inline float load(const uint16_t* p) { return from_bits(static_cast<int32_t>(static_cast<uint32_t>(*p) << 16)); }

inline void store(float* p, float y) { *p = y; }

inline void store(uint16_t* p, float y) {  // bfloat16, ties to even
    uint32_t bits = static_cast<uint32_t>(to_bits(y));
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    *p = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

inline float pow2(int32_t exponent) {
    if (exponent >= -126) return from_bits((exponent + 127) << 23);
    return from_bits(1 << (exponent + 149));
}

// x on the element's grid. (v + c) - c with c = 1.5 * 2^23 ulp rounds v to a multiple of ulp, ties to even.
template <int Tiers, int Rounding, bool Wide>
inline float round_to_element(float x, const Format& f, float top) {
    int32_t bits = to_bits(x);
    float v = from_bits(bits & 0x7FFFFFFF);
    float binade = from_bits(bits & 0x7F800000);
    binade = binade > f.lowest[0] ? binade : f.lowest[0];
    binade = binade < top ? binade : top;
    float back = 1.0f;
    if (Wide) {  // bfloat16's range is float32's: the constant would leave it
        float shift = v < 1.0f ? 0x1p32f : 0x1p-32f;
        back = v < 1.0f ? 0x1p-32f : 0x1p32f;
        binade *= shift;
        v *= shift;
    }
    float ulp = binade * f.step[0];
    for (int i = 1; i < Tiers; i++) ulp = binade >= f.lowest[i] ? binade * f.step[i] : ulp;
    float c = ulp * 0x1.8p23f;
    float y = (v + c) - c;
    if (Rounding == HALF_AWAY) y = v - y == 0.5f * ulp ? y + ulp : y;
    if (Wide) y *= back;
    y = y > f.max ? f.limit : y;
    y = from_bits(to_bits(y) | (bits & static_cast<int32_t>(0x80000000)));
    return f.signed_zero ? y : y + 0.0f;
}

inline int32_t scale_exponent(float absmax, const Format& f) {
    bool subnormal = absmax < 0x1p-126f;
    int32_t bits = to_bits(subnormal ? absmax * 0x1p24f : absmax);
    if (f.rule == EVEN) bits += 1 << (22 - f.mantissa_bits);
    int32_t exponent = (bits >> 23) - 127 - (subnormal ? 24 : 0) - f.emax;
    if (f.rule == CEIL || f.rule == RCEIL) {
        float threshold = f.rule == CEIL ? 1.0f : f.max * pow2(-f.emax);
        exponent += from_bits((bits & 0x7FFFFF) | 0x3F800000) > threshold;
    }
    return exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
}

// What a block multiplies by on the way in and, in two steps, on the way out, and the scale that is reported.
struct Scale {
    float in, out, last, reported;
};

inline Scale block_scale(int32_t magnitude, const Format& f, float encode, float decode) {
    float absmax = from_bits(magnitude);
    if (f.rule == NVFP4) {
        static const Format e4m3 = {NONE, 1, 8, 3, 448.0f, 448.0f, {0x1p-6f}, {0x1p-3f}};
        float sixth = 1.0f / 6.0f;
        float wanted = absmax * (encode * sixth);
        float scale = round_to_element<1, NEAREST, false>(wanted, e4m3, 512.0f);
        float inverse = 1.0f / (scale * (1.0f / encode));
        inverse = inverse > FLOAT32_MAX ? FLOAT32_MAX : inverse;
        return {inverse, scale, decode, scale};
    }
    int32_t exponent = scale_exponent(absmax, f);
    float scale = absmax <= FLOAT32_MAX ? pow2(exponent) : from_bits(0x7FC00000);
    return {pow2(-exponent), scale, 1.0f, scale};
}

inline float quantized(float x, const Scale& s, const Format& f, float top, bool nvfp4) {
    float scaled = x * s.in;
    if (nvfp4) {
        scaled = scaled > f.max ? f.max : scaled;
        scaled = scaled < -f.max ? -f.max : scaled;
    }
    float value = round_to_element<TIERS, ROUNDING, WIDE>(scaled, f, top);
    return nvfp4 ? value * s.out * s.last : value * s.out;
}

// Up to STRIP neighbouring blocks of one row of blocks, inner > 1: `length` rows of `width` values from `base` on. The
// scales start at `scale`.
struct Strip {
    int64_t base, length, width, scale;
};

// Where blocks and strips of a [outer, axis, inner] tensor lie.
struct Grid {
    int64_t axis, inner, block;

    int64_t per_axis() const { return (axis + block - 1) / block; }

    // Of block b, inner = 1: its first value. Blocks follow each other in memory.
    int64_t at(int64_t b) const { return (b / per_axis()) * axis + (b % per_axis()) * block; }

    int64_t length(int64_t b) const { return std::min(axis - (b % per_axis()) * block, block); }

    Strip strip(int64_t s) const {
        const int64_t per_row = (inner + STRIP - 1) / STRIP;
        const int64_t column = (s % per_row) * STRIP, row = s / per_row;
        return {at(row) * inner + column, length(row), std::min(inner - column, STRIP), row * inner + column};
    }
};

struct Quantizer {
    const Format f;  // a copy: stores through y cannot alias it
    const VALUE* x;
    VALUE* y;
    float* scales;
    Grid grid;
    bool packed;  // y has room for one strip only, its rows STRIP apart
    float top, encode, decode;

    Quantizer(const Format& format, const VALUE* x, VALUE* y, float* scales, const Grid& grid, float absmax, bool packed)
        : f(format), x(x), y(y), scales(scales), grid(grid), packed(packed) {
        top = pow2(f.emax) * (WIDE ? 1.0f : 2.0f);
        encode = decode = 1.0f;
        if (f.rule == AMAX) encode = f.max / (absmax < 1e-12f ? 1e-12f : absmax);
        if (f.rule == NVFP4) {
            encode = absmax == 0.0f ? 1.0f : 2688.0f / absmax;
            encode = encode > FLOAT32_MAX ? FLOAT32_MAX : encode;
            decode = absmax / 2688.0f;
        }
    }

    // Values [first, last) of a flat tensor that shares nothing but, perhaps, a tensor scale.
    void flat(int64_t first, int64_t last) const {
        const Format g = f;
        const float t = top, e = encode;
        if (g.rule == AMAX) {
            for (int64_t i = first; i < last; i++)
                store(y + i, round_to_element<TIERS, ROUNDING, WIDE>(load(x + i) * e, g, t) / e);
        } else {
            for (int64_t i = first; i < last; i++)
                store(y + i, round_to_element<TIERS, ROUNDING, WIDE>(load(x + i), g, t));
        }
    }

    // Blocks [first, last) of rows, inner = 1.
    void rows(int64_t first, int64_t last) const {
        const Format g = f;
        const float t = top;
        const bool nvfp4 = g.rule == NVFP4;
        for (int64_t b = first; b < last; b++) {
            const int64_t at = grid.at(b), length = grid.length(b);
            const VALUE* from = x + at;
            VALUE* to = y + at;
            int32_t magnitude = 0;
            for (int64_t i = 0; i < length; i++) {
                int32_t m = to_bits(load(from + i)) & 0x7FFFFFFF;
                magnitude = m > magnitude ? m : magnitude;
            }
            const Scale s = block_scale(magnitude, g, encode, decode);
            if (scales) scales[b] = s.reported;
            for (int64_t i = 0; i < length; i++) store(to + i, quantized(load(from + i), s, g, t, nvfp4));
        }
    }

    // Strips [first, last).
    void strips(int64_t first, int64_t last) const {
        const Format g = f;
        const float t = top;
        const bool nvfp4 = g.rule == NVFP4;
        int32_t magnitude[STRIP];
        float in[STRIP], out[STRIP];
        for (int64_t s = first; s < last; s++) {
            const Strip strip = grid.strip(s);
            const int64_t width = strip.width;
            std::memset(magnitude, 0, sizeof magnitude);
            for (int64_t i = 0; i < strip.length; i++) {
                const VALUE* from = x + strip.base + i * grid.inner;
                for (int64_t j = 0; j < width; j++) {
                    int32_t m = to_bits(load(from + j)) & 0x7FFFFFFF;
                    magnitude[j] = m > magnitude[j] ? m : magnitude[j];
                }
            }
            for (int64_t j = 0; j < width; j++) {
                const Scale found = block_scale(magnitude[j], g, encode, decode);
                in[j] = found.in;
                out[j] = found.out;
                if (scales) scales[strip.scale + j] = found.reported;
            }
            for (int64_t i = 0; i < strip.length; i++) {
                const VALUE* from = x + strip.base + i * grid.inner;
                VALUE* to = packed ? y + i * STRIP : y + strip.base + i * grid.inner;
                for (int64_t j = 0; j < width; j++)
                    store(to + j, quantized(load(from + j), Scale{in[j], out[j], decode, 0.0f}, g, t, nvfp4));
            }
        }
    }
};

// What `measure` adds up, a tile at a time: values are gathered as floats, then summed by loops that may be reordered.
struct Sums {
    static constexpr int64_t TILE = 512;
    float a[TILE], b[TILE];
    double most[TILE];
    double left;
    int64_t filled = 0;
    double total[9] = {};

    // limit(i): |a| · left beyond it is saturated.
    template <typename Limit>
    void add(const VALUE* x, const VALUE* y, int64_t length, Limit limit) {
        for (int64_t at = 0; at < length;) {
            const int64_t n = std::min(length - at, TILE - filled);
            for (int64_t i = 0; i < n; i++) {
                a[filled + i] = load(x + at + i);
                b[filled + i] = load(y + at + i);
                most[filled + i] = limit(at + i);
            }
            at += n;
            filled += n;
            if (filled == TILE) finish();
        }
    }

    void finish() {
        const int32_t n = static_cast<int32_t>(filled);
        double xx = 0, qq = 0, xq = 0, ee = 0, peak = 0;
        int32_t finite = 0, nonzero = 0, flushed = 0, saturated = 0;
#pragma omp simd reduction(+ : xx, qq, xq, ee, finite, nonzero, flushed, saturated) reduction(max : peak)
        for (int32_t i = 0; i < n; i++) {
            const bool ok = (to_bits(a[i]) & 0x7FFFFFFF) < 0x7F800000;
            const double x = ok ? a[i] : 0.0f, q = ok ? b[i] : 0.0f, e = q - x;
            const double size = e < 0 ? -e : e, magnitude = x < 0 ? -x : x;
            xx += x * x;
            qq += q * q;
            xq += x * q;
            ee += e * e;
            peak = size > peak ? size : peak;
            finite += ok;
            nonzero += x != 0;
            flushed += (x != 0) & (q == 0);
            saturated += magnitude * left > most[i];
        }
        total[0] += xx;
        total[1] += qq;
        total[2] += xq;
        total[3] += ee;
        total[4] = peak > total[4] ? peak : total[4];
        total[5] += finite;
        total[6] += nonzero;
        total[7] += flushed;
        total[8] += saturated;
        filled = 0;
    }
};

// Adds up blocks [first, last) of rows, inner = 1; y holds what x + origin became.
void measure_rows(Sums& sums, const Grid& grid, const VALUE* x, const VALUE* y, int64_t origin, const float* scales,
                  double right, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const int64_t at = grid.at(b);
        const double limit = scales[b] > 0 ? scales[b] * right : HUGE_VAL;
        sums.add(x + at, y + (at - origin), grid.length(b), [=](int64_t) { return limit; });
    }
}

// Adds up one strip; packed is as in Quantizer.
void measure_strip(Sums& sums, const Grid& grid, const VALUE* x, const VALUE* y, bool packed, const float* scales,
                   double right, int64_t s) {
    const Strip strip = grid.strip(s);
    double most[STRIP];
    for (int64_t j = 0; j < strip.width; j++) {
        const float scale = scales[strip.scale + j];
        most[j] = scale > 0 ? scale * right : HUGE_VAL;
    }
    for (int64_t i = 0; i < strip.length; i++) {
        const int64_t at = strip.base + i * grid.inner;
        sums.add(x + at, packed ? y + i * STRIP : y + at, strip.width, [&](int64_t j) { return most[j]; });
    }
}

}  // namespace

// Work items [first, last): values where no block shares a scale, blocks where inner = 1, strips otherwise.
extern "C" void quantize(const Format* format, const VALUE* x, VALUE* y, float* scales, int64_t axis, int64_t inner,
                         int64_t block, float absmax, int64_t first, int64_t last) {
    const Quantizer q(*format, x, y, scales, {axis, inner, block}, absmax, false);
    if (format->rule == NONE || format->rule == AMAX)
        q.flat(first, last);
    else if (inner == 1)
        q.rows(first, last);
    else
        q.strips(first, last);
}

// The error of y against x over the same work items: sums of x², q², xq and e², the largest |e|, and how many are finite,
// not zero, flushed to zero, saturated. A value saturates where |x| · left > scale · right; scales may be null (all 1).
extern "C" void measure(const VALUE* x, const VALUE* y, const float* scales, int64_t axis, int64_t inner, int64_t block,
                        double left, double right, int64_t first, int64_t last, double* out) {
    const Grid grid{axis, inner, block};
    Sums sums;
    sums.left = left;
    if (!scales)
        sums.add(x + first, y + first, last - first, [=](int64_t) { return right; });
    else if (inner == 1)
        measure_rows(sums, grid, x, y, 0, scales, right, first, last);
    else
        for (int64_t strip = first; strip < last; strip++)
            measure_strip(sums, grid, x, y, false, scales, right, strip);
    sums.finish();
    std::memcpy(out, sums.total, sizeof sums.total);
}

// quantize and measure together, a cacheful at a time. `scales` has room for those of all blocks, or is null for formats
// without block scales.
extern "C" void score(const Format* format, const VALUE* x, float* scales, int64_t axis, int64_t inner, int64_t block,
                      float absmax, double left, double right, int64_t first, int64_t last, double* out) {
    constexpr int64_t VALUES = 4096;
    const Grid grid{axis, inner, block};
    Sums sums;
    sums.left = left;
    std::vector<VALUE> kept;
    Quantizer q(*format, x, nullptr, scales, grid, absmax, true);
    if (!scales) {
        kept.resize(VALUES);
        for (int64_t at = first; at < last; at += VALUES) {
            const int64_t n = std::min(last - at, VALUES);
            q.x = x + at;
            q.y = kept.data();
            q.flat(0, n);
            sums.add(x + at, kept.data(), n, [=](int64_t) { return right; });
        }
    } else if (inner == 1) {
        const int64_t length = std::min(block, axis);
        const int64_t together = length < VALUES ? VALUES / length : 1;
        kept.resize(together * length);
        for (int64_t b = first; b < last; b += together) {
            const int64_t end = std::min(last, b + together);
            const int64_t origin = grid.at(b);
            q.y = kept.data() - origin;
            q.rows(b, end);
            measure_rows(sums, grid, x, kept.data(), origin, scales, right, b, end);
        }
    } else {
        kept.resize(std::min(block, axis) * STRIP);
        q.y = kept.data();
        for (int64_t strip = first; strip < last; strip++) {
            q.strips(strip, strip + 1);
            measure_strip(sums, grid, x, kept.data(), true, scales, right, strip);
        }
    }
    sums.finish();
    std::memcpy(out, sums.total, sizeof sums.total);
}
