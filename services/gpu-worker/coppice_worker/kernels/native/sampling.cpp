// Draws tokens on a CPU, by the rules of torch_sampling.py: cuts by value, then the running sum in token order. Nothing is
// sorted but the few logits around a cut. A nucleus that is wide, because the logits are flat, is found by a histogram:
//
//     mass of a bin               |      .:|#|:.        |      bins of equal width below the largest logit; the last
//     from the largest down       0 ->     ^ here the share top_p is reached                                takes the rest
//
// Rows are independent of each other, so neither the number of threads nor batch mates change a token.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "vectors.h"

namespace {

constexpr int BINS = 2048;
constexpr float BINS_PER_UNIT = 64;  // so the last bin begins at e^-32 of the largest weight
constexpr float NEAR = -8;           // where a nucleus mostly ends: looked at first
constexpr int64_t CHUNK = 512;       // tokens summed together before the running sum

typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * LANES)));

inline Floats load(const float* at) {
    Floats values;
    std::memcpy(&values, at, sizeof values);
    return values;
}

inline Floats load(const uint16_t* at) {
    Halves narrow;
    std::memcpy(&narrow, at, sizeof narrow);
    return (Floats)(__builtin_convertvector(narrow, Words) << 16);
}

inline void store(float* at, Floats values) { std::memcpy(at, &values, sizeof values); }

// What one thread needs for a row; whole vectors, filled up with logits of no weight.
struct Row {
    std::vector<float> scaled, weights;  // logits over temperature, below the largest; e^scaled
    std::vector<float> around;           // scaled logits that are looked at one by one
    std::vector<double> running;
    double mass[BINS];
};

inline int bin_of(float scaled) {
    float bin = -scaled * BINS_PER_UNIT;
    return bin < BINS - 1 ? (int)bin : BINS - 1;  // NaN goes last
}

template <class Element>
void scale(const Element* logits, int64_t vocab, float temperature, Row& row) {
    int64_t whole = vocab / LANES * LANES, padded = (vocab + CHUNK - 1) / CHUNK * CHUNK;
    row.scaled.resize(padded);
    row.weights.resize(padded);
    Element rest[LANES] = {};
    std::memcpy(rest, logits + whole, sizeof(Element) * (vocab - whole));
    auto part = [&](int64_t at) { return at < whole ? load(logits + at) : load(rest); };
    Floats most = spread(-INFINITY);
    for (int64_t at = 0; at < whole; at += LANES) most = larger(most, part(at));
    float top = largest(most);
    for (int64_t i = 0; i < vocab - whole; ++i) top = std::max(top, load(rest)[i]);
    for (int64_t at = 0; at < vocab; at += LANES) store(&row.scaled[at], (part(at) - top) / temperature);
    std::fill(row.scaled.begin() + vocab, row.scaled.end(), -INFINITY);
    for (int64_t at = 0; at < padded; at += LANES) store(&row.weights[at], exponential(load(&row.scaled[at])));
}

// Of the weights of what is at least `lowest`, chunk by chunk in token order.
const std::vector<double>& running_sums(Row& row, float lowest) {
    double total = 0;
    row.running.clear();
    for (int64_t chunk = 0; chunk < (int64_t)row.scaled.size(); chunk += CHUNK) {
        Doubles sums = {};
        for (int64_t at = chunk; at < chunk + CHUNK; at += LANES) {
            Words is_kept = (Words)(load(&row.scaled[at]) >= lowest);
            sums += __builtin_convertvector((Floats)((Words)load(&row.weights[at]) & is_kept), Doubles);
        }
        for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
        row.running.push_back(total);
    }
    return row.running;
}

// Scaled logits of at least `lowest`, in no order. Mostly few: whole vectors are passed over at once.
template <class Take>
void for_each_above(const Row& row, const float& lowest, Take take) {
    for (int64_t at = 0; at < (int64_t)row.scaled.size(); at += LANES) {
        Floats scaled = load(&row.scaled[at]);
        if (largest(scaled) < lowest) continue;
        for (int lane = 0; lane < LANES; ++lane)
            if (scaled[lane] >= lowest) take(at + lane);
    }
}

