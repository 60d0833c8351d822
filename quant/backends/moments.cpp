// The statistics of `summary` except the sketch: sums of powers, extremes and counts, in one pass over it. Compiled once
// for each VALUE, a macro: float, or uint16_t for bfloat16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace {

constexpr int32_t TILE = 2048;
constexpr uint32_t INFINITE = 0x7F800000;

inline float load(const float* p) { return *p; }

inline float to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float load(const uint16_t* p) { return to_float(static_cast<uint32_t>(*p) << 16); }

inline uint32_t magnitude_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7FFFFFFF;
}

// Up to TILE values as floats, without those that are not finite.
struct Tile {
    float values[TILE];
    int32_t size, nans = 0, infs = 0;

    Tile(const VALUE* x, int64_t length) : size(static_cast<int32_t>(std::min<int64_t>(length, TILE))) {
        uint32_t most = 0;
        for (int32_t i = 0; i < size; i++) {
            values[i] = load(x + i);
            most = std::max(most, magnitude_of(values[i]));
        }
        if (most < INFINITE) return;
        int32_t kept = 0;
        for (int32_t i = 0; i < size; i++) {
            nans += magnitude_of(values[i]) > INFINITE;
            infs += magnitude_of(values[i]) == INFINITE;
            if (magnitude_of(values[i]) < INFINITE) values[kept++] = values[i];
        }
        size = kept;
    }
};

// A value near the mean, so that the sums do not cancel: the mean of the first values.
float near_mean(const VALUE* x, int64_t size) {
    const Tile tile(x, std::min<int64_t>(size, 256));
    double total = 0;
    for (int32_t i = 0; i < tile.size; i++) total += tile.values[i];
    return tile.size ? static_cast<float>(total / tile.size) : 0.0f;
}

}  // namespace

// Of values [first, last) of x: the sums of (value - shift)^k for k = 1 to 4, the smallest and largest value and the smallest
// nonzero magnitude, all of finite values (infinite without any), then how many values are 0, NaN and infinite, and the
// shift, which is the same for all parts of x.
extern "C" void moments(const VALUE* x, int64_t size, int64_t first, int64_t last, double* out) {
    const float shift = near_mean(x, size);
    double s1 = 0, s2 = 0, s3 = 0, s4 = 0;
    float low = HUGE_VALF, high = -HUGE_VALF;
    uint32_t below = INFINITE - 1;  // the smallest nonzero magnitude less 1, which makes 0 the largest
    int64_t zeros = 0, nans = 0, infs = 0;
    for (int64_t at = first; at < last; at += TILE) {
        const Tile tile(x + at, last - at);
        int32_t zero = 0;
#pragma omp simd reduction(+ : zero) reduction(min : low, below) reduction(max : high)
        for (int32_t i = 0; i < tile.size; i++) {
            const float value = tile.values[i];
            const uint32_t magnitude = magnitude_of(value), less = magnitude - 1;
            zero += magnitude == 0;
            low = value < low ? value : low;
            high = value > high ? value : high;
            below = less < below ? less : below;
        }
#pragma omp simd reduction(+ : s1, s2, s3, s4)
        for (int32_t i = 0; i < tile.size; i++) {
            const double d = static_cast<double>(tile.values[i]) - shift, square = d * d;
            s1 += d;
            s2 += square;
            s3 += square * d;
            s4 += square * square;
        }
        zeros += zero;
        nans += tile.nans;
        infs += tile.infs;
    }
    const double sums[] = {s1, s2, s3, s4, low, high, to_float(below + 1)};
    std::copy(std::begin(sums), std::end(sums), out);
    const int64_t counts[] = {zeros, nans, infs};
    std::copy(std::begin(counts), std::end(counts), out + 7);
    out[10] = shift;
}
