// rotary.
#include <cstring>
#include <utility>

#include "cpu/parallel.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

namespace {

struct Part {
  Tensor rows;
  const void* data;
  int64_t heads, by_sample, by_head, by_position;
  bool rotated;
};

// A table of cosines or sines: a factor for each feature, or one for both features of a pair.
class Table {
 public:
  Table(const Tensor& table, const Tensor& x, bool interleaved, const char* name)
      : dense_(dense_rows(table)), data_(dense_.const_data_ptr()) {
    int64_t dim = table.dim(), d = x.size(3);
    STD_TORCH_CHECK(table.scalar_type() == ScalarType::Float && (dim == 2 || dim == 3) &&
                        (dim == 2 || table.size(0) == 1 || table.size(0) == x.size(0)) &&
                        table.size(dim - 2) == x.size(2) &&
                        (table.size(dim - 1) == d || table.size(dim - 1) == d / 2),
                    "rotary: ", name, " must be fp32 [T, D/2] or [T, D], or such for each of B");
    by_sample_ = dim == 3 && table.size(0) > 1 ? dense_.stride(0) : 0;
    by_position_ = dense_.stride(dim - 2);
    full_ = table.size(dim - 1) == d;
    other_ = !full_ ? 0 : interleaved ? 1 : d / 2;
  }

  bool full() const { return full_; }

  // The factors of the first and of the second features.
  std::pair<const float*, const float*> at(int64_t b, int64_t t) const {
    const float* row = static_cast<const float*>(data_) + b * by_sample_ + t * by_position_;
    return {row, row + other_};
  }

 private:
  Tensor dense_;
  const void* data_;
  int64_t by_sample_, by_position_, other_;
  bool full_;
};

// To `out`, which may be x; a new tensor without.
Tensor rotated(const Tensor& x, const MaybeTensor& k, const MaybeTensor& v, const Tensor& cos,
               const Tensor& sin, bool interleaved, bool inverse, const MaybeTensor& out) {
  Dtype dtype = float_dtype(x, "rotary: x");
  STD_TORCH_CHECK(x.dim() == 4 && x.size(3) % 2 == 0, "rotary: x must be [B, H, T, D], D even");
  int64_t batch = x.size(0), positions = x.size(2), d = x.size(3), heads = 0;
  Table cosines(cos, x, interleaved, "cos"), sines(sin, x, interleaved, "sin");
  STD_TORCH_CHECK(cosines.full() == sines.full(), "rotary: sin must have the shape of cos");
  std::vector<Part> parts;
  auto add = [&](const MaybeTensor& part, bool rotated) {
    if (!part.has_value()) return;
    STD_TORCH_CHECK(part->scalar_type() == x.scalar_type() && part->dim() == 4 &&
                        part->size(0) == batch && part->size(2) == positions && part->size(3) == d,
                    "rotary: k and v must be [B, H, T, D] like x, in its dtype");
    Tensor rows = dense_rows(*part);
    auto by = rows.strides();
    const void* data = rows.const_data_ptr();
    parts.push_back({rows, data, rows.size(1), by[0], by[1], by[2], rotated});
    heads += rows.size(1);
  };
  add(x, true), add(k, true), add(v, false);
  Tensor y =
      out ? *out
          : torch::stable::transpose(empty({batch, positions, heads, d}, x.scalar_type()), 1, 2);
  auto by = y.strides();
  STD_TORCH_CHECK(y.scalar_type() == x.scalar_type() && y.dim() == 4 && y.size(0) == batch &&
                      y.size(1) == heads && y.size(2) == positions && y.size(3) == d && by[3] == 1,
                  "rotary_: x must have adjacent features");
  void* to = y.mutable_data_ptr();
  for_each(batch * positions, heads * d, [&](int64_t i) {
    static thread_local Scratch scratch;
    void* copy = scratch.get(d * element_size(dtype));
    int64_t b = i / positions, t = i % positions, done = 0;
    auto [cos1, cos2] = cosines.at(b, t);
    auto [sin1, sin2] = sines.at(b, t);
    if (inverse) std::swap(sin1, sin2);
    int64_t step = interleaved && cosines.full() ? 2 : 1;
    RotaryFactors factors{cos1, cos2, sin1, sin2, step, inverse ? -1.0f : 1.0f};
    for (const Part& part : parts) {
      int64_t row = b * part.by_sample + t * part.by_position;
      for (int64_t h = 0; h < part.heads; ++h, ++done) {
        const void* from = at(part.data, dtype, row + h * part.by_head);
        void* result = at(to, dtype, b * by[0] + done * by[1] + t * by[2]);
        if (part.rotated && out) from = std::memcpy(copy, from, d * element_size(dtype));
        if (part.rotated) {
          loops().rotary(dtype, interleaved, from, factors, result, d);
        } else {
          std::memmove(result, from, d * element_size(dtype));
        }
      }
    }
  });
  return y;
}

}  // namespace

// x, k, v [B, H, T, D], cos and sin fp32 [T, D/2] or [T, D] or [B, T, ...] -> [B, sum of H, T, D]
Tensor rotary(Tensor x, MaybeTensor k, MaybeTensor v, Tensor cos, Tensor sin, bool interleaved,
              bool inverse) {
  return rotated(x, k, v, cos, sin, interleaved, inverse, std::nullopt);
}

// x <- x rotated
void rotary_(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) {
  rotated(x, std::nullopt, std::nullopt, cos, sin, interleaved, inverse, x);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("rotary", TORCH_BOX(&mixprec::cpu::rotary));
  m.impl("rotary_", TORCH_BOX(&mixprec::cpu::rotary_));
}
