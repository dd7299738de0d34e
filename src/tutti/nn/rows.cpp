// Norms, rotary embedding, activations and gated units of few rows (rows.py), in float32, rounded where the formulas
// round. Each row is computed alike. Threads share the rows.

#include <array>
#include <string_view>

namespace {


constexpr int64_t GRAIN = 1 << 14;  // numbers that are worth a thread

// A few numbers as float32, and back. The others are zero.
Floats load(const float* x, int64_t count) { return count >= N ? Floats::loadu(x) : Floats::loadu(x, count); }

Floats load(const BFloat16* x, int64_t count) {
  return std::get<0>(at::vec::convert_to_float(Halves::loadu(x, std::min(count, N))));
}

void store(const Floats& y, float* x, int64_t count) { y.store(x, std::min(count, N)); }

void store(const Floats& y, BFloat16* x, int64_t count) {
  at::vec::convert_from_float<BFloat16>(y, y).store(x, std::min(count, N));
}

template <class T>
Floats rounded(const Floats& x) {
  if constexpr (std::is_same_v<T, float>) return x;
  return std::get<0>(at::vec::convert_to_float(at::vec::convert_from_float<BFloat16>(x, x)));
}

template <class F>
void rows_of(int64_t rows, int64_t width, F f) {
  for_parts(rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(width, 1)), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) f(i);
  });
}

Optional contiguous(const Optional& x) { return x ? Optional(x->contiguous()) : x; }

template <class T>
const T* data_of(const Optional& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

template <class T>
void norm(const T* x, const T* weight, const T* bias, T* y, int64_t width, double eps, double offset, bool wide,
          bool centered) {
  Floats total(0.f);
  for (int64_t i = 0; centered && i < width; i += N) total = total + load(x + i, width - i);
  const float mean = centered ? sum(total) / width : 0.f;
  total = Floats(0.f);
  for (int64_t i = 0; i < width; i += N) {
    Floats d = load(x + i, width - i) - Floats(mean);
    if (width - i < N) d = Floats::set(Floats(0.f), d, width - i);
    total = at::vec::fmadd(d, d, total);
  }
  const Floats rstd(1.f / std::sqrt(sum(total) / width + float(eps)));
  for (int64_t i = 0; i < width; i += N) {
    const int64_t left = width - i;
    Floats d = (load(x + i, left) - Floats(mean)) * rstd;
    if (weight) {
      const Floats w = load(weight + i, left);
      d = wide ? d * (Floats(float(offset)) + w) : rounded<T>(d) * w;
    }
    if (bias) d = d + load(bias + i, left);
    store(d, y + i, left);
  }
}

// x (..., width); see rows.py.
at::Tensor norm_rows(const at::Tensor& x, const Optional& weight, const Optional& bias, double eps, double offset,
                     bool wide, bool centered) {
  const at::Tensor in = x.contiguous();
  const Optional of_weight = contiguous(weight), of_bias = contiguous(bias);
  at::Tensor out = at::empty(in.sizes(), in.options());
  const int64_t width = in.size(-1);
  const auto each = [&]<class T>(T) {
    const T *from = in.const_data_ptr<T>(), *w = data_of<T>(of_weight), *b = data_of<T>(of_bias);
    T* to = out.data_ptr<T>();
    rows_of(in.numel() / std::max<int64_t>(width, 1), width, [&](int64_t i) {
      norm(from + i * width, w, b, to + i * width, width, eps, offset, wide, centered);
    });
  };
  if (in.scalar_type() == at::kBFloat16) each(BFloat16()); else each(float());
  return out;
}

// The halves of a row.
template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* y, int64_t half) {
  for (int64_t i = 0; i < half; i += N) {
    const int64_t left = half - i;
    const Floats a = load(x + i, left), b = load(x + half + i, left);
    const Floats c = load(cos + i, left), d = load(cos + half + i, left);
    const Floats s = load(sin + i, left), t = load(sin + half + i, left);
    store(rounded<T>(a * c) - rounded<T>(b * s), y + i, left);
    store(rounded<T>(b * d) + rounded<T>(a * t), y + half + i, left);
  }
}

