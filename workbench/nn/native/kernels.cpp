// Products of few rows with large matrices, for processors: what one to a few dozen tokens spend their time on.
//
// A matrix is (rows, columns), a row the weights of one output, as the loader leaves it: nothing is packed anew. Each
// result is one dot product of its own, its terms added in an order that depends on nothing but the number of columns,
// so a token's result is the same to the bit whoever else is computed beside it. Sums are float32.
//
//   linear    y = x W^T
//   experts   down(activation(gate x, up x)) of each token and each expert it visits
//   attend    softmax(scale q k^T, sink) v of one new token of each sequence, over exactly the rows it sees
//
// Threads come from the OpenMP runtime that is loaded already (torch's), so no second pool waits beside it.

#include "matrices.h"

namespace {

constexpr long ROWS_OF_ITEM = 48;  // rows of a matrix that one work item takes: a multiple of 3 and 4
constexpr long LEAST_WORK = 1 << 16;  // multiplications below which a second thread costs more than it brings

// Rows of `T` as float32 with zeros behind, and pointers to them.
struct WideRows {
  std::vector<float> values;
  std::vector<const float*> rows;
  template <class T>
  void fill(const typename T::Value* x, long num, long columns, long stride) {
    const long width = padded(columns);
    values.assign(num * width, 0.0f);
    rows.resize(num);
    for (long i = 0; i < num; i++) {
      float* row = values.data() + i * width;
      for (long j = 0; j < columns; j++) row[j] = T::wide(x[i * stride + j]);
      rows[i] = row;
    }
  }
};

inline long items_of(long rows) { return (rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM; }

template <class T, class W>
void linear(const void* x, const W& w, void* y, long num, long rows, long columns, int threads) {
  static thread_local WideRows wide;
  wide.fill<T>((const typename T::Value*)x, num, columns, columns);
  const float* const* in = wide.rows.data();
  auto* out = (typename T::Value*)y;
  const long items = items_of(rows);
  if (num * rows * columns < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> found(num * ROWS_OF_ITEM);
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < items; item++) {
      const long first = item * ROWS_OF_ITEM, last = std::min(rows, first + ROWS_OF_ITEM);
      dots(in, num, w, columns, first, last, found.data(), ROWS_OF_ITEM);
      for (long m = 0; m < num; m++)
        for (long n = first; n < last; n++) out[m * rows + n] = T::narrow(found[m * ROWS_OF_ITEM + n - first]);
    }
  }
}

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

template <class T, class W>
void experts(const void* x, long num_tokens, long top_k, bool is_per_pair, const int64_t* slots, const W& w1,
             const W& w2, const W& w3, const void* b1, const void* b2, const void* b3, long num_experts, long width,
             long latent, const Activation& activation, void* y, int threads) {
  using Value = typename T::Value;
  static thread_local WideRows wide;
  static thread_local std::vector<long> counts, order;
  static thread_local std::vector<Hit> found;
  static thread_local std::vector<float> inner_values;
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
  for (long p = 0; p < pairs; p++)
    if (slots[p] < 0) std::memset((void*)(out + p * latent), 0, latent * sizeof(Value));

  const long num_found = long(found.size()), up_items = items_of(width), down_items = items_of(latent);
  if (pairs * width * latent < LEAST_WORK) threads = 1;
  // Names of their own: a thread-local variable would be another one in each thread of the team.
  const Hit* hits = found.data();
  const float* const* in = in_rows.data();
  const float* const* inner = inner_rows.data();
  float* inner_base = inner_values.data();
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
          out[pair_of[hit.first + m] * latent + n] = T::narrow(value);
        }
    }
  }
}

constexpr long HEADS_OF_ITEM = 8;   // query heads that read the same keys side by side
constexpr long TOKENS_OF_PASS = 64;  // values that stay in the first cache while all heads take them up

