// The compiled CPU twin of reference.py, with the same bits. `quantize` rounds with scales that it finds itself (the rules
// below) or with factors that it is given (GIVEN); `largest`, `moments` and `run_errors` give what such factors follow from; `measure`
// adds up the error of a rounded tensor, or what it does to the loss, and counts its blocks by theirs; `score` rounds and
// measures at once and keeps the sums alone. See cpu.py for the calls.
//
// A tensor is [outer, axis, inner], row-major; a block is `block` neighbors along the axis. With inner = 1 the loops run
// along a block, else along up to STRIP neighboring blocks, so that memory is read in order both ways. A tensor that shares
// one set of factors is a single run, cut anywhere.
//
// Compiled once for each VALUE (float, or uint16_t for bfloat16), number of TIERS, ROUNDING (0 nearest, 1 half away,
// 2 stochastic) and WIDE (1 for elements with float32's exponents), which are macros: a build of one combination takes
// seconds, a build of all of them a minute.
// Needs strict IEEE float32: no contraction, no reassociation, subnormals and signed zeros kept.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

// Within `score` GCC does not vectorize the loops of these functions: inlined they take up to ten times as long.
#define LOOPS __attribute__((noinline))

constexpr int MAX_TIERS = 8;
constexpr int64_t STRIP = 256;
constexpr float FLOAT32_MAX = 3.4028234663852886e38f;

enum Rule { GIVEN, FLOOR, CEIL, EVEN, RCEIL, NVFP4, HIF4, UNCLIPPED, FOUR_OVER_SIX, QUEST };
constexpr int NEAREST = 0, HALF_AWAY = 1, STOCHASTIC = 2;

}  // namespace

extern "C" struct Format {
    int32_t rule, emax, mantissa_bits;
    float max, limit, inverse;  // inverse: 1 / max
    float bound;                // rounds as all larger values do
    float zero;                 // what is added to a result: -0 if the element has a negative zero, else 0
    float lowest[MAX_TIERS];    // 2^(lowest exponent) of each tier
    float step[MAX_TIERS];      // 2^-(mantissa bits) of each tier
    float outer;                // NVFP4: what the largest magnitude of a tensor or an outer block is scaled to. QUEST: how
                                // many values a whole block has
    int32_t squares;            // FOUR_OVER_SIX: whether it compares sums of squares
};

// x; a NaN with bits in its lower half, as torch makes them, becomes one without, see `store`.
inline float short_nan(float x) { return x == x ? x : NAN; }

// The four factors of a run: values are multiplied by the first before rounding, then by the second and the third, and divided by the fourth. Group
// i finds each at from[...][i * step[...]]; a step of 0 is one for all, null is 1. A group is a run, or in tiles those of as
// many lines as a tile has rows: runs follow each other as [outer, per_axis, inner], groups as [lines / rows, per_axis].
extern "C" struct Factors {
    const float* from[4];
    int64_t step[4];
    int64_t rows, per_axis, inner;

    // The groups of `count` runs from `run` on.
    void groups(int64_t run, int64_t count, int64_t* into) const {
        if (rows == 1) {
            for (int64_t n = 0; n < count; n++) into[n] = run + n;
            return;
        }
        const int64_t row = run / inner;
        int64_t line = (row / per_axis) * inner + run % inner, column = row % per_axis;
        int64_t below = line % rows, first = line / rows * per_axis;
        for (int64_t n = 0; n < count; n++) {
            into[n] = first + column;
            const bool next = inner > 1 || ++column == per_axis;  // the next run is of the next line
            column = inner == 1 && next ? 0 : column;
            below += next;
            first += below == rows ? per_axis : 0;
            below = below == rows ? 0 : below;
        }
    }

    float one(int which) const { return from[which] ? short_nan(*from[which]) : 1.0f; }  // that of all runs
};