// The k-th largest: of what is at least the k-th largest so far, twice k are kept, then half of them again.
float kth_largest(Row& row, int64_t k) {
    float lowest = -INFINITY;
    size_t room = std::max<int64_t>(2 * k, 256);
    std::vector<float>& best = row.around;
    auto halve = [&] {
        std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
        best.resize(k);
        lowest = best[k - 1];
    };
    best.clear();
    for_each_above(row, lowest, [&](int64_t i) {
        best.push_back(row.scaled[i]);
        if (best.size() == room) halve();
    });
    if ((int64_t)best.size() >= k) halve();
    return lowest;
}

// The first of `around`, from the largest down, with which `mass` reaches `wanted`; -infinity if none does.
float reaching(Row& row, double mass, double wanted) {
    std::sort(row.around.begin(), row.around.end(), std::greater<float>());
    for (float scaled : row.around) {
        mass += exponential(spread(scaled))[0];
        if (mass >= wanted) return scaled;
    }
    return -INFINITY;
}

// The last of those that are kept: with it the mass of what is at least `lowest` first reaches the share.
float nucleus(Row& row, float lowest, double share) {
    double mass = 0;
    double wanted = share * running_sums(row, lowest).back();
    float near = std::max(lowest, NEAR);
    row.around.clear();
    for_each_above(row, near, [&](int64_t i) {
        row.around.push_back(row.scaled[i]);
        mass += row.weights[i];
    });
    if (mass >= wanted || near == lowest) return std::max(lowest, reaching(row, 0, wanted));
    std::fill(row.mass, row.mass + BINS, 0.0);
    for_each_above(row, lowest, [&](int64_t i) { row.mass[bin_of(row.scaled[i])] += row.weights[i]; });
    mass = 0;
    int bin = 0;
    while (bin < BINS - 1 && mass + row.mass[bin] < wanted) mass += row.mass[bin++];
    row.around.clear();
    for_each_above(row, lowest, [&](int64_t i) {
        if (bin_of(row.scaled[i]) == bin) row.around.push_back(row.scaled[i]);
    });
    return std::max(lowest, reaching(row, mass, wanted));
}

// The first token whose running sum passes noise * total.
int64_t draw(Row& row, int64_t vocab, float cutoff, double noise) {
    const std::vector<double>& running = running_sums(row, cutoff);
    double target = noise * running.back();
    int64_t chunk = std::upper_bound(running.begin(), running.end() - 1, target) - running.begin();
    double sum = chunk ? running[chunk - 1] : 0;
    // Rounding may push the target past the chunk's sum: then its last token with any weight is meant.
    int64_t last = chunk * CHUNK;
    for (int64_t i = chunk * CHUNK; i < std::min((chunk + 1) * CHUNK, vocab); ++i) {
        float weight = row.scaled[i] >= cutoff ? row.weights[i] : 0;
        sum += weight;
        if (weight > 0) last = i;
        if (sum > target) return i;
    }
    return last;
}

}  // namespace

// Rows that are drawn get their token; those of temperature 0 keep what stands there.
//
//     logits   [rows, vocab] float32, or bfloat16 if `narrow`
//     choices  [rows, 5] temperature, logarithm of min_p, top_k, top_p, noise: core/choices.py
//     tokens   [rows]
extern "C" void draw_tokens(const void* logits, const double* choices, int64_t* tokens, int64_t rows, int64_t vocab,
                            int64_t narrow, int threads) {
#pragma omp parallel num_threads(threads) if (rows > 1)
    {
        Row row;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < rows; ++i) {
            const double* choice = choices + i * 5;
            if (!(choice[0] > 0)) continue;
            if (narrow)
                scale((const uint16_t*)logits + i * vocab, vocab, (float)choice[0], row);
            else
                scale((const float*)logits + i * vocab, vocab, (float)choice[0], row);
            float cutoff = (float)choice[1];
            if (choice[2] > 0 && choice[2] < vocab) cutoff = std::max(cutoff, kth_largest(row, (int64_t)choice[2]));
            if (choice[3] < 1) cutoff = nucleus(row, cutoff, choice[3]);
            tokens[i] = draw(row, vocab, cutoff, choice[4]);
        }
    }
}
