// Dot products of rows of x with rows of a matrix, dense or MXFP4.
//
// Every result adds its terms in one order, which depends on the number of columns alone: how many rows stand side by
// side in registers changes nothing.

#pragma once

#include "vectors.h"

namespace {

constexpr int TILE = 4;  // rows of x at most, side by side in registers
constexpr long ROWS_OF_PASS = 32;  // rows of x that a second cache holds, as float32
constexpr long ROWS_OF_ITEM = 48;  // rows of a matrix that one work item takes: a multiple of 3 and 4
constexpr long LEAST_WORK = 1 << 16;  // multiplications below which a second thread costs more than it brings

inline long items_of(long rows) { return (rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM; }

// Where the rows lie that come next, in bytes: from one block of columns to the next, and from one row.
struct Ahead {
  const char* place;  // may lie behind the end: addresses are only hinted at
  long block, row;
};

// Matrices. `scale` is taken once per block of columns and handed to `load`.

template <class T>
struct Dense {
  using Row = const typename T::Value*;
  static constexpr bool is_packed = false;
  const typename T::Value* values;
  long stride;
  Row row(long i) const { return values + i * stride; }
  static vf scale(Row, long) { return vf{}; }
  static constexpr long block_bytes = BLOCK * sizeof(typename T::Value);
  // Rows side by side are hinted at from front to back, whatever row a block belongs to: hardware follows one stream.
  Ahead ahead(long i, long rows, long columns) const {
    if (stride == columns) return {(const char*)row(i), rows * block_bytes, block_bytes};
    return {(const char*)row(i), block_bytes, long(stride * sizeof(typename T::Value))};
  }
  static vf load(Row row, long column, vf) { return T::load(row + column); }
  static float one(Row row, long column) { return T::wide(row[column]); }
};

// E2M1 codes, two a byte, the even column low; a power of two for every 32 columns. See quant/mxfp4.py.
const float MAGNITUDES[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

struct ScaleTable {
  float values[256];
  ScaleTable() {
    for (int code = 0; code < 255; code++) values[code] = std::ldexp(1.0f, code - 127);
    values[255] = std::numeric_limits<float>::quiet_NaN();
  }
};
const ScaleTable SCALES;

struct Packed4 {
  struct Row {
    const uint8_t* codes;
    const uint8_t* scales;
  };
  static constexpr bool is_packed = true;
  const uint8_t* codes;
  const uint8_t* scales;
  long columns;
  Row row(long i) const { return {codes + i * (columns / 2), scales + i * ((columns + BLOCK - 1) / BLOCK)}; }
  static vf scale(Row row, long block) { return all(SCALES.values[row.scales[block]]); }
  static constexpr long block_bytes = BLOCK / 2;
  Ahead ahead(long i, long rows, long) const { return {(const char*)row(i).codes, rows * block_bytes, block_bytes}; }
  static float one(Row row, long column) {
    const int code = row.codes[column / 2] >> (column % 2 * 4) & 15;
    const float value = code & 8 ? -MAGNITUDES[code & 7] : MAGNITUDES[code & 7];
    return value * SCALES.values[row.scales[column / BLOCK]];
  }
  static vf load(Row row, long column, vf scale) {
#if defined(__AVX512F__)
    int32_t words[2];
    std::memcpy(words, row.codes + column / 2, 8);
    const __m512i both =
        _mm512_inserti64x4(_mm512_set1_epi32(words[0]), _mm256_set1_epi32(words[1]), 1);
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                        -2.0f, -3.0f, -4.0f, -6.0f);
    return (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), table) * scale;
#elif defined(__AVX2__)
    int32_t word;
    std::memcpy(&word, row.codes + column / 2, 4);
    const __m256i nibbles =
        _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(nibbles, _mm256_set1_epi32(8)), 28);
    return (vf)_mm256_xor_ps(_mm256_permutevar8x32_ps(table, nibbles), _mm256_castsi256_ps(sign)) * scale;
#else
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = one(row, column + i);
    (void)scale;
    return ::load(values);
#endif
  }
};

inline long padded(long columns) { return (columns + BLOCK - 1) / BLOCK * BLOCK; }