// x (a, b, c, width), and cos and sin that broadcast to it. The result has the strides of x.
at::Tensor rotary_rows(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  at::Tensor out = at::empty_like(x);
  if (x.stride(3) != 1) return out.copy_(rotary_rows(x.contiguous(), cos, sin));
  const at::Tensor c = in_rows(cos).expand(x.sizes()), s = in_rows(sin).expand(x.sizes());
  const int64_t width = x.size(3), inner = x.size(2), middle = x.size(1);
  const auto each = [&]<class T>(T) {
    const T *from = x.const_data_ptr<T>(), *of_cos = c.const_data_ptr<T>(), *of_sin = s.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    const auto strides = [](const at::Tensor& t) { return std::array{t.stride(0), t.stride(1), t.stride(2)}; };
    const auto from_x = strides(x), from_c = strides(c), from_s = strides(s), to_out = strides(out);
    rows_of(x.size(0) * middle * inner, width, [&](int64_t i) {
      const int64_t at[] = {i / inner / middle, i / inner % middle, i % inner};
      const auto place = [&](const auto& stride) { return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2]; };
      rotate(from + place(from_x), of_cos + place(from_c), of_sin + place(from_s), to + place(to_out), width / 2);
    });
  };
  if (x.scalar_type() == at::kBFloat16) each(BFloat16()); else each(float());
  return out;
}

// The exponential has an error below the rounding of T.
template <class T>
Floats silu(const Floats& x) {
  return x / (Floats(1.f) + (std::is_same_v<T, float> ? x.neg().exp() : x.neg().exp_u20()));
}

// In BFloat16 by erfc(|z|) = (a1 t + ... + a5 t^5) exp(-z^2), t = 1 / (1 + p |z|), whose error is below 1.5e-7 (Abramowitz
// and Stegun, "Handbook of Mathematical Functions", 7.1.26).
template <class T>
Floats gelu(const Floats& x) {
  if constexpr (std::is_same_v<T, float>)
    return x * Floats(0.5f) * (Floats(1.f) + (x * Floats(float(M_SQRT1_2))).erf());
  const Floats near = at::vec::clamp(x, Floats(-20.f), Floats(20.f)), z = near * Floats(float(M_SQRT1_2));
  const Floats t = Floats(1.f) / (Floats(1.f) + Floats(0.3275911f) * z.abs());
  Floats sum(1.061405429f);
  for (const float a : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
    sum = at::vec::fmadd(sum, t, Floats(a));
  const Floats less = Floats(0.5f) * near * sum * t * (z * z).neg().exp_u20();
  return Floats::blendv(x - less, less, x < Floats(0.f));
}

Floats gelu_tanh(const Floats& x) {
  const Floats inner = Floats(float(M_SQRT2 * M_2_SQRTPI * 0.5)) * (x + Floats(0.044715f) * (x * x * x));
  return Floats(0.5f) * x * (Floats(1.f) + inner.tanh());
}

Floats relu(const Floats& x) { return at::vec::maximum(x, Floats(0.f)); }

// Call f with the activation of a name.
template <class T, class F>
void with_activation(std::string_view name, const F& f) {
  if (name == "silu") return f([](const Floats& x) { return silu<T>(x); });
  if (name == "gelu") return f([](const Floats& x) { return gelu<T>(x); });
  if (name == "gelu_tanh") return f([](const Floats& x) { return gelu_tanh(x); });
  TORCH_CHECK_VALUE(name == "relu", "unknown activation ", name);
  f([](const Floats& x) { return relu(x); });
}

// Call f(row, begin, end) for pieces of `rows` rows.
template <class F>
void pieces_of(int64_t rows, int64_t width, const F& f) {
  const int64_t step = 1 << 10, pieces = (width + step - 1) / step;
  rows_of(rows * pieces, std::min(step, width), [&](int64_t task) {
    const int64_t begin = task % pieces * step;
    f(task / pieces, begin, std::min(width, begin + step));
  });
}

// x (..., width)
at::Tensor activation_rows(const at::Tensor& x, std::string_view activation) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (!out.numel()) return out;
  const int64_t width = x.dim() ? x.size(-1) : 1;
  const at::Tensor in = (x.dim() ? in_rows(x) : x).reshape({-1, width});
  const auto each = [&]<class T>(T) {
    const T* from = in.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    with_activation<T>(activation, [&](auto act) {
      pieces_of(in.size(0), width, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = from + row * in.stride(0);
        T* y = to + row * width;
        int64_t i = begin;
        if constexpr (std::is_same_v<T, BFloat16>)
          for (; i + 2 * N <= end; i += 2 * N) {
            const auto [a, b] = at::vec::convert_to_float(Halves::loadu(x + i));
            at::vec::convert_from_float<BFloat16>(act(a), act(b)).store(y + i);
          }
        for (; i < end; i += N) store(act(load(x + i, end - i)), y + i, end - i);
      });
    });
  };
  if (in.scalar_type() == at::kBFloat16) each(BFloat16()); else each(float());
  return out;
}

