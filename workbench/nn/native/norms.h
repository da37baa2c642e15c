// Root-mean-square norms of rows, and heads that are normed and turned by the position of their token.
//
// Rounding is that of nn/norm.py and nn/rotary.py. A row is computed from end to end by one thread, its squares added
// in an order that depends on the number of columns alone.

#pragma once

#include "matrices.h"

namespace {

struct Norm {
  const void* weight;  // null: the row stays as it is
  float eps, offset;   // offset: what the weight's values are differences from
};

// As float32 with zeros behind, up to a whole block.
template <class T>
void widen(const typename T::Value* x, long columns, float* row) {
  long i = 0;
  for (; i + LANES <= columns; i += LANES) store(row + i, T::load(x + i));
  for (; i < columns; i++) row[i] = T::wide(x[i]);
  std::fill(row + columns, row + padded(columns), 0.0f);
}

template <class T>
void narrow(const float* row, long columns, typename T::Value* y) {
  for (long i = 0; i < columns; i++) y[i] = T::narrow(row[i]);
}

template <class T>
void normalise(float* row, long columns, const Norm& norm) {
  vf squares[STEPS] = {};
  for (long i = 0; i < columns; i += BLOCK)
    for (int step = 0; step < STEPS; step++) {
      const vf x = load(row + i + step * LANES);
      squares[step] = fma(x, x, squares[step]);
    }
  for (int step = 1; step < STEPS; step++) squares[0] += squares[step];
  const float scale = 1.0f / std::sqrt(sum(squares[0]) / float(columns) + norm.eps);
  const auto* weight = (const typename T::Value*)norm.weight;
  if (norm.offset != 0.0f)
    for (long i = 0; i < columns; i++) row[i] = T::wide(T::narrow(row[i] * scale * (T::wide(weight[i]) + norm.offset)));
  else
    for (long i = 0; i < columns; i++)
      row[i] = T::wide(T::narrow(T::wide(T::narrow(row[i] * scale)) * T::wide(weight[i])));
}

// y = weight * x / sqrt(mean(x^2) + eps), row by row.
template <class T>
void rms_norm(const void* x, const Norm& norm, void* y, long num, long columns, int threads) {
  using Value = typename T::Value;
  if (num * columns < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> row(padded(columns));
#pragma omp for schedule(static)
    for (long i = 0; i < num; i++) {
      widen<T>((const Value*)x + i * columns, columns, row.data());
      normalise<T>(row.data(), columns, norm);
      narrow<T>(row.data(), columns, (Value*)y + i * columns);
    }
  }
}

struct Heads {
  const void* x;
  void* y;                // (tokens, num, width), side by side
  long num, token, head;  // heads, and values of x from one token, and from one head, to the next
  Norm norm;
};

struct Turn {
  const float *cos, *sin;  // (tokens, pairs)
  long pairs;
  bool is_interleaved;  // column 2i pairs with 2i + 1, otherwise i with i + pairs

  void operator()(float* row, long token) const {
    for (long i = 0; i < pairs; i++) {
      float& a = row[is_interleaved ? 2 * i : i];
      float& b = row[is_interleaved ? 2 * i + 1 : i + pairs];
      const float c = cos[token * pairs + i], s = sin[token * pairs + i];
      const float first = a * c - b * s, second = b * c + a * s;
      a = first;
      b = second;
    }
  }
};

// The heads of all tables, each normed where there is a weight, then turned.
template <class T>
void turn_heads(const Heads* tables, long num_tables, long num_tokens, long width, const Turn& turn, int threads) {
  using Value = typename T::Value;
  long num_heads = 0;
  for (long i = 0; i < num_tables; i++) num_heads += tables[i].num;
  if (num_tokens * num_heads * width < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> row(padded(width));
#pragma omp for schedule(static)
    for (long t = 0; t < num_tokens; t++)
      for (long i = 0; i < num_tables; i++) {
        const Heads& own = tables[i];
        for (long h = 0; h < own.num; h++) {
          widen<T>((const Value*)own.x + t * own.token + h * own.head, width, row.data());
          if (own.norm.weight) normalise<T>(row.data(), width, own.norm);
          turn(row.data(), t);
          narrow<T>(row.data(), width, (Value*)own.y + (t * own.num + h) * width);
        }
      }
  }
}

}  // namespace
