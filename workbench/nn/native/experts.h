// Gated feed-forward experts: down(activation(gate x, up x)) of each token and each expert it visits, or their weighted
// sum.

#pragma once

#include "matrices.h"

namespace {

struct Activation {
  int kind;  // 0 situ, 1 silu, 2 swiglu_oai; see nn/activation.py
  float beta, linear_beta, alpha, limit;  // limit: infinity where there is none

  void operator()(const float* gate, const float* up, float* out, long num) const {
    long i = 0;
    for (; i + LANES <= num; i += LANES) store(out + i, of(load(gate + i), load(up + i)));
    if (i < num) {
      float g[LANES] = {}, u[LANES] = {}, y[LANES];
      std::copy(gate + i, gate + num, g);
      std::copy(up + i, up + num, u);
      store(y, of(load(g), load(u)));
      std::copy(y, y + num - i, out + i);
    }
  }

  vf of(vf g, vf u) const {
    g = g > all(limit) ? all(limit) : g;
    u = u > all(limit) ? all(limit) : u;
    u = u < all(-limit) ? all(-limit) : u;
    if (kind == 1) return g / (exponential(-g) + 1.0f) * u;
    if (kind == 2) return g / (exponential(g * -alpha) + 1.0f) * (u + 1.0f);
    const vf sigmoid = 1.0f / (exponential(-g) + 1.0f);
    float a[LANES], c[LANES];
    for (int i = 0; i < LANES; i++) {
      a[i] = std::tanh(g[i] / beta);
      c[i] = std::tanh(u[i] / linear_beta);
    }
    return load(a) * sigmoid * load(c) * (beta * linear_beta);
  }
};

template <class T>
Dense<T> matrix_of(const Dense<T>& first, long expert, long rows, long columns) {
  return {first.values + expert * rows * columns, columns};
}

inline Packed4 matrix_of(const Packed4& first, long expert, long rows, long columns) {
  const long groups = (columns + BLOCK - 1) / BLOCK;
  return {first.codes + expert * rows * (columns / 2), first.scales + expert * rows * groups, columns};
}

struct Hit {
  long expert, first, count;  // of the pairs, ordered by expert
};

constexpr long COLUMNS_OF_ITEM = 512;  // of a token's sum over experts

// Where results are summed, a token's are added in the order of its slots, each rounded to T and taken by its weight
// (1 without weights).
struct Sums {
  bool are_wanted;
  const float* weights;  // (num_tokens, top_k)
};

// y: (num_tokens, top_k, latent) of T, or the sums, (num_tokens, latent) in float32.
template <class T, class W>
void experts(const void* x, long num_tokens, long top_k, bool is_per_pair, const int64_t* slots, const W& w1,
             const W& w2, const W& w3, const void* b1, const void* b2, const void* b3, long num_experts, long width,
             long latent, const Activation& activation, const Sums& sums, void* y, int threads) {
  using Value = typename T::Value;
  static thread_local WideRows wide;
  static thread_local std::vector<long> counts, order;
  static thread_local std::vector<Hit> found;
  static thread_local std::vector<float> inner_values, result_values;
  static thread_local std::vector<const float*> in_rows, inner_rows;

  const long pairs = num_tokens * top_k, inner_width = padded(width);
  wide.fill<T>((const Value*)x, is_per_pair ? pairs : num_tokens, latent, latent);
  counts.assign(num_experts + 1, 0);
  for (long p = 0; p < pairs; p++)
    if (slots[p] >= 0) counts[slots[p] + 1]++;
  found.clear();
  for (long e = 0; e < num_experts; e++) {
    if (counts[e + 1]) found.push_back({e, counts[e], counts[e + 1]});
    counts[e + 1] += counts[e];
  }
  order.resize(pairs);
  in_rows.resize(pairs);
  inner_rows.resize(pairs);
  inner_values.assign(pairs * inner_width, 0.0f);
  for (long p = 0; p < pairs; p++) {
    if (slots[p] < 0) continue;
    const long place = counts[slots[p]]++;
    order[place] = p;
    in_rows[place] = wide.rows[is_per_pair ? p : p / top_k];
    inner_rows[place] = inner_values.data() + place * inner_width;
  }
  auto* out = (Value*)y;
  if (sums.are_wanted) result_values.resize(pairs * latent);
  for (long p = 0; !sums.are_wanted && p < pairs; p++)
    if (slots[p] < 0) std::memset((void*)(out + p * latent), 0, latent * sizeof(Value));

  const long num_found = long(found.size()), up_items = items_of(width), down_items = items_of(latent);
  if (pairs * width * latent < LEAST_WORK) threads = 1;
  // Names of their own: a thread-local variable would be another one in each thread of the team.
  const Hit* hits = found.data();
  const float* const* in = in_rows.data();
  const float* const* inner = inner_rows.data();
  float* inner_base = inner_values.data();
  float* results = result_values.data();
  const long* pair_of = order.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> both;
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < num_found * up_items; item++) {
      const Hit hit = hits[item / up_items];
      const long first = item % up_items * ROWS_OF_ITEM, last = std::min(width, first + ROWS_OF_ITEM);
      both.assign(2 * hit.count * ROWS_OF_ITEM, 0.0f);
      float* gate = both.data();
      float* up = gate + hit.count * ROWS_OF_ITEM;
      dots(in + hit.first, hit.count, matrix_of(w1, hit.expert, width, latent), latent, first, last, gate, ROWS_OF_ITEM);
      dots(in + hit.first, hit.count, matrix_of(w3, hit.expert, width, latent), latent, first, last, up, ROWS_OF_ITEM);
      const auto round = [=](float* values, const void* bias) {
        for (long m = 0; m < hit.count; m++)
          for (long n = first; n < last; n++) {
            float& value = values[m * ROWS_OF_ITEM + n - first];
            if (bias) value += T::wide(((const Value*)bias)[hit.expert * width + n]);
            value = T::wide(T::narrow(value));
          }
      };
      round(gate, b1);
      round(up, b3);
      for (long m = 0; m < hit.count; m++) {
        float* row = inner_base + (hit.first + m) * inner_width + first;
        activation(gate + m * ROWS_OF_ITEM, up + m * ROWS_OF_ITEM, row, last - first);
        for (long n = 0; n < last - first; n++) row[n] = T::wide(T::narrow(row[n]));
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < num_found * down_items; item++) {
      const Hit hit = hits[item / down_items];
      const long first = item % down_items * ROWS_OF_ITEM, last = std::min(latent, first + ROWS_OF_ITEM);
      both.assign(hit.count * ROWS_OF_ITEM, 0.0f);
      dots(inner + hit.first, hit.count, matrix_of(w2, hit.expert, latent, width), width, first, last, both.data(),
           ROWS_OF_ITEM);
      for (long m = 0; m < hit.count; m++)
        for (long n = first; n < last; n++) {
          float value = both[m * ROWS_OF_ITEM + n - first];
          if (b2) value += T::wide(((const Value*)b2)[hit.expert * latent + n]);
          const long place = pair_of[hit.first + m] * latent + n;
          if (sums.are_wanted)
            results[place] = T::wide(T::narrow(value));
          else
            out[place] = T::narrow(value);
        }
    }
    if (sums.are_wanted) {
      const long sum_items = (latent + COLUMNS_OF_ITEM - 1) / COLUMNS_OF_ITEM;
#pragma omp for schedule(static)
      for (long item = 0; item < num_tokens * sum_items; item++) {
        const long t = item / sum_items, first = item % sum_items * COLUMNS_OF_ITEM;
        const long num = std::min(COLUMNS_OF_ITEM, latent - first);
        float* total = (float*)y + t * latent + first;
        std::fill(total, total + num, 0.0f);
        for (long p = t * top_k; p < (t + 1) * top_k; p++) {
          if (slots[p] < 0) continue;
          const float weight = sums.weights ? sums.weights[p] : 1.0f;
          const float* own = results + p * latent + first;
          for (long n = 0; n < num; n++) total[n] += weight * own[n];
        }
      }
    }
  }
}

}  // namespace