// out[h] += sum over tokens of weight[h][t] * value[t], for HR heads and VR vectors of columns.
template <class T, int HR, int VR>
inline void mix(const float* const* weights, const typename T::Value* values, long stride, long first, long last,
                float* const* out, long column) {
  vf acc[HR][VR];
  for (int h = 0; h < HR; h++)
    for (int v = 0; v < VR; v++) acc[h][v] = load(out[h] + column + v * LANES);
  for (long t = first; t < last; t++) {
    vf own[VR];
    for (int v = 0; v < VR; v++) own[v] = T::load(values + t * stride + column + v * LANES);
    for (int h = 0; h < HR; h++) {
      const vf weight = all(weights[h][t]);
      for (int v = 0; v < VR; v++) acc[h][v] = fma(weight, own[v], acc[h][v]);
    }
  }
  for (int h = 0; h < HR; h++)
    for (int v = 0; v < VR; v++) store(out[h] + column + v * LANES, acc[h][v]);
}

template <class T, int HR>
inline void mix_columns(const float* const* weights, const typename T::Value* values, long stride, long first,
                        long last, float* const* out, long width) {
  long column = 0;
  for (; column + 4 * LANES <= width; column += 4 * LANES)
    mix<T, HR, 4>(weights, values, stride, first, last, out, column);
  for (; column + LANES <= width; column += LANES)
    mix<T, HR, 1>(weights, values, stride, first, last, out, column);
  for (; column < width; column++)
    for (int h = 0; h < HR; h++)
      for (long t = first; t < last; t++) out[h][column] += weights[h][t] * T::wide(values[t * stride + column]);
}

struct Rows {
  const void* const* first;  // of each sequence
  long token, head;          // values from one token, and one head, to the next
};

template <class T>
void attend(const void* q, const Rows& keys, const Rows& values, const int64_t* lengths, long num_sequences,
            long num_heads, long num_kv_heads, long width, long v_width, float scale, const float* sinks, void* y,
            int threads) {
  using Value = typename T::Value;
  static thread_local WideRows wide;
  wide.fill<T>((const Value*)q, num_sequences * num_heads, width, width);
  const float* const* queries = wide.rows.data();
  const long share = num_heads / num_kv_heads;
  long heads_of_item = std::min(share, HEADS_OF_ITEM);
  while (heads_of_item > 1 && num_sequences * num_kv_heads * ((share + heads_of_item - 1) / heads_of_item) < threads)
    heads_of_item = (heads_of_item + 1) / 2;
  const long per_group = (share + heads_of_item - 1) / heads_of_item;
  const long items = num_sequences * num_kv_heads * per_group;
  long work = 0;
  for (long s = 0; s < num_sequences; s++) work += lengths[s] * num_heads * (width + v_width);
  if (work < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> score_values, sums;
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < items; item++) {
      const long s = item / (num_kv_heads * per_group), group = item / per_group % num_kv_heads;
      const long head = group * share + item % per_group * heads_of_item;
      const long count = std::min(heads_of_item, (group + 1) * share - head), length = lengths[s];
      const long room = (length + LANES - 1) / LANES * LANES;
      score_values.assign(count * room, -std::numeric_limits<float>::infinity());
      sums.assign(count * v_width, 0.0f);
      float* scores = score_values.data();
      const Dense<T> own_keys{(const Value*)keys.first[s] + group * keys.head, keys.token};
      dots(queries + s * num_heads + head, count, own_keys, width, 0, length, scores, room);
      const float* weights[HEADS_OF_ITEM];
      float* out[HEADS_OF_ITEM];
      float totals[HEADS_OF_ITEM];
      for (long h = 0; h < count; h++) {
        float* row = scores + h * room;
        float largest = sinks ? sinks[head + h] : -std::numeric_limits<float>::infinity();
        for (long t = 0; t < length; t++) {
          row[t] *= scale;
          largest = std::max(largest, row[t]);
        }
        vf total = {};
        for (long t = 0; t < room; t += LANES) {
          const vf each = exponential(load(row + t) - largest);
          store(row + t, each);
          total += each;
        }
        float extra[LANES] = {sinks ? sinks[head + h] - largest : -std::numeric_limits<float>::infinity()};
        totals[h] = sum(total) + (sinks ? exponential(load(extra))[0] : 0.0f);
        weights[h] = row;
        out[h] = sums.data() + h * v_width;
      }
      const auto* own_values = (const Value*)values.first[s] + group * values.head;
      for (long first = 0; first < length; first += TOKENS_OF_PASS) {
        const long last = std::min(length, first + TOKENS_OF_PASS);
        long h = 0;
        for (; h + 2 <= count; h += 2)
          mix_columns<T, 2>(weights + h, own_values, values.token, first, last, out + h, v_width);
        if (h < count) mix_columns<T, 1>(weights + h, own_values, values.token, first, last, out + h, v_width);
      }
      auto* result = (Value*)y + (s * num_heads + head) * v_width;
      for (long h = 0; h < count; h++)
        for (long c = 0; c < v_width; c++) result[h * v_width + c] = T::narrow(out[h][c] / totals[h]);
    }
  }
}

