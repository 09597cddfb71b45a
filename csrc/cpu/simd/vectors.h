// Vectors by their numbers of lanes.
#pragma once

#include <cstdint>

namespace mixprec::cpu {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
typedef uint16_t Words16 __attribute__((vector_size(32)));
typedef uint16_t Words32 __attribute__((vector_size(64)));
typedef uint32_t Uints16 __attribute__((vector_size(64)));
typedef float Floats16 __attribute__((vector_size(64)));

}  // namespace mixprec::cpu
