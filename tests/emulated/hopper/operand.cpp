// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Shared Memory Matrix Layout, Matrix
// Descriptor Format, Strides" and, for what the strides mean with a 128-byte swizzle, the canonical
// layouts there: K-major ((8, rows/8), (T, 2)) : ((1 line, stride), (1, T)); MN-major
// ((T, 8, m), (8, k)) : ((1, T, leading), (1 line, stride)), a line being 128 bytes.
#include "math/convert.h"
#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

struct Descriptor {
  uint32_t start, leading, stride;  // bytes
  int base_offset, mode;
};

constexpr Descriptor fields(uint64_t d) {
  return {static_cast<uint32_t>(d & 0x3FFF) << 4, static_cast<uint32_t>(d >> 16 & 0x3FFF) << 4,
          static_cast<uint32_t>(d >> 32 & 0x3FFF) << 4, static_cast<int>(d >> 49 & 7),
          static_cast<int>(d >> 62)};
}

constexpr uint64_t kMeaningful = 0xC00E'3FFF'3FFF'3FFF;

template <class T>
float value(const uint8_t* from) {
  T element;
  __builtin_memcpy(&element, from, sizeof element);
  return mixprec::decode(element);
}

// f(T{}) for the type of the format.
template <class F>
void with(Format format, const F& f) {
  switch (format) {
    case Format::bf16:
      return f(mixprec::Bf16{});
    case Format::fp16:
      return f(mixprec::Fp16{});
    case Format::e4m3:
      return f(mixprec::E4m3{});
    case Format::e5m2:
      return f(mixprec::E5m2{});
  }
}

}  // namespace

std::vector<uint32_t> operand_words(uint64_t bits, Format format, bool mn_major, int rows,
                                    const char* who) {
  Descriptor d = fields(bits);
  if ((bits & ~kMeaningful) != 0) fail("%s: reserved bits of the descriptor are set", who);
  if (d.mode != 1) fail("%s: swizzle mode %d, only that of 128 bytes is modelled", who, d.mode);
  // Else "base offset" would have to say where in the pattern of 8 lines the matrix starts.
  if (d.base_offset != 0 || d.start % 1024 >= (mn_major ? 16 : 128)) {
    fail("%s: the matrix at %u does not start with the swizzle's pattern", who, d.start);
  }
  if (mn_major && element_bytes(format) != 2) fail("%s: only 16-bit operands may be MN-major", who);
  std::vector<uint32_t> words;
  auto add = [&](uint32_t line, uint32_t byte) {
    uint32_t address = swizzled(d.start + line + byte);
    if (address < kWindow || address - kWindow + size_t{16} > shared_bytes()) {
      fail("%s: reads address %u, outside of the block's shared memory", who, address);
    }
    words.push_back(address - kWindow);
  };
  if (mn_major) {
    for (int k = 0; k < kStepBytes / 2; ++k) {
      for (int row = 0; row < rows; row += 8) {
        add(row / 64 * d.leading + k / 8 * d.stride + k % 8 * 128, row % 64 * 2);
      }
    }
  } else {
    for (int row = 0; row < rows; ++row) {
      for (int byte = 0; byte < kStepBytes; byte += 16) {
        add(row / 8 * d.stride + row % 8 * 128, byte);
      }
    }
  }
  return words;
}

void decode(const uint8_t* shared, const std::vector<uint32_t>& words, Format format, bool mn_major,
            int all_rows, int first, int rows, float* to, int row_stride, int k_stride) {
  with(format, [&](auto t) {
    constexpr int in_word = 16 / sizeof t, depth = kStepBytes / sizeof t;
    for (int row = first; row < first + rows; ++row) {
      for (int k = 0; k < depth; ++k) {
        int word = mn_major ? (k * all_rows + row) / in_word : row * 2 + k / in_word;
        int element = (mn_major ? row : k) % in_word;
        to[(row - first) * row_stride + k * k_stride] =
            value<decltype(t)>(shared + words[word] + element * sizeof t);
      }
    }
  });
}

}  // namespace cuda_on_cpu::sm90