// How the measures of blocks are cut into bins, see block_histograms.BlockMeasure: the scale exponent, the SQNR and the
// crest factor.
extern "C" struct Bins {
    float width[3];
    int32_t low[3], high[3];
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

// bfloat16, ties to even. A NaN, from a bfloat16, arithmetic or `short_nan`, has a lower half of 0 and stays NaN.
inline void store(uint16_t* p, float y) {
    uint32_t bits = static_cast<uint32_t>(to_bits(y));
    *p = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The bits of a value without its sign: integers in the order of the magnitudes, NaN above all.
using Magnitude = std::conditional_t<std::is_same_v<VALUE, float>, int32_t, int16_t>;

inline int32_t magnitude_of(float x) { return to_bits(x) & 0x7FFFFFFF; }

inline int16_t magnitude_of(uint16_t x) { return static_cast<int16_t>(x & 0x7FFF); }

inline float to_float(int32_t magnitude) { return from_bits(magnitude); }

inline float to_float(int16_t magnitude) { return from_bits(static_cast<int32_t>(magnitude) << 16); }

inline float pow2(int32_t exponent) {
    if (exponent >= -126) return from_bits((exponent + 127) << 23);
    return from_bits(1 << (exponent + 149));
}

inline float to_bfloat16(float x) {  // ties to even; x is finite
    uint32_t bits = static_cast<uint32_t>(to_bits(x));
    return from_bits(static_cast<int32_t>((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000));
}

inline uint32_t mix(uint32_t h) {  // lowbias32
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
}

struct NoiseKey {
    uint32_t first, second;
    explicit NoiseKey(uint32_t seed) : first(mix(seed)), second(mix(seed ^ 0x9E3779B9u)) {}
};

// 16 random bits of the element with this flat index, from -2^15; 0 where rounding needs none. See rounding.noise.
inline int32_t noise(int64_t index, NoiseKey key) {
    if (ROUNDING != STOCHASTIC) return 0;
    uint32_t h = (static_cast<uint32_t>(index) + key.first) * 0xDCF94B3Bu;
    h = (h ^ (h >> 16) ^ key.second) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return static_cast<int32_t>(h) >> 16;
}

// As round_to_element for elements that are float32's upper bits. A carry leads to the next binade, and at last to Inf.
template <int Rounding>
inline float round_upper_bits(float x, const Format& f, int32_t k) {
    const int dropped = 23 - f.mantissa_bits;
    const uint32_t bits = static_cast<uint32_t>(to_bits(x)), half = 1u << (dropped - 1);
    uint32_t added = half;
    if (Rounding == NEAREST) added = half - 1 + ((bits >> dropped) & 1);
    if (Rounding == STOCHASTIC) added = half - 1 - static_cast<uint32_t>(k >> (16 - dropped));
    float y = from_bits(static_cast<int32_t>((bits + added) & (~0u << dropped)));
    y = y > f.limit ? f.limit : y;
    y = y < -f.limit ? -f.limit : y;
    return x == x ? y : x;
}

// x on the element's grid. (v + c) - c with c = 1.5 * 2^23 ulp rounds v to a multiple of ulp, ties to even.
template <int Tiers, int Rounding, bool Wide>
inline float round_to_element(float x, const Format& f, int32_t k = 0) {
    if (Wide) return round_upper_bits<Rounding>(x, f, k);
    int32_t bits = to_bits(x);
    float v = from_bits(bits & 0x7FFFFFFF);
    v = v > f.bound ? f.bound : v;
    float binade = from_bits(to_bits(v) & 0x7F800000);
    binade = binade > f.lowest[0] ? binade : f.lowest[0];
    float step = f.step[0];
    for (int i = 1; i < Tiers; i++) step = binade >= f.lowest[i] ? f.step[i] : step;
    // Setting the last bit moves a tie above the middle, and no other value to it or across it.
    if (Rounding == HALF_AWAY) v = from_bits(to_bits(v) | 1);
    float c = binade * (step * 0x1.8p23f);
    float y = (v + c) - c;
    if (Rounding == STOCHASTIC) {
        // The rest, rounded to 16 bits of a fraction of ulp: one ulp stays if that is more than the noise.
        float rest = (v - y) + binade * (step * 130.0f);
        rest = from_bits((to_bits(rest) - 32769 - k) & -65536);
        y += rest - binade * (step * 129.0f);
    }
    y = y > f.max ? f.limit : y;
    y = from_bits(to_bits(y) | (bits & static_cast<int32_t>(0x80000000)));
    return y + f.zero;
}

// QUEST: what the scale is the next lower power of two of, from the sums of a block's values and of their squares.
inline float deviation(double total, double squares, const Format& f) {
    const double share = 1.0 / f.outer, mean = total * share, variance = squares * share - mean * mean;
    return static_cast<float>(std::sqrt(variance < 0 ? 0.0 : variance)) * static_cast<float>(2.92247856 / 6.0) + 1e-8f;
}

// absmax: for QUEST, the deviation instead.
inline int32_t scale_exponent(float absmax, const Format& f) {
    bool subnormal = absmax < 0x1p-126f;
    int32_t bits = to_bits(subnormal ? absmax * 0x1p24f : absmax);
    if (f.rule == EVEN) bits += 1 << (22 - f.mantissa_bits);
    int32_t exponent = (bits >> 23) - 127 - (subnormal ? 24 : 0) - (f.rule == QUEST ? 0 : f.emax);
    if (f.rule == CEIL || f.rule == RCEIL) {
        float threshold = f.rule == CEIL ? 1.0f : f.max * pow2(-f.emax);
        exponent += from_bits((bits & 0x7FFFFF) | 0x3F800000) > threshold;
    }
    return exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
}

// The factors of a run: values are multiplied by `in`, rounded, multiplied by `out` and `last`, and divided by `divisor`.
struct Scale {
    float in, out, last, divisor;
};

template <int64_t Runs>
struct Scales {
    float in[Runs], out[Runs], last[Runs], divisor[Runs];

    Scale at(int64_t n) const { return {in[n], out[n], last[n], divisor[n]}; }

    void take(const Factors& given, int64_t run, int64_t count) {
        float* into[4] = {in, out, last, divisor};
        int64_t group[Runs];
        given.groups(run, count, group);
        for (int which = 0; which < 4; which++) {
            const float* from = given.from[which];
            if (given.step[which])
                std::transform(group, group + count, into[which], [from](int64_t i) { return short_nan(from[i]); });
            else
                std::fill(into[which], into[which] + count, given.one(which));
        }
    }
};

// What NVFP4's block scales follow from besides the block: of a tensor's or an outer block's largest magnitude.
struct Outer {
    float encode, decode, divisor;

    static Outer of(float absmax, const Format& f) {
        absmax = short_nan(absmax);
        float encode = absmax == 0.0f ? 1.0f : f.outer / absmax;
        encode = encode > FLOAT32_MAX ? FLOAT32_MAX : encode;
        if (f.rule == FOUR_OVER_SIX) return {encode, absmax, f.outer};
        return {encode, absmax / f.outer, 1.0f};
    }
};

// larger: FOUR_OVER_SIX tries this multiple of the scale, 1 or 1.5.
inline Scale block_scale(float absmax, const Format& f, const Outer& outer, float larger) {
    if (f.rule == NVFP4 || f.rule == UNCLIPPED || f.rule == FOUR_OVER_SIX) {
        static const Format e4m3 = {GIVEN, 8, 3, 448.0f, 448.0f, 0.0f, 448.0f, -0.0f, {0x1p-6f}, {0x1p-3f}};
        float wanted = absmax * (outer.encode * f.inverse);
        if (f.rule == UNCLIPPED) {
            const float target = static_cast<float>(f.max * 16.0 / 17.0);
            wanted = absmax / target;
            wanted = wanted == 0.0f ? wanted : wanted / outer.decode;  // of subnormals, decode may be 0
        }
        if (f.rule == FOUR_OVER_SIX) wanted = larger * (absmax / f.max * outer.encode);
        float scale = round_to_element<1, NEAREST, false>(wanted, e4m3);
        float inverse = 1.0f / (scale * (1.0f / outer.encode));
        inverse = inverse > FLOAT32_MAX ? FLOAT32_MAX : inverse;
        return {inverse, scale, outer.decode, outer.divisor};
    }
    int32_t exponent = scale_exponent(absmax, f);
    float scale = absmax <= FLOAT32_MAX ? pow2(exponent) : from_bits(0x7FC00000);
    return {pow2(-exponent), scale, 1.0f, 1.0f};
}

// HiF4's scale of 64 values, E6M2, and its inverse as bfloat16. The scale of a block that is not finite is NaN.
inline void hif4_scale(float absmax, float& scale, float& inverse) {
    static const Format e6m2 = {GIVEN, 15, 2, 49152.0f, 49152.0f, 0.0f, 49152.0f, 0.0f, {0x1p-48f}, {0x1p-2f}};
    float wanted = absmax * 0.142578125f;
    wanted = wanted < 49152.0f ? wanted : 49152.0f;
    wanted = wanted > 0x1p-48f ? wanted : 0x1p-48f;
    float found = round_to_element<1, NEAREST, false>(to_bfloat16(wanted), e6m2);
    inverse = to_bfloat16(1.0f / found);
    scale = absmax <= FLOAT32_MAX ? found : from_bits(0x7FC00000);
}

// The factor of 4 values: 2^(e8 + e4). eight and four: the largest magnitudes of the 8 and of the 4.
inline float hif4_factor(Magnitude eight, Magnitude four, float inverse) {
    float e8 = to_float(eight) * inverse >= 4.0f ? 2.0f : 1.0f;
    float e4 = to_float(four) * inverse >= 2.0f * e8 ? 2.0f : 1.0f;
    return e8 * e4;
}

// |what x becomes - x|, or its square, when x is rounded to nearest.
inline float error_of(float x, const Scale& s, const Format& f, bool squared) {
    const float y = round_to_element<TIERS, NEAREST, WIDE>(x * s.in, f) * s.out * s.last;
    const float error = from_bits(magnitude_of(y / s.divisor - x));
    return squared ? error * error : error;
}

// For each of `count` runs, the sum of its errors from the first value to the last. Value i of run n is at
// from[i * stride + n].
template <typename Value, int64_t Runs>
LOOPS void add_errors(float* out, const Scales<Runs>& scales, const Format& format, bool squared, int64_t count,
                      int64_t length, const Value* from, int64_t stride) {
    const Format f = format;
    float total[Runs];
    std::fill(total, total + count, 0.0f);
    for (int64_t i = 0; i < length; i++)
        for (int64_t n = 0; n < count; n++) total[n] += error_of(load(from + i * stride + n), scales.at(n), f, squared);
    std::copy(total, total + count, out);
}

template <bool Divide>
inline float quantized(float x, const Scale& s, const Format& f, int32_t k) {
    float y = round_to_element<TIERS, ROUNDING, WIDE>(x * s.in, f, k) * s.out * s.last;
    return Divide ? y / s.divisor : y;
}

// Up to STRIP neighboring blocks of one row of blocks, inner > 1: `length` rows of `width` values from `base` on. The
// scales start at `scale`.
struct Strip {
    int64_t base, length, width, scale;
};

// Where blocks and strips of a [outer, axis, inner] tensor lie.
struct Grid {
    int64_t axis, inner, block, per_axis;
    bool whole;  // no block is short: where one begins takes no division, which would cost as much as rounding 16 values

    Grid(int64_t axis, int64_t inner, int64_t block)
        : axis(axis), inner(inner), block(block), per_axis(block ? (axis + block - 1) / block : 0),
          whole(block && axis % block == 0) {}

    // Of block b, inner = 1: its first value. Blocks follow each other in memory.
    int64_t at(int64_t b) const { return whole ? b * block : (b / per_axis) * axis + (b % per_axis) * block; }

    int64_t length(int64_t b) const { return whole ? block : std::min(axis - (b % per_axis) * block, block); }

    Strip strip(int64_t s) const {
        const int64_t per_row = (inner + STRIP - 1) / STRIP;
        const int64_t column = (s % per_row) * STRIP, row = s / per_row;
        return {at(row) * inner + column, length(row), std::min(inner - column, STRIP), row * inner + column};
    }
};

constexpr int64_t BATCH = 64;

// How many blocks of rows are worked on together: few enough for the first cache.
inline int64_t batch(const Grid& grid) {
    return std::max<int64_t>(1, std::min(BATCH, 4096 / std::min(grid.block, grid.axis)));
}

// body(i) for i < length, without a remainder for the usual lengths.
template <typename Body>
inline void each(int64_t length, Body body) {
    if (length % 16 == 0)
        for (int64_t i = 0; i < (length & ~int64_t{15}); i++) body(i);
    else
        for (int64_t i = 0; i < length; i++) body(i);
}

inline void largest_of_rows(const VALUE* x, float* out, const Grid& grid, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const VALUE* from = x + grid.at(b);
        Magnitude most = 0;
        each(grid.length(b), [&](int64_t i) { most = std::max(most, magnitude_of(from[i])); });
        out[b - first] = to_float(most);
    }
}

// `count` blocks of rows from b on as columns: value i of block n at into[i * count + n]. Short ones end in zeros.
inline void to_columns(const VALUE* x, float* into, const Grid& grid, int64_t b, int64_t count) {
    const int64_t length = std::min(grid.block, grid.axis);
    for (int64_t n = 0; n < count; n++) {
        const VALUE* from = x + grid.at(b + n);
        const int64_t here = grid.length(b + n);
        for (int64_t i = 0; i < here; i++) into[i * count + n] = load(from + i);
        for (int64_t i = here; i < length; i++) into[i * count + n] = 0.0f;
    }
}

inline void largest_of_strip(const VALUE* x, float* out, const Grid& grid, const Strip& strip) {
    Magnitude most[STRIP] = {};
    for (int64_t i = 0; i < strip.length; i++) {
        const VALUE* from = x + strip.base + i * grid.inner;
        for (int64_t j = 0; j < strip.width; j++) most[j] = std::max(most[j], magnitude_of(from[j]));
    }
    for (int64_t j = 0; j < strip.width; j++) out[j] = to_float(most[j]);
}

struct Moments {  // the sums of x and of x²
    double *total, *squares;

    template <typename Value>
    LOOPS void operator()(int64_t run, int64_t count, int64_t length, const Value* from, int64_t stride) const {
        double first[STRIP], second[STRIP];
        std::fill(first, first + count, 0.0);
        std::fill(second, second + count, 0.0);
        for (int64_t i = 0; i < length; i++)
            for (int64_t n = 0; n < count; n++) {
                const double value = load(from + i * stride + n);
                first[n] += value;
                second[n] += value * value;
            }
        std::copy(first, first + count, total + run);
        std::copy(second, second + count, squares + run);
    }
};

struct Quantizer {
    const Format f;  // a copy: stores through y cannot alias it
    const Factors* given;
    const VALUE* x;
    VALUE* y;
    float* scales;  // written by the rules that find them
    Grid grid;
    bool packed;  // y has room for one strip only, its rows STRIP apart
    bool divide;
    NoiseKey key;
    const float* absmax;  // what NVFP4 needs, of run i at absmax[i * step]
    int64_t step;

    Quantizer(const Format& format, const Factors* given, const VALUE* x, VALUE* y, float* scales, const Grid& grid,
              const float* absmax, int64_t step, uint32_t seed, bool packed)
        : f(format), given(given), x(x), y(y), scales(given ? nullptr : scales), grid(grid), packed(packed),
          divide(given ? given->from[3] != nullptr : format.rule == FOUR_OVER_SIX), key(seed), absmax(absmax),
          step(step) {}

    // Values [first, last) of a flat tensor that shares its factors.
    void flat(int64_t first, int64_t last) const {
        divide ? flat_of<true>(first, last) : flat_of<false>(first, last);
    }

    // Blocks [first, last) of rows, inner = 1.
    void rows(int64_t first, int64_t last) const {
        if (f.rule == HIF4)
            hif4_rows(first, last);
        else
            divide ? rows_of<true>(first, last) : rows_of<false>(first, last);
    }

    // Strips [first, last).
    void strips(int64_t first, int64_t last) const {
        if (f.rule == HIF4)
            hif4_strips(first, last);
        else
            divide ? strips_of<true>(first, last) : strips_of<false>(first, last);
    }

  private:
    template <bool Divide>
    LOOPS void flat_of(int64_t first, int64_t last) const {
        const Format g = f;
        const Scale s{given->one(0), given->one(1), given->one(2), given->one(3)};
        const NoiseKey k = key;
        for (int64_t i = first; i < last; i++) store(y + i, quantized<Divide>(load(x + i), s, g, noise(i, k)));
    }

    template <bool Divide>
    LOOPS void rows_of(int64_t first, int64_t last) const {
        const Format g = f;
        const NoiseKey k = key;
        const int64_t length = std::min(grid.block, grid.axis), together = batch(grid);
        float largest[BATCH];
        Scales<BATCH> found;
        std::vector<float> columns(f.rule == FOUR_OVER_SIX || f.rule == QUEST ? together * length : 0);
        for (int64_t b = first; b < last; b += together) {
            const int64_t count = std::min(last - b, together);
            if (!columns.empty()) to_columns(x, columns.data(), grid, b, count);
            if (f.rule == QUEST)
                deviations(largest, count, length, columns.data(), count);
            else if (!given)
                largest_of_rows(x, largest, grid, b, b + count);
            fill(found, largest, b, count);
            if (f.rule == FOUR_OVER_SIX)
                choose(found, largest, b, count, length, columns.data(), count);
            if (scales) std::copy(found.out, found.out + count, scales + b);
            for (int64_t n = 0; n < count; n++) {
                const int64_t at = grid.at(b + n);
                const VALUE* from = x + at;
                VALUE* to = y + at;
                const Scale s = found.at(n);
                each(grid.length(b + n), [=, &g](int64_t i) {
                    store(to + i, quantized<Divide>(load(from + i), s, g, noise(at + i, k)));
                });
            }
        }
    }

    template <bool Divide>
    LOOPS void strips_of(int64_t first, int64_t last) const {
        const Format g = f;
        const NoiseKey k = key;
        float largest[STRIP];
        Scales<STRIP> found;
        for (int64_t s = first; s < last; s++) {
            const Strip strip = grid.strip(s);
            const int64_t width = strip.width;
            if (f.rule == QUEST)
                deviations(largest, width, strip.length, x + strip.base, grid.inner);
            else if (!given)
                largest_of_strip(x, largest, grid, strip);
            fill(found, largest, strip.scale, width);
            if (f.rule == FOUR_OVER_SIX)
                choose(found, largest, strip.scale, width, strip.length, x + strip.base, grid.inner);
            if (scales) std::copy(found.out, found.out + width, scales + strip.scale);
            for (int64_t i = 0; i < strip.length; i++) {
                const int64_t at = strip.base + i * grid.inner;
                const VALUE* from = x + at;
                VALUE* to = packed ? y + i * STRIP : y + at;
                for (int64_t j = 0; j < width; j++)
                    store(to + j, quantized<Divide>(load(from + j), found.at(j), g, noise(at + j, k)));
            }
        }
    }

    // The factors of `count` runs from `run` on: those given, or by the rule from their largest magnitudes.
    template <typename Scales>
    void fill(Scales& into, const float* largest, int64_t run, int64_t count, float larger = 1.0f) const {
        if (given) {
            into.take(*given, run, count);
            return;
        }
        const Format g = f;
        const auto found = [&](auto outer) {
            for (int64_t n = 0; n < count; n++) {
                const Scale scale = block_scale(largest[n], g, outer(n), larger);
                into.in[n] = scale.in;
                into.out[n] = scale.out;
                into.last[n] = scale.last;
                into.divisor[n] = scale.divisor;
            }
        };
        if (step)
            found([&, of_runs = absmax + run](int64_t n) { return Outer::of(of_runs[n], g); });
        else
            found([shared = Outer::of(*absmax, g)](int64_t) { return shared; });
    }

    // QUEST: what stands for the largest magnitudes of `count` runs.
    template <typename Value>
    void deviations(float* into, int64_t count, int64_t length, const Value* from, int64_t stride) const {
        double total[STRIP], squares[STRIP];
        Moments{total, squares}(0, count, length, from, stride);
        const Format g = f;
        for (int64_t n = 0; n < count; n++) into[n] = deviation(total[n], squares[n], g);
    }

    // FOUR_OVER_SIX: `into` has the scales for 6; those for 4 replace them where the sum of errors is smaller.
    template <typename Value, int64_t Runs>
    void choose(Scales<Runs>& into, const float* largest, int64_t run, int64_t count, int64_t length, const Value* from,
                int64_t stride) const {
        Scales<Runs> other;
        float error[Runs], others[Runs];
        fill(other, largest, run, count, 1.5f);
        add_errors(error, into, f, f.squares, count, length, from, stride);
        add_errors(others, other, f, f.squares, count, length, from, stride);
        for (int64_t n = 0; n < count; n++) {
            const bool closer = others[n] < error[n];
            into.in[n] = closer ? other.in[n] : into.in[n];
            into.out[n] = closer ? other.out[n] : into.out[n];
        }
    }

    void hif4_rows(int64_t first, int64_t last) const {
        const Format g = f;
        for (int64_t b = first; b < last; b++) {
            const int64_t at = grid.at(b), length = grid.length(b);
            VALUE values[64] = {};
            float finer[64];
            Magnitude fours[16], eights[8], most = 0;
            std::copy(x + at, x + at + length, values);
            for (int n = 0; n < 16; n++) {
                const VALUE* four = values + 4 * n;
                fours[n] = std::max(std::max(magnitude_of(four[0]), magnitude_of(four[1])),
                                    std::max(magnitude_of(four[2]), magnitude_of(four[3])));
            }
            for (int n = 0; n < 8; n++) eights[n] = std::max(fours[2 * n], fours[2 * n + 1]);
            for (int n = 0; n < 8; n++) most = std::max(most, eights[n]);
            float scale, inverse;
            hif4_scale(to_float(most), scale, inverse);
            if (scales) scales[b] = scale;
            for (int n = 0; n < 16; n++) {
                const float factor = hif4_factor(eights[n / 2], fours[n], inverse);
                for (int i = 0; i < 4; i++) finer[4 * n + i] = factor;
            }
            for (int i = 0; i < 64; i++)
                store(values + i,
                      quantized<false>(load(values + i), Scale{inverse / finer[i], finer[i], scale, 1.0f}, g, 0));
            std::copy(values, values + length, y + at);
        }
    }

    void hif4_strips(int64_t first, int64_t last) const {
        const Format g = f;
        Magnitude fours[16][STRIP], most[STRIP];
        float finer[16][STRIP], scale[STRIP], inverse[STRIP];
        for (int64_t s = first; s < last; s++) {
            const Strip strip = grid.strip(s);
            const int64_t width = strip.width;
            std::memset(fours, 0, sizeof fours);
            std::memset(most, 0, sizeof most);
            for (int64_t i = 0; i < strip.length; i++) {
                const VALUE* from = x + strip.base + i * grid.inner;
                Magnitude* four = fours[i / 4];
                for (int64_t j = 0; j < width; j++) four[j] = std::max(four[j], magnitude_of(from[j]));
            }
            for (int n = 0; n < 16; n++)
                for (int64_t j = 0; j < width; j++) most[j] = std::max(most[j], fours[n][j]);
            for (int64_t j = 0; j < width; j++) hif4_scale(to_float(most[j]), scale[j], inverse[j]);
            if (scales) std::memcpy(scales + strip.scale, scale, width * sizeof(float));
            for (int n = 0; n < 16; n++)
                for (int64_t j = 0; j < width; j++)
                    finer[n][j] = hif4_factor(std::max(fours[n][j], fours[n ^ 1][j]), fours[n][j], inverse[j]);
            for (int64_t i = 0; i < strip.length; i++) {
                const VALUE* from = x + strip.base + i * grid.inner;
                VALUE* to = packed ? y + i * STRIP : y + strip.base + i * grid.inner;
                const float* factor = finer[i / 4];
                for (int64_t j = 0; j < width; j++) {
                    const Scale found{inverse[j] / factor[j], factor[j], scale[j], 1.0f};
                    store(to + j, quantized<false>(load(from + j), found, g, 0));
                }
            }
        }
    }
};

// What `sum` calls for neighboring runs: `count` from `run` on, value i of the n-th at from[i * stride + n].
struct Errors {  // the sums of `add_errors` for all runs, for one of the `tried` factors after the other
    const Format f;
    const Factors* given;
    const int64_t tried, runs;
    const bool squared;
    float* out;

    template <typename Value>
    void operator()(int64_t run, int64_t count, int64_t length, const Value* from, int64_t stride) const {
        Scales<STRIP> found;
        for (int64_t t = 0; t < tried; t++) {
            found.take(given[t], run, count);
            add_errors(out + t * runs + run, found, f, squared, count, length, from, stride);
        }
    }
};

// Of each run of the items, from left to right; many run side by side.
template <typename Terms>
void sum(const Terms& terms, const VALUE* x, const Grid& grid, int64_t first, int64_t last) {
    if (grid.inner == 1) {
        const int64_t length = std::min(grid.block, grid.axis), together = batch(grid);
        std::vector<float> columns(together * length);
        for (int64_t b = first; b < last; b += together) {
            const int64_t count = std::min(together, last - b);
            to_columns(x, columns.data(), grid, b, count);
            terms(b, count, length, columns.data(), count);
        }
        return;
    }
    for (int64_t s = first; s < last; s++) {
        const Strip strip = grid.strip(s);
        terms(strip.scale, strip.width, strip.length, x + strip.base, grid.inner);
    }
}

// What `measure` adds up, a tile at a time: values are gathered as floats, then summed by loops that may be reordered.
struct Sums {
    static constexpr int64_t TILE = 1024;
    const double left;
    float a[TILE], b[TILE], limit[TILE];
    int64_t filled = 0;
    double total[11] = {};

    // The largest float x for which x · left is not beyond `most`.
    float limit_of(double most) const {
        float x = static_cast<float>(left == 1 ? most : most / left);  // a division takes as long as several values
        if (left == 1) return x > most ? from_bits(to_bits(x) - 1) : x;
        x = x * left > most ? from_bits(to_bits(x) - 1) : x;
        const float next = from_bits(to_bits(x) + 1);
        return next * left <= most ? next : x;
    }

    // fill(limits, i, n): of the values from i on, the magnitudes beyond which they are saturated.
    template <typename Fill>
    void add(const VALUE* x, const VALUE* y, int64_t length, Fill fill) {
        for (int64_t at = 0; at < length;) {
            const int64_t n = std::min(length - at, TILE - filled);
            for (int64_t i = 0; i < n; i++) a[filled + i] = load(x + at + i);
            for (int64_t i = 0; i < n; i++) b[filled + i] = load(y + at + i);
            fill(limit + filled, at, n);
            at += n;
            filled += n;
            if (filled == TILE) finish();
        }
    }

    // All have the same limit.
    void add(const VALUE* x, const VALUE* y, int64_t length, double most) {
        add(x, y, length, [one = limit_of(most)](float* into, int64_t, int64_t n) { std::fill(into, into + n, one); });
    }

    void finish() {
        add_errors();
        filled = 0;
    }

    void add_errors() {
        const int32_t n = static_cast<int32_t>(filled);
        int32_t largest = 0, finite = n, nonzero = 0, flushed = 0, saturated = 0;
        for (int32_t i = 0; i < n; i++) largest = std::max(largest, magnitude_of(a[i]));
        if (largest >= 0x7F800000)
            for (int32_t i = 0; i < n; i++) {
                const bool ok = magnitude_of(a[i]) < 0x7F800000;
                a[i] = ok ? a[i] : 0.0f;
                b[i] = ok ? b[i] : 0.0f;
                finite -= !ok;
            }
#pragma omp simd reduction(+ : nonzero, flushed, saturated)
        for (int32_t i = 0; i < n; i++) {
            nonzero += a[i] != 0;
            flushed += (a[i] != 0) & (b[i] == 0);
            saturated += to_float(magnitude_of(a[i])) > limit[i];
        }
        double xx = 0, qq = 0, xq = 0, ee = 0, peak = 0, lost = 0, cut = 0;
#pragma omp simd reduction(+ : xx, qq, xq, ee, lost, cut) reduction(max : peak)
        for (int32_t i = 0; i < n; i++) {
            const double x = a[i], q = b[i], e = q - x, size = std::fabs(e), square = e * e;
            const bool zero = q == 0, clipped = to_float(magnitude_of(a[i])) > limit[i];
            xx += x * x;
            qq += q * q;
            xq += x * q;
            ee += square;
            lost += zero ? square : 0;  // 0 where x is 0
            cut += clipped & !zero ? square : 0;
            peak = size > peak ? size : peak;
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
        total[9] += lost;
        total[10] += cut;
    }
};

// log2 of a normal number within 2e-7 of itself, by the series of artanh; other numbers are far outside all bins. libm's
// log2 would take a call for each value.
inline float log2_of(float x) {
    const int32_t bits = to_bits(x) - 0x3F3504F3;  // of sqrt(1/2)
    const float m = from_bits((bits & 0x7FFFFF) + 0x3F3504F3), s = (m - 1.0f) / (m + 1.0f), t = s * s;
    const float series = 1.0f + t * (1.0f / 3 + t * (1.0f / 5 + t * (1.0f / 7 + t * (1.0f / 9))));
    return static_cast<float>(bits >> 23) + 2.8853900817779268f * s * series;  // 2 / ln 2
}

// A power of two that brings a run's largest magnitude near 1, so that no sum of squares underflows or overflows.
inline float toward_one(float peak) {
    return pow2(std::min(127, std::max(-126, 127 - (to_bits(peak) >> 23))));
}

// Counts runs by the bins of their scale exponent, SQNR and crest factor, see block_histograms.py.
struct Histograms {
    const Bins* bins;
    double* counts;  // of each measure's bins, one measure's after the other's
    float signal[STRIP], noise[STRIP], most[STRIP], lengths[STRIP];

    // `runs` runs, whose sums are above.
    void count(const float* scales, int64_t runs) const {
        constexpr float DECIBEL = 3.010299956639812f;  // 10 · log10(2)
        float values[3][STRIP];
        for (int64_t n = 0; n < runs; n++) {
            const bool used = (signal[n] > 0) & (signal[n] <= FLOAT32_MAX) & (noise[n] <= FLOAT32_MAX);
            const bool scaled = used & (scales[n] > 0) & (scales[n] <= FLOAT32_MAX), tiny = scales[n] < 0x1p-126f;
            const int32_t exponent = (to_bits(tiny ? scales[n] * 0x1p24f : scales[n]) >> 23) - 127 - (tiny ? 24 : 0);
            values[0][n] = scaled ? static_cast<float>(exponent) : NAN;
            values[1][n] = used ? DECIBEL * log2_of(signal[n] / noise[n]) : NAN;
            values[2][n] = used ? DECIBEL * log2_of(most[n] * most[n] * lengths[n] / signal[n]) : NAN;
        }
        double* into = counts;
        for (int which = 0; which < 3; which++) {
            const float low = bins->low[which], last = bins->high[which] - 1, width = bins->width[which];
            int32_t bin[STRIP];
            for (int64_t n = 0; n < runs; n++)
                bin[n] = static_cast<int32_t>(std::min(last, std::max(low, std::floor(values[which][n] / width))) - low);
            for (int64_t n = 0; n < runs; n++) into[bin[n]] += values[which][n] == values[which][n];
            into += bins->high[which] - bins->low[which];
        }
    }

    // Blocks [first, last) of rows, inner = 1; y holds what x + origin became.
    void rows(const Grid& grid, const VALUE* x, const VALUE* y, int64_t origin, const float* scales, int64_t first,
              int64_t last) {
        for (int64_t b = first; b < last; b += STRIP) {
            const int64_t together = std::min(last - b, STRIP);
            for (int64_t n = 0; n < together; n++) {
                const int64_t at = grid.at(b + n), length = grid.length(b + n);
                float xx = 0, ee = 0, peak = 0;
#pragma omp simd reduction(max : peak)
                for (int64_t i = 0; i < length; i++) {
                    const float size = from_bits(magnitude_of(load(x + at + i)));
                    peak = size > peak ? size : peak;
                }
                const float factor = toward_one(peak);
#pragma omp simd reduction(+ : xx, ee)
                for (int64_t i = 0; i < length; i++) {
                    const float value = load(x + at + i), error = (load(y + (at - origin) + i) - value) * factor;
                    xx += (value * factor) * (value * factor);
                    ee += error * error;
                }
                signal[n] = xx, noise[n] = ee, most[n] = peak * factor, lengths[n] = length;
            }
            count(scales + b, together);
        }
    }

    // One strip; packed is as in Quantizer.
    void strip(const Grid& grid, const VALUE* x, const VALUE* y, bool packed, const float* scales, int64_t s) {
        const Strip strip = grid.strip(s);
        for (int64_t j = 0; j < strip.width; j++) signal[j] = noise[j] = most[j] = 0, lengths[j] = strip.length;
        for (int64_t i = 0; i < strip.length; i++) {
            const VALUE* from = x + strip.base + i * grid.inner;
            for (int64_t j = 0; j < strip.width; j++) {
                const float size = from_bits(magnitude_of(load(from + j)));
                most[j] = size > most[j] ? size : most[j];
            }
        }
        float factors[STRIP];
        for (int64_t j = 0; j < strip.width; j++) factors[j] = toward_one(most[j]);
        for (int64_t i = 0; i < strip.length; i++) {
            const int64_t at = strip.base + i * grid.inner;
            const VALUE *from = x + at, *to = packed ? y + i * STRIP : y + at;
            for (int64_t j = 0; j < strip.width; j++) {
                const float value = load(from + j) * factors[j], error = (load(to + j) - load(from + j)) * factors[j];
                signal[j] += value * value;
                noise[j] += error * error;
            }
        }
        for (int64_t j = 0; j < strip.width; j++) most[j] *= factors[j];
        count(scales + strip.scale, strip.width);
    }
};

// Adds up blocks [first, last) of rows, inner = 1, which follow each other; y holds what x + origin became.
void measure_rows(Sums& sums, const Grid& grid, const VALUE* x, const VALUE* y, int64_t origin, const float* scales,
                  const double* right, int64_t each, int64_t first, int64_t last) {
    if (first == last) return;
    const int64_t at = grid.at(first), end = grid.at(last - 1) + grid.length(last - 1);
    int64_t b = first - 1, here = 0;  // values that are left of block b
    float limit = 0;
    sums.add(x + at, y + (at - origin), end - at, [&](float* into, int64_t, int64_t n) {
        for (int64_t i = 0; i < n;) {
            if (!here) {
                here = grid.length(++b);
                limit = sums.limit_of(scales[b] > 0 ? scales[b] * right[b * each] : HUGE_VAL);
            }
            const int64_t count = std::min(here, n - i);
            std::fill(into + i, into + i + count, limit);
            i += count;
            here -= count;
        }
    });
}

// Adds up one strip; packed is as in Quantizer.
void measure_strip(Sums& sums, const Grid& grid, const VALUE* x, const VALUE* y, bool packed, const float* scales,
                   const double* right, int64_t each, int64_t s) {
    const Strip strip = grid.strip(s);
    float limits[STRIP];
    for (int64_t j = 0; j < strip.width; j++) {
        const float scale = scales[strip.scale + j];
        limits[j] = sums.limit_of(scale > 0 ? scale * right[(strip.scale + j) * each] : HUGE_VAL);
    }
    for (int64_t i = 0; i < strip.length; i++) {
        const int64_t at = strip.base + i * grid.inner;
        sums.add(x + at, packed ? y + i * STRIP : y + at, strip.width,
                 [&](float* into, int64_t j, int64_t n) { std::copy(limits + j, limits + j + n, into); });
    }
}

}  // namespace

// Work items [first, last): values where a tensor shares its factors (block = 0), blocks where inner = 1, strips otherwise.
// `given` is null for the rules that find the scale, which then need absmax, the largest magnitude of the tensor (step 0), or
// of what is above each run (step 1): NVFP4.
extern "C" void quantize(const Format* format, const Factors* given, const VALUE* x, VALUE* y, float* scales, int64_t axis,
                         int64_t inner, int64_t block, const float* absmax, int64_t step, uint32_t seed, int64_t first,
                         int64_t last) {
    const Quantizer q(*format, given, x, y, scales, {axis, inner, block}, absmax, step, seed, false);
    if (!block)
        q.flat(first, last);
    else if (inner == 1)
        q.rows(first, last);
    else
        q.strips(first, last);
}

// The largest magnitude of each run of the items, NaN if any is NaN.
extern "C" void largest(const VALUE* x, float* out, int64_t axis, int64_t inner, int64_t block, int64_t first,
                        int64_t last) {
    const Grid grid{axis, inner, block};
    if (inner == 1) {
        largest_of_rows(x, out + first, grid, first, last);
        return;
    }
    for (int64_t s = first; s < last; s++) {
        const Strip strip = grid.strip(s);
        largest_of_strip(x, out + strip.scale, grid, strip);
    }
}

// For each run of the items, the float64 sums from left to right of its values and of their squares.
extern "C" void moments(const VALUE* x, double* total, double* squares, int64_t axis, int64_t inner, int64_t block,
                        int64_t first, int64_t last) {
    sum(Moments{total, squares}, x, {axis, inner, block}, first, last);
}

// For each of `tried` factors and each run of the items, the float32 sum from left to right of its errors, or their squares,
// when rounded to nearest. `runs`: how many the tensor has.
extern "C" void run_errors(const Format* format, const Factors* given, int64_t tried, const VALUE* x, float* out,
                           int64_t runs, int64_t axis, int64_t inner, int64_t block, int32_t squared, int64_t first,
                           int64_t last) {
    sum(Errors{*format, given, tried, runs, squared != 0, out}, x, {axis, inner, block}, first, last);
}

// The error of y against x over the same work items: those of ScoreNumber. A value saturates where |x| · left > scale · right, where right
// is one number (each = 0) or one for each run (1); scales are null without blocks.
// With bins, the counts of the blocks' measures follow in `out`.
extern "C" void measure(const VALUE* x, const VALUE* y, const float* scales, int64_t axis,
                        int64_t inner, int64_t block, double left, const double* right, int64_t each, const Bins* bins, int64_t first,
                        int64_t last, double* out) {
    const Grid grid{axis, inner, block};
    Sums sums{left};
    Histograms blocks{bins, out + 11};
    if (!scales)
        sums.add(x + first, y + first, last - first, *right);
    else if (inner == 1) {
        measure_rows(sums, grid, x, y, 0, scales, right, each, first, last);
        if (bins) blocks.rows(grid, x, y, 0, scales, first, last);
    } else
        for (int64_t strip = first; strip < last; strip++) {
            measure_strip(sums, grid, x, y, false, scales, right, each, strip);
            if (bins) blocks.strip(grid, x, y, false, scales, strip);
        }
    sums.finish();
    std::memcpy(out, sums.total, sizeof sums.total);
}

// quantize and measure together, a cacheful at a time. `scales` holds those of all blocks if factors are given, else has
// room for them; null without blocks.
extern "C" void score(const Format* format, const Factors* given, const VALUE* x, float* scales,
                      int64_t axis, int64_t inner, int64_t block, const float* absmax, int64_t step, uint32_t seed,
                      double left, const double* right, int64_t each, const Bins* bins, int64_t first, int64_t last, double* out) {
    constexpr int64_t VALUES = 4096;
    const Grid grid{axis, inner, block};
    Sums sums{left};
    Histograms blocks{bins, out + 11};
    std::vector<VALUE> kept;
    Quantizer q(*format, given, x, nullptr, scales, grid, absmax, step, seed, true);
    if (!scales) {
        kept.resize(VALUES);
        for (int64_t at = first; at < last; at += VALUES) {
            const int64_t n = std::min(last - at, VALUES);
            q.y = kept.data() - at;
            q.flat(at, at + n);
            sums.add(x + at, kept.data(), n, *right);
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
            measure_rows(sums, grid, x, kept.data(), origin, scales, right, each, b, end);
            if (bins) blocks.rows(grid, x, kept.data(), origin, scales, b, end);
        }
    } else {
        kept.resize(std::min(block, axis) * STRIP);
        q.y = kept.data();
        for (int64_t strip = first; strip < last; strip++) {
            q.strips(strip, strip + 1);
            measure_strip(sums, grid, x, kept.data(), true, scales, right, each, strip);
            if (bins) blocks.strip(grid, x, kept.data(), true, scales, strip);
        }
    }
    sums.finish();
    std::memcpy(out, sums.total, sizeof sums.total);
}
