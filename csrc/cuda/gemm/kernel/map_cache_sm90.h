// A cache of tensor maps: a process uses few different ones, again and again.
#pragma once

#include <array>
#include <mutex>

#include "cuda/gemm/kernel/tensor_map_sm90.h"

namespace mixprec::cuda::sm90 {

// A map is only an encoding of its arguments, so it never becomes stale. The cache is
// direct-mapped: different arguments may compete for one slot.
class MapCache {
 public:
  // Returns false if the driver refuses the arguments.
  bool get(const MapArgs& args, CUtensorMap* map) {
    Key key = key_of(args);
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a over 64-bit words
    for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001B3u;
    std::lock_guard<std::mutex> lock(mutex_);
    Place& place = places_[(hash ^ hash >> 32) % places_.size()];
    if (place.key != key) {
      if (!encode_map(args, &place.map)) {
        place.key = {};
        return false;
      }
      place.key = key;
    }
    *map = place.map;
    return true;
  }

 private:
  using Key = std::array<int64_t, 7>;
  struct Place {
    Key key = {};  // matches no map, because its pitch is 0
    CUtensorMap map;
  };

  static Key key_of(const MapArgs& a) {
    const auto& [dtype, data, inner, outer, pitch, box_inner, box_outer, swizzle] = a;  // all
    return {
        reinterpret_cast<int64_t>(data), inner,  outer, pitch, int64_t{box_inner} << 32 | box_outer,
        static_cast<int64_t>(dtype),     swizzle};
  }

  std::mutex mutex_;
  std::array<Place, 1024> places_;
};

inline MapCache& map_cache() {
  static MapCache cache;
  return cache;
}

}  // namespace mixprec::cuda::sm90
