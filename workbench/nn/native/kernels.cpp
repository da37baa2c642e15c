// Products of few rows with large matrices, for processors: what one to a few dozen tokens spend their time on.
//
// A matrix is (rows, columns), a row the weights of one output, as the loader leaves it: nothing is packed anew. Each
// result is one dot product of its own, its terms added in an order that depends on nothing but the number of columns,
// so a token's result is the same to the bit whoever else is computed beside it. Sums are float32.
//
//   linear    y = x W^T, of one matrix or of several that read the same x
//   experts   see experts.h
//   attend    softmax(scale q k^T, sink) v of one new token of each sequence, over exactly the rows it sees
//
// and, so that a layer is a few calls, what stands between them: norms and turned heads (norms.h), routers (router.h).
//
// Threads come from the OpenMP runtime that is loaded already (torch's), so no second pool waits beside it.

#include <omp.h>

#include "experts.h"
#include "norms.h"
#include "router.h"

namespace {

template <class W>
struct Product {
  W matrix;
  void* y;  // (num, rows)
  long rows;
};

template <class T, class W>
void linear(const void* x, const Product<W>* products, long num_products, long num, long columns, int threads) {
  static thread_local WideRows wide;
  wide.fill<T>((const typename T::Value*)x, num, columns, columns);
  const float* const* in = wide.rows.data();
  long items = 0, rows = 0;
  for (long i = 0; i < num_products; i++) {
    items += items_of(products[i].rows);
    rows += products[i].rows;
  }
  if (num * rows * columns < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> found(num * ROWS_OF_ITEM);
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < items; item++) {
      const Product<W>* own = products;
      long place = item;
      for (; place >= items_of(own->rows); own++) place -= items_of(own->rows);
      const long first = place * ROWS_OF_ITEM, last = std::min(own->rows, first + ROWS_OF_ITEM);
      dots(in, num, own->matrix, columns, first, last, found.data(), ROWS_OF_ITEM);
      auto* out = (typename T::Value*)own->y;
      for (long m = 0; m < num; m++)
        for (long n = first; n < last; n++) out[m * own->rows + n] = T::narrow(found[m * ROWS_OF_ITEM + n - first]);
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
  const void* const* first;  // of each sequence, or of the pool that all share
  long token, head;          // values from one token, and one head, to the next
};

// Which rows each sequence sees, and where they lie: side by side in memory of its own, or in pages of a pool, where
// token t of slot s is row  pages[s * width + t / tokens] * tokens + t % tokens.
struct Places {
  const int64_t* seen;   // of each sequence: its slot, the first token that it sees, and the one behind the last
  const int64_t* pages;  // null: memory of its own
  long width, tokens;    // entries of a slot's table, tokens of a page

  long length(long s) const { return seen[3 * s + 2] - seen[3 * s + 1]; }
  long of(long s) const { return pages ? 0 : s; }

  // run(t, row, count) for each stretch of tokens whose rows lie side by side; t counts from the first that is seen.
  template <class F>
  void each_run(long s, F run) const {
    const long first = seen[3 * s + 1], stop = seen[3 * s + 2];
    if (!pages) return run(0L, first, stop - first);
    const int64_t* own = pages + seen[3 * s] * width;
    for (long t = first; t < stop;) {
      long page = t / tokens;
      const long row = own[page] * tokens + t % tokens;
      while ((page + 1) * tokens < stop && own[page + 1] == own[page] + 1) page++;
      const long end = std::min(stop, (page + 1) * tokens);
      run(t - first, row, end - t);
      t = end;
    }
  }
};

template <class T>
void attend(const void* q, const Rows& keys, const Rows& values, const Places& places, long num_sequences,
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
  for (long s = 0; s < num_sequences; s++) work += places.length(s) * num_heads * (width + v_width);
  if (work < LEAST_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> score_values, sums;
#pragma omp for schedule(dynamic, 1)
    for (long item = 0; item < items; item++) {
      const long s = item / (num_kv_heads * per_group), group = item / per_group % num_kv_heads;
      const long head = group * share + item % per_group * heads_of_item;
      const long count = std::min(heads_of_item, (group + 1) * share - head), length = places.length(s);
      const long room = (length + LANES - 1) / LANES * LANES;
      score_values.assign(count * room, -std::numeric_limits<float>::infinity());
      sums.assign(count * v_width, 0.0f);
      float* scores = score_values.data();
      const auto* own_keys = (const Value*)keys.first[places.of(s)] + group * keys.head;
      places.each_run(s, [&](long t, long row, long num) {
        const Dense<T> rows{own_keys + row * keys.token, keys.token};
        dots(queries + s * num_heads + head, count, rows, width, 0, num, scores + t, room);
      });
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
      const auto* own_values = (const Value*)values.first[places.of(s)] + group * values.head;
      places.each_run(s, [&](long t, long row, long num) {
        const auto* shifted = own_values + (row - t) * values.token;  // so that token t has its row
        for (long first = t; first < t + num; first += TOKENS_OF_PASS) {
          const long last = std::min(t + num, first + TOKENS_OF_PASS);
          long h = 0;
          for (; h + 2 <= count; h += 2)
            mix_columns<T, 2>(weights + h, shifted, values.token, first, last, out + h, v_width);
          if (h < count) mix_columns<T, 1>(weights + h, shifted, values.token, first, last, out + h, v_width);
        }
      });
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

extern "C" int workbench_linear(int kind, int is_packed, const void* x, const void* const* codes,
                                const void* const* scales, void* const* y, const long* rows, long num_products, long num,
                                long columns, int threads) {
  return with_type(kind, [=](auto type) {
    using T = decltype(type);
    const auto run = [=](auto matrix_at) {
      std::vector<Product<decltype(matrix_at(0))>> products;
      for (long i = 0; i < num_products; i++) products.push_back({matrix_at(i), y[i], rows[i]});
      linear<T>(x, products.data(), num_products, num, columns, threads);
    };
    if (is_packed)
      run([=](long i) { return Packed4{(const uint8_t*)codes[i], (const uint8_t*)scales[i], columns}; });
    else
      run([=](long i) { return Dense<T>{(const typename T::Value*)codes[i], columns}; });
  });
}

extern "C" int workbench_rms_norm(int kind, const void* x, const void* weight, float eps, float offset, void* y, long num,
                                  long columns, int threads) {
  return with_type(kind, [=](auto type) {
    rms_norm<decltype(type)>(x, Norm{weight, eps, offset}, y, num, columns, threads);
  });
}

// `sizes`: heads, and values from one token, and one head, to the next, of each table; `settings`: eps and offset.
extern "C" int workbench_turn_heads(int kind, const void* const* x, void* const* y, const void* const* weights,
                                    const long* sizes, const float* settings, long num_tables, long num_tokens,
                                    long width, const float* cos, const float* sin, long pairs, int is_interleaved,
                                    int threads) {
  std::vector<Heads> tables;
  for (long i = 0; i < num_tables; i++)
    tables.push_back({x[i], y[i], sizes[3 * i], sizes[3 * i + 1], sizes[3 * i + 2],
                      Norm{weights[i], settings[2 * i], settings[2 * i + 1]}});
  const Turn turn{cos, sin, pairs, is_interleaved != 0};
  return with_type(kind, [&](auto type) {
    turn_heads<decltype(type)>(tables.data(), num_tables, num_tokens, width, turn, threads);
  });
}

extern "C" int workbench_route(int kind, const void* x, const void* matrix, const void* bias, const float* correction,
                               int scoring, int is_renormalised, float scale, int64_t* ids, float* weights,
                               long num_tokens, long num_experts, long columns, long top_k, int threads) {
  const Routing routing{scoring, is_renormalised != 0, scale, correction};
  return with_type(kind, [&](auto type) {
    route<decltype(type)>(x, matrix, bias, routing, ids, weights, num_tokens, num_experts, columns, top_k, threads);
  });
}

extern "C" int workbench_experts(int kind, int is_packed, const void* x, long num_tokens, long top_k, int is_per_pair,
                                 const int64_t* slots, const void* const* codes, const void* const* scales,
                                 const void* const* biases, long num_experts, long width, long latent, int activation,
                                 const float* settings, int is_summed, const float* weights, void* y, int threads) {
  const Activation act{activation, settings[0], settings[1], settings[2], settings[3]};
  const Sums sums{is_summed != 0, weights};
  return with_type(kind, [=](auto type) {
    using T = decltype(type);
    using Value = typename T::Value;
    const auto run = [=](auto w1, auto w2, auto w3) {
      experts<T>(x, num_tokens, top_k, is_per_pair, slots, w1, w2, w3, biases[0], biases[1], biases[2], num_experts,
                 width, latent, act, sums, y, threads);
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
                                const long* strides, const int64_t* seen, const int64_t* pages, long table_width,
                                long page_tokens, long num_sequences, long num_heads, long num_kv_heads, long width,
                                long v_width, float scale, const float* sinks, void* y, int threads) {
  return with_type(kind, [=](auto type) {
    attend<decltype(type)>(q, Rows{keys, strides[0], strides[1]}, Rows{values, strides[2], strides[3]},
                           Places{seen, pages, table_width, page_tokens}, num_sequences, num_heads, num_kv_heads,
                           width, v_width, scale, sinks, y, threads);
  });
}

// The calling thread's team of the runtime ends; its next parallel work gets a new one.
extern "C" int workbench_end_team() { return omp_pause_resource_all(omp_pause_soft); }
