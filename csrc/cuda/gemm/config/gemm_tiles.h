// The order in which the blocks of the persistent GEMM compute the tiles of C, for host and device.
#pragma once

#include "math/hd.h"

namespace mixprec::cuda {

struct GemmTiles {
  int m_tiles, n_tiles;  // of C; m_tiles counts clusters, whose blocks are adjacent along M
  int splits;            // of K
  int group;             // consecutive tiles down a column, which share b in L2
};

struct GemmTile {
  int m, n, split;
};

MIXPREC_HD int64_t tile_count(const GemmTiles& t) {
  return int64_t{t.m_tiles} * t.n_tiles * t.splits;
}

// Splits are innermost; then bands of `group` tile rows, column by column.
MIXPREC_HD GemmTile tile_at(const GemmTiles& t, int64_t index) {
  int split = static_cast<int>(index % t.splits);
  int64_t tile = index / t.splits, per_band = int64_t{t.group} * t.n_tiles;
  int first = static_cast<int>(tile / per_band) * t.group;
  int height = t.m_tiles - first < t.group ? t.m_tiles - first : t.group;
  int within = static_cast<int>(tile % per_band);
  return {first + within % height, within / height, split};
}

}  // namespace mixprec::cuda