// MR rows of x, each padded with zeros to whole blocks, times NR rows of W, into out[m * stride + n].
template <class W, int MR, int NR>
__attribute__((noinline)) void tile(const float* const* x, const typename W::Row* w, Ahead ahead, long columns,
                                    float* out, long stride) {
  vf acc[MR][NR] = {};
  const long whole = columns / BLOCK;
  for (long block = 0; block < whole; block++) {
    vf scales[NR];
    for (int n = 0; n < NR; n++) scales[n] = W::scale(w[n], block);
    for (int n = 0; n < NR; n++)
      for (long line = 0; line < W::block_bytes; line += 64) __builtin_prefetch(ahead.place + n * ahead.row + line);
    ahead.place += ahead.block;
#pragma GCC unroll 4
    for (int step = 0; step < STEPS; step++) {
      const long column = block * BLOCK + step * LANES;
      vf own[NR];
      for (int n = 0; n < NR; n++) own[n] = W::load(w[n], column, scales[n]);
      for (int m = 0; m < MR; m++) {
        const vf row = load(x[m] + column);
        for (int n = 0; n < NR; n++) acc[m][n] = fma(row, own[n], acc[m][n]);
      }
    }
  }
  if (columns % BLOCK) {  // what stands behind the last column is another row's
    float tails[NR][BLOCK] = {};
    for (int n = 0; n < NR; n++)
      for (long column = whole * BLOCK; column < columns; column++)
        tails[n][column - whole * BLOCK] = W::one(w[n], column);
    for (int step = 0; step < STEPS; step++)
      for (int m = 0; m < MR; m++) {
        const vf row = load(x[m] + whole * BLOCK + step * LANES);
        for (int n = 0; n < NR; n++) acc[m][n] = fma(row, load(tails[n] + step * LANES), acc[m][n]);
      }
  }
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NR; n++) out[m * stride + n] = sum(acc[m][n]);
}

template <class W, int NR>
void rows_of_x(const float* const* x, long num, const typename W::Row* w, const Ahead& ahead, long columns, float* out,
               long stride) {
  const long tiles = (num + TILE - 1) / TILE;
  for (long i = 0, m = 0; i < tiles; i++) {
    const long rows = (num - m + tiles - i - 1) / (tiles - i);
    switch (rows) {
      case 1: tile<W, 1, NR>(x + m, w, ahead, columns, out + m * stride, stride); break;
      case 2: tile<W, 2, NR>(x + m, w, ahead, columns, out + m * stride, stride); break;
      case 3: tile<W, 3, NR>(x + m, w, ahead, columns, out + m * stride, stride); break;
      default: tile<W, 4, NR>(x + m, w, ahead, columns, out + m * stride, stride);
    }
    m += rows;
  }
}

template <class W>
void decode(typename W::Row row, long columns, float* out) {
  const long whole = columns / BLOCK;
  for (long block = 0; block < whole; block++) {
    const vf scale = W::scale(row, block);
    for (long column = block * BLOCK; column < (block + 1) * BLOCK; column += LANES)
      store(out + column, W::load(row, column, scale));
  }
  for (long column = whole * BLOCK; column < columns; column++) out[column] = W::one(row, column);
}

template <class W, int NR>
void rows_of_w(const float* const* x, long num, const W& w, long columns, long n, float* out, long stride) {
  typename W::Row own[NR];
  for (int j = 0; j < NR; j++) own[j] = w.row(n + j);
  if (!W::is_packed || num <= TILE)
    return rows_of_x<W, NR>(x, num, own, w.ahead(n + NR, NR, columns), columns, out, stride);
  static thread_local std::vector<float> decoded;  // once for all rows of x
  const long width = padded(columns);
  decoded.assign(NR * width, 0.0f);
  const float* wide[NR];
  for (int j = 0; j < NR; j++) {
    decode<W>(own[j], columns, decoded.data() + j * width);
    wide[j] = decoded.data() + j * width;
  }
  rows_of_x<Dense<Float>, NR>(x, num, wide, Ahead{(const char*)wide[0], 0, 0}, columns, out, stride);
}

// out[m * stride + n - first] = x_m . w_n for all rows of x and rows [first, last) of W, which stay in a cache for one
// run of rows of x after another.
template <class W>
void dots(const float* const* x, long num, const W& w, long columns, long first, long last, float* out, long stride) {
  for (long m = 0; m < num; m += ROWS_OF_PASS) {
    const long rows = std::min(num - m, ROWS_OF_PASS);
    float* own = out + m * stride - first;
    long n = first;
    if (num <= 2 || LANES == 16)
      for (; n + 4 <= last; n += 4) rows_of_w<W, 4>(x + m, rows, w, columns, n, own + n, stride);
    else
      for (; n + 3 <= last; n += 3) rows_of_w<W, 3>(x + m, rows, w, columns, n, own + n, stride);
    for (; n < last; n++) rows_of_w<W, 1>(x + m, rows, w, columns, n, own + n, stride);
  }
}

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

}  // namespace
