// Vectors of float32, and the element types that are read into them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int BLOCK = 32;  // columns taken together: a whole number of vectors, and what shares a scale in MXFP4
constexpr int STEPS = BLOCK / LANES;

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf all(float x) { return vf{} + x; }

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  vf y;
  for (int i = 0; i < LANES; i++) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return y;
#else
  return a * b + c;
#endif
}

// Halves upon halves. In registers: by way of memory it costs as much as a hundred columns.
inline float sum(vf v) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
#else
  const __m256 half = (__m256)v;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Element types of activations and dense weights: to float32 exactly, back by rounding to nearest, ties to even.

struct Float {
  using Value = float;
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
  static vf load(const float* p) { return ::load(p); }
};

struct BFloat {
  using Value = uint16_t;
  static float wide(uint16_t x) { return bits_to_float(uint32_t(x) << 16); }
  static uint16_t narrow(float x) {
    const uint32_t bits = float_to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  // By hand where it matters: compilers take a conversion of vectors apart into halves and join those again.
  static vf load(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    vh half;
    std::memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
#endif
  }
};

#if defined(__F16C__)
struct Half {
  using Value = uint16_t;
  static float wide(uint16_t x) { return _cvtsh_ss(x); }
  static uint16_t narrow(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
  static vf load(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
  }
};
#define HAS_HALF 1
#else
#define HAS_HALF 0
#endif

// e^x to about one unit in the last place; 0 below e^-87, NaN stays NaN.
inline vf exponential(vf x) {
  const vf rounded = fma(x, all(1.44269504088896341f), all(12582912.0f)) - 12582912.0f;
  const vf r = fma(rounded, all(2.12194440e-4f), fma(rounded, all(-0.693359375f), x));
  vf y = fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y * r, r, r) + 1.0f;
  const vi power = (__builtin_convertvector(rounded, vi) + 127) << 23;
  y = y * (vf)power;
  y = x < all(-87.3f) ? vf{} : y;
  return x > all(88.0f) ? all(std::numeric_limits<float>::infinity()) : y;
}

}  // namespace