// gate and up (..., width)
at::Tensor glu_rows(const at::Tensor& gate, const at::Tensor& up, std::string_view activation) {
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  if (!out.numel()) return out;
  const int64_t width = gate.size(-1);
  const at::Tensor g = in_rows(gate).reshape({-1, width}), u = in_rows(up).reshape({-1, width});
  const auto each = [&]<class T>(T) {
    const T *a = g.const_data_ptr<T>(), *b = u.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    with_activation<T>(activation, [&](auto act) {
      pieces_of(g.size(0), width, [&](int64_t row, int64_t begin, int64_t end) {
        const T *x = a + row * g.stride(0), *y = b + row * u.stride(0);
        for (int64_t i = begin; i < end; i += N)
          store(rounded<T>(act(load(x + i, end - i))) * load(y + i, end - i), to + row * width + i, end - i);
      });
    });
  };
  if (g.scalar_type() == at::kBFloat16) each(BFloat16()); else each(float());
  return out;
}

// The first index of the greatest number of a row; -1 if none is above -infinity, or one is not a number. Pieces of the
// row tell where to look for it.
template <class T>
int64_t greatest_of(const T* x, int64_t width) {
  constexpr int64_t PIECE = 32 * N;
  float most = -INFINITY;
  int64_t at = 0;
  for (int64_t begin = 0; begin < width; begin += PIECE) {
    const int64_t end = std::min(width, begin + PIECE);
    Floats top(-INFINITY);
    for (int64_t i = begin; i < end; i += N) {
      const Floats here = load(x + i, end - i);
      top = at::vec::maximum(top, end - i < N ? Floats::set(Floats(-INFINITY), here, end - i) : here);
    }
    const float found = greatest(top);
    if (std::isnan(found)) return -1;
    if (found > most) most = found, at = begin;
  }
  if (most == -INFINITY) return -1;
  while (float(x[at]) != most) ++at;
  return at;
}

// x (rows, width) -> (rows) int64
at::Tensor greatest_rows(const at::Tensor& x) {
  const at::Tensor in = in_rows(x), out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  const auto each = [&]<class T>(T) {
    const T* from = in.const_data_ptr<T>();
    int64_t* to = out.data_ptr<int64_t>();
    rows_of(in.size(0), in.size(1), [&](int64_t i) { to[i] = greatest_of(from + i * in.stride(0), in.size(1)); });
  };
  if (in.scalar_type() == at::kBFloat16) each(BFloat16()); else each(float());
  return out;
}

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(
      "norm_rows(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset, bool wide, bool centered) -> Tensor",
      norm_rows);
  library.def("rotary_rows(Tensor x, Tensor cos, Tensor sin) -> Tensor", rotary_rows);
  library.def("activation_rows(Tensor x, str activation) -> Tensor", activation_rows);
  library.def("glu_rows(Tensor gate, Tensor up, str activation) -> Tensor", glu_rows);
  library.def("greatest_rows(Tensor x) -> Tensor", greatest_rows);
}

}  // namespace
