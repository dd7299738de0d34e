// Functions of eight doubles.

namespace {

inline V reciprocal(V x) {
#ifdef WIDE
  V y = _mm512_rcp14_pd(x);
  for (int k = 0; k < 2; ++k) y = fma(y, fma(-x, y, splat(1)), y);
  return y;
#else
  return splat(1) / x;
#endif
}

inline V reciprocal_root(V x) {
#ifdef WIDE
  V y = _mm512_rsqrt14_pd(x);
  for (int k = 0; k < 2; ++k) y = fma(y * 0.5, fma(-x * y, y, splat(1)), y);
  return y;
#else
  return splat(1) / root(x);
#endif
}

inline V exponential(V x) {  // -708 < x <= 0, to 1e-15: 2^n exp(f), abs(f) < ln(2) / 2
  const V magic = splat(6755399441055744.0);  // 1.5 2^52: adding it rounds
  const V shifted = fma(x, splat(1.4426950408889634), magic), n = shifted - magic;
  V f = fma(n, splat(-6.93147180369123816490e-01), x);
  f = fma(n, splat(-1.90821492927058770002e-10), f);
  constexpr double c[] = {1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, 1. / 2, 1, 1};
  V p = splat(c[0]);
  for (int k = 1; k < 14; ++k) p = fma(p, f, splat(c[k]));
  const Mask exponent = ((Mask)shifted + 1023) << 52;
  return p * (V)exponent;
}

// exp(x^2) erfc(x) for 0 <= x < 6.5, to 1e-15: a polynomial in 1 / (1 + x / 3), by Chebyshev interpolation.
inline V scaled_erfc(V x) {
  constexpr double c[] = {-1.021275010023714083e-11, 7.200789459618002327e-11, 4.36837894769383608e-11, -1.391447985943467197e-9,
    1.749090173189304694e-9, 1.970782273686006502e-8, -5.421937633186032051e-8, -2.87117577511005571e-7, 1.135845791593281847e-6,
    5.445666056470549335e-6, -0.00001994338857682714176, -0.0001485619978126842443, 0.0001089765470044307287, 0.004490129647798017056,
    0.02528367731001985971, 0.08561938913417837915, 0.2054937996616989677, 0.3671310312265273955, 0.312035241513324391};
  const V u = reciprocal(fma(x, splat(1. / 3), splat(1)));
  const V t = fma(u, splat(2.9230769230769230769), splat(-1.9230769230769230769));
  V p = splat(c[0]);
  for (int k = 1; k < 19; ++k) p = fma(p, t, splat(c[k]));
  return p;
}

}  // namespace
