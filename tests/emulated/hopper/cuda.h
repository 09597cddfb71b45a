// Replaces the driver's header of this name: the description of a tensor that TMA takes.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  uint8_t* data;
  int64_t inner, outer, pitch;  // elements, lines, bytes
  int element_size, box_inner, box_outer;
  bool is_float, swizzle;
  uint32_t magic;  // kEncoded: encode_map made it
  static constexpr uint32_t kEncoded = 0x7E4503AB;
};
