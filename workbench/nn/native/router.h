// Which experts a token visits, and with which weights: logits, scores, choice and weights of nn/router.py in float32.
//
// A token's choice depends on its own row alone. Of equal scores the lower expert goes first, and what is no number
// goes before all numbers, so that even then K different experts are named.

#pragma once

#include <numeric>

#include "matrices.h"

namespace {

struct Routing {
  int scoring;  // 0 sigmoid, 1 softmax, 2 softmax over the chosen alone
  bool is_renormalised;
  float scale;
  const float* correction;  // of the choice, by expert; null: none
};

// exp of a row with minus infinity behind it, up to a whole block, over its sum.
inline void softmax(float* row, long num) {
  float largest = row[0];
  for (long i = 1; i < num; i++) largest = std::max(largest, row[i]);
  vf total = {};
  for (long i = 0; i < padded(num); i += LANES) {
    const vf each = exponential(load(row + i) - largest);
    store(row + i, each);
    total += each;
  }
  const float whole = sum(total);
  for (long i = 0; i < num; i++) row[i] /= whole;
}

// `scores` (whole blocks) come in as logits; `choice` and `order` have room for all experts, `weights` for whole blocks.
inline void choose(float* scores, float* choice, int64_t* order, float* weights, long num_experts, long top_k,
                   const Routing& routing) {
  if (routing.scoring == 0)
    for (long e = 0; e < num_experts; e += LANES) store(scores + e, 1.0f / (exponential(-load(scores + e)) + 1.0f));
  if (routing.scoring == 1) softmax(scores, num_experts);
  for (long e = 0; e < num_experts; e++) choice[e] = routing.correction ? scores[e] + routing.correction[e] : scores[e];
  std::iota(order, order + num_experts, 0);
  const auto goes_before = [=](int64_t a, int64_t b) {
    const bool is_a_none = std::isnan(choice[a]), is_b_none = std::isnan(choice[b]);
    if (is_a_none != is_b_none) return is_a_none;
    return choice[a] > choice[b] || (!(choice[a] < choice[b]) && a < b);
  };
  if (top_k < num_experts) std::nth_element(order, order + top_k, order + num_experts, goes_before);
  std::sort(order, order + top_k);
  float total = 0.0f;
  for (long k = 0; k < top_k; k++) total += weights[k] = scores[order[k]];
  if (routing.scoring == 2) {
    std::fill(weights + top_k, weights + padded(top_k), -std::numeric_limits<float>::infinity());
    softmax(weights, top_k);
  } else if (routing.is_renormalised) {
    for (long k = 0; k < top_k; k++) weights[k] /= total + 1e-20f;
  }
  for (long k = 0; k < top_k; k++) weights[k] *= routing.scale;
}

// (tokens, columns), the matrix and, where there is one, the bias of the logits -> ids, ascending, and weights, both
// (tokens, top_k).
template <class T>
void route(const void* x, const void* matrix, const void* bias, const Routing& routing, int64_t* ids, float* weights,
           long num_tokens, long num_experts, long columns, long top_k, int threads) {
  using Value = typename T::Value;
  const Dense<T> w{(const Value*)matrix, columns};
  const long room = padded(num_experts), wide = padded(columns);
  const long runs = (num_tokens + ROWS_OF_PASS - 1) / ROWS_OF_PASS, items = items_of(num_experts);
  std::vector<float> logit_values(num_tokens * room, -std::numeric_limits<float>::infinity());
  std::vector<float> row_values(num_tokens * wide);
  float* logits = logit_values.data();
  float* rows = row_values.data();
  if (num_tokens * num_experts * columns < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (long t = 0; t < num_tokens; t++) widen<T>((const Value*)x + t * columns, columns, rows + t * wide);
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < runs * items; item++) {
      const long first_row = item / items * ROWS_OF_PASS, num = std::min(ROWS_OF_PASS, num_tokens - first_row);
      const long first = item % items * ROWS_OF_ITEM, last = std::min(num_experts, first + ROWS_OF_ITEM);
      const float* own[ROWS_OF_PASS];
      for (long m = 0; m < num; m++) own[m] = rows + (first_row + m) * wide;
      dots(own, num, w, columns, first, last, logits + first_row * room + first, room);
    }
    std::vector<float> choice(num_experts), chosen(padded(top_k));
    std::vector<int64_t> order(num_experts);
#pragma omp for schedule(static)
    for (long t = 0; t < num_tokens; t++) {
      float* scores = logits + t * room;
      for (long e = 0; bias && e < num_experts; e++) scores[e] += T::wide(((const Value*)bias)[e]);
      choose(scores, choice.data(), order.data(), chosen.data(), num_experts, top_k, routing);
      std::copy(order.begin(), order.begin() + top_k, ids + t * top_k);
      std::copy(chosen.begin(), chosen.begin() + top_k, weights + t * top_k);
    }
  }
}

}  // namespace
