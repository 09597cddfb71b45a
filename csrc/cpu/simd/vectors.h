// Vectors by their numbers of lanes.
#pragma once

#include <cstdint>

namespace mixprec::cpu {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
typedef uint16_t Words8 __attribute__((vector_size(16)));
typedef uint16_t Words16 __attribute__((vector_size(32)));
typedef uint16_t Words32 __attribute__((vector_size(64)));
typedef int16_t Shorts8 __attribute__((vector_size(16)));
typedef int16_t Shorts32 __attribute__((vector_size(64)));
typedef uint32_t Uints4 __attribute__((vector_size(16)));
typedef uint32_t Uints16 __attribute__((vector_size(64)));
typedef int32_t Ints4 __attribute__((vector_size(16)));
typedef float Floats16 __attribute__((vector_size(64)));

// What processors do in different ways; the forms for any of them.
struct PlainRegisters {
  static constexpr bool of_32_words = false;
  static Uints16 widen(Words16 x) { return __builtin_convertvector(x, Uints16); }
  static Bytes32 narrow_bytes(Words32 x) { return __builtin_convertvector(x, Bytes32); }
  static Bytes16 narrow_bytes(Uints16 x) { return __builtin_convertvector(x, Bytes16); }
  // The high halves of a and b, with the last bit set if any in the low half is.
  static Words32 cut(Uints16 a, Uints16 b) {
    a = (a | ((a & 0xFFFF) + 0xFFFF)) >> 16;
    b = (b | ((b & 0xFFFF) + 0xFFFF)) >> 16;
    Words16 halves[2] = {__builtin_convertvector(a, Words16), __builtin_convertvector(b, Words16)};
    Words32 both;
    __builtin_memcpy(&both, halves, sizeof both);
    return both;
  }
};

}  // namespace mixprec::cpu
