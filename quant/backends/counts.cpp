// How often each of 65,536 codes occurs: the compiled twin of what counts.py does with torch.bincount.
//
// Each thread counts in two tables in turn, so that a run of one code does not wait for its own last addition.

#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t CODES = 1 << 16;

void count_part(const uint16_t* x, int64_t n, int64_t stride, uint32_t* even, uint32_t* odd) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const uint16_t a = x[i * stride], b = x[(i + 1) * stride], c = x[(i + 2) * stride], d = x[(i + 3) * stride];
        even[a]++;
        odd[b]++;
        even[c]++;
        odd[d]++;
    }
    for (; i < n; i++) even[x[i * stride]]++;
}

}  // namespace

// Counts x[0], x[stride], ..., n of them, n < 2^32. The codes that occur go to `codes`, ascending, and their counts to
// `counts`; both have room for 65,536. Returns how many occur.
extern "C" int64_t distinct(const uint16_t* x, int64_t n, int64_t stride, int64_t threads, uint16_t* codes,
                            int64_t* counts) {
    thread_local std::vector<uint32_t> tables;  // zero between calls
    const int64_t rows = 2 * threads;
    if (static_cast<int64_t>(tables.size()) < rows * CODES) tables.resize(rows * CODES);
    uint32_t* table = tables.data();
    std::vector<std::thread> others;
    for (int64_t t = 0; t < threads; t++) {
        const int64_t first = n * t / threads, last = n * (t + 1) / threads;
        const uint16_t* from = x + first * stride;
        uint32_t* own = table + 2 * t * CODES;
        if (t + 1 < threads)
            others.emplace_back(count_part, from, last - first, stride, own, own + CODES);
        else
            count_part(from, last - first, stride, own, own + CODES);
    }
    for (auto& other : others) other.join();
    for (int64_t row = 1; row < rows; row++) {
        uint32_t* more = table + row * CODES;
        for (int64_t code = 0; code < CODES; code++) table[code] += more[code];
        for (int64_t code = 0; code < CODES; code++) more[code] = 0;
    }
    int64_t used = 0;
    for (int64_t code = 0; code < CODES; code++) {
        if (!table[code]) continue;
        codes[used] = static_cast<uint16_t>(code);
        counts[used++] = table[code];
        table[code] = 0;
    }
    return used;
}