constexpr int FLOAT = 0, BFLOAT = 1, HALF = 2, PACKED4 = 3;  // as in calls.py

template <class F>
int with_type(int kind, F run) {
  if (kind == FLOAT) return run(Float{}), 0;
  if (kind == BFLOAT) return run(BFloat{}), 0;
#if HAS_HALF
  if (kind == HALF) return run(Half{}), 0;
#endif
  return 1;
}

}  // namespace

// Each returns 0, or 1 for a kind that is not built here. `kind` is that of x and y; `codes` and `scales` hold a matrix
// of that kind, or (is_packed) of MXFP4.

extern "C" int workbench_linear(int kind, int is_packed, const void* x, const void* codes, const void* scales, void* y,
                                long num, long rows, long columns, int threads) {
  return with_type(kind, [=](auto type) {
    using T = decltype(type);
    if (is_packed)
      linear<T>(x, Packed4{(const uint8_t*)codes, (const uint8_t*)scales, columns}, y, num, rows, columns, threads);
    else
      linear<T>(x, Dense<T>{(const typename T::Value*)codes, columns}, y, num, rows, columns, threads);
  });
}

extern "C" int workbench_experts(int kind, int is_packed, const void* x, long num_tokens, long top_k, int is_per_pair,
                                 const int64_t* slots, const void* const* codes, const void* const* scales,
                                 const void* const* biases, long num_experts, long width, long latent, int activation,
                                 const float* settings, void* y, int threads) {
  const Activation act{activation, settings[0], settings[1], settings[2], settings[3]};
  return with_type(kind, [=](auto type) {
    using T = decltype(type);
    using Value = typename T::Value;
    const auto run = [=](auto w1, auto w2, auto w3) {
      experts<T>(x, num_tokens, top_k, is_per_pair, slots, w1, w2, w3, biases[0], biases[1], biases[2], num_experts,
                 width, latent, act, y, threads);
    };
    if (is_packed)
      run(Packed4{(const uint8_t*)codes[0], (const uint8_t*)scales[0], latent},
          Packed4{(const uint8_t*)codes[1], (const uint8_t*)scales[1], width},
          Packed4{(const uint8_t*)codes[2], (const uint8_t*)scales[2], latent});
    else
      run(Dense<T>{(const Value*)codes[0], latent}, Dense<T>{(const Value*)codes[1], width},
          Dense<T>{(const Value*)codes[2], latent});
  });
}

extern "C" int workbench_attend(int kind, const void* q, const void* const* keys, const void* const* values,
                                const int64_t* lengths, const long* strides, long num_sequences, long num_heads,
                                long num_kv_heads, long width, long v_width, float scale, const float* sinks, void* y,
                                int threads) {
  return with_type(kind, [=](auto type) {
    attend<decltype(type)>(q, Rows{keys, strides[0], strides[1]}, Rows{values, strides[2], strides[3]}, lengths,
                           num_sequences, num_heads, num_kv_heads, width, v_width, scale, sinks, y, threads);
  });
}
