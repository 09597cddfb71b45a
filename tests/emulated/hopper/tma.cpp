// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor,
// cp.reduce.async.bulk.tensor, cp.async.bulk.commit_group, .wait_group" and "Tensors: Tiled mode,
// Out of Boundary Access".
#include <cuda_runtime.h>

#include <algorithm>
#include <deque>
#include <numeric>

#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

int line_bytes(const CUtensorMap& map) { return map.box_inner * map.element_size; }
int box_bytes(const CUtensorMap& map) { return map.box_outer * line_bytes(map); }

// Where byte `byte` of line `line` of a box at `at` lies.
uint32_t place(const CUtensorMap& map, uint32_t at, int line, int byte) {
  uint32_t linear = at + static_cast<uint32_t>(line * line_bytes(map) + byte);
  return map.swizzle ? swizzled(linear) : linear;
}

// f(place of 16 bytes) for the whole box, or one line of it.
template <class F>
void for_words(const CUtensorMap& map, uint32_t at, int line, const F& f) {
  for (int byte = 0; byte < line_bytes(map); byte += 16) f(place(map, at, line, byte));
}
template <class F>
void for_words(const CUtensorMap& map, uint32_t at, const F& f) {
  for (int line = 0; line < map.box_outer; ++line) for_words(map, at, line, f);
}

// The element in the tensor, or null outside of it.
uint8_t* element(const CUtensorMap& map, int64_t x, int64_t y) {
  if (x < 0 || x >= map.inner || y < 0 || y >= map.outer) return nullptr;
  return map.data + y * map.pitch + x * map.element_size;
}

void check_map(const CUtensorMap* map, const char* what) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) fail("%s: the tensor map is not aligned", what);
  if (map->magic != CUtensorMap::kEncoded) fail("%s: the tensor map was not encoded", what);
  // The pattern is one of 128-byte lines: narrower boxes are not modelled.
  if (map->swizzle && line_bytes(*map) != 128) fail("%s: swizzled lines are not 128 bytes", what);
}

std::vector<int> loading;  // per block: boxes that are on their way, to be asked at its end

// One box on its way into one block.
struct Load final : Task {
  CUtensorMap map;
  int x, y, rank;
  uint32_t at, barrier;
  std::vector<int> lines;  // that have not come yet

  Load(const CUtensorMap& map, int x, int y, int rank, uint32_t at, uint32_t barrier)
      : map(map), x(x), y(y), rank(rank), at(at), barrier(barrier), lines(map.box_outer) {
    std::iota(lines.begin(), lines.end(), 0);
    ++loading[rank];
  }

  void write_line(int line, std::vector<uint32_t>& words) {
    uint8_t* shared = shared_of(rank);
    for (int byte = 0; byte < line_bytes(map); byte += map.element_size) {
      const uint8_t* from = element(map, int64_t{x} + byte / map.element_size, int64_t{y} + line);
      uint8_t* to = shared + place(map, at, line, byte);
      if (from == nullptr) {
        std::memset(to, 0, map.element_size);
      } else {
        std::memcpy(to, from, map.element_size);
      }
    }
    for_words(map, at, line, [&](uint32_t word) { words.push_back(word); });
  }

  bool step() override {
    if (has_exited(rank)) fail("TMA load: block %d of the cluster has exited", rank);
    size_t count = 1 + draw(lines.size() * 2);  // often all that are left
    count = std::min(count, lines.size());
    std::vector<uint32_t> words;
    for (size_t i = 0; i < count; ++i) {
      size_t drawn = draw(lines.size());
      write_line(lines[drawn], words);
      lines[drawn] = lines.back();
      lines.pop_back();
    }
    land(rank, barrier, static_cast<uint32_t>(count * line_bytes(map)), words);
    if (lines.empty()) --loading[rank];
    return lines.empty();
  }
};

// One box on its way out of a block; a step reads it, the next one writes it.
struct Store {
  CUtensorMap map;
  int x, y, rank;
  uint32_t at;
  bool add;
  const void* key;        // who waits for it
  bool released = false;  // its thread knows that it was read
  std::vector<uint8_t> box = {};

  bool was_read() const { return !box.empty(); }

  void read() {
    box.resize(box_bytes(map));
    uint8_t* to = box.data();
    for_words(map, at, [&](uint32_t word) {
      std::memcpy(to, shared_of(rank) + word, 16);
      to += 16;
    });
  }

  // A reduction works on words of 16 bytes: it adds to what lies between the end of a row and that
  // of its last word. The PTX manual does not say so; an H100 does it.
  void write() const {
    CUtensorMap words = map;
    words.inner = (map.inner + 3) / 4 * 4;
    const uint8_t* from = box.data();
    for (int line = 0; line < map.box_outer; ++line) {
      for (int i = 0; i < map.box_inner; ++i, from += map.element_size) {
        int64_t column = int64_t{x} + i, row = int64_t{y} + line;
        uint8_t* to = element(add ? words : map, column, row);
        if (to == nullptr) continue;
        if (add) {
          float value, old;
          std::memcpy(&value, from, 4);
          std::memcpy(&old, to, 4);
          value += old;
          std::memcpy(to, &value, 4);
        } else {
          std::memcpy(to, from, map.element_size);
        }
      }
    }
  }
};

struct StoreTask final : Task {
  std::shared_ptr<Store> store;

  explicit StoreTask(std::shared_ptr<Store> store) : store(std::move(store)) {}

  bool step() override {
    bool last = store->was_read();
    last ? store->write() : store->read();
    wake(store->key);
    return last;
  }
};

// "bulk async-groups" are per thread.
using Group = std::vector<std::shared_ptr<Store>>;
struct Stores {
  Group open;
  std::deque<Group> committed;  // and not yet waited for
};
std::vector<Stores> stores;  // per thread
std::vector<std::shared_ptr<Store>> unread;

// Into the same offset of each block of the mask, signalling the mbarrier of the same offset there.
void load(const void* to, const CUtensorMap* map, const void* b, int x, int y, uint32_t blocks) {
  yield();
  check_map(map, "TMA load");
  uint32_t at = offset_of(to, box_bytes(*map), 128, "TMA load");
  uint32_t barrier = offset_of(b, 8, 8, "TMA load");
  if (blocks == 0 || blocks >> cluster_blocks() != 0) fail("TMA load: block mask %#x", blocks);
  for (int rank = 0; rank < cluster_blocks(); ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    if (has_exited(rank)) fail("TMA load: block %d of the cluster has exited", rank);
    check_for_tma(rank, barrier);
    for_words(*map, at, [&](uint32_t word) { begin_write(rank, word, "TMA load"); });
    add_task(std::make_unique<Load>(*map, x, y, rank, at, barrier));
  }
}

void issue_store(const CUtensorMap* map, const void* from, int x, int y, bool add) {
  const char* what = add ? "TMA add" : "TMA store";
  yield();
  check_map(map, what);
  if (add && !map->is_float) fail("TMA add: the tensor is not fp32");
  uint32_t at = offset_of(from, box_bytes(*map), 128, what);
  for_words(*map, at, [&](uint32_t word) { begin_read(block_rank(), word, what); });
  Store issued = {*map, x, y, block_rank(), at, add, &stores[thread_id()]};
  auto store = std::make_shared<Store>(std::move(issued));
  stores[thread_id()].open.push_back(store);
  unread.push_back(store);
  add_task(std::make_unique<StoreTask>(store));
}

}  // namespace

void clear_tma() {
  stores.assign(static_cast<size_t>(cluster_blocks()) * block_threads(), {});
  loading.assign(cluster_blocks(), 0);
  unread.clear();
}

void check_exit_of_tma(int rank) {
  if (loading[rank] != 0) {
    fail("block %d exits while %d TMA loads still write to it", rank, loading[rank]);
  }
  for (const auto& store : unread) {
    if (store->rank == rank && !store->released) {
      fail("block %d exits while a TMA store may read its shared memory", rank);
    }
  }
}

void prefetch_map(const CUtensorMap* map) { check_map(map, "prefetch.tensormap"); }

void tma_load(const void* to, const CUtensorMap* map, const void* b, int x, int y) {
  load(to, map, b, x, y, 1u << block_rank());
}
void tma_load_multicast(const void* to, const CUtensorMap* map, const void* b, int x, int y,
                        uint32_t blocks) {
  load(to, map, b, x, y, blocks);
}
void tma_store(const CUtensorMap* map, const void* from, int x, int y) {
  issue_store(map, from, x, y, false);
}
void tma_add(const CUtensorMap* map, const void* from, int x, int y) {
  issue_store(map, from, x, y, true);
}

void tma_store_commit() {
  Stores& s = stores[thread_id()];
  s.committed.push_back(std::move(s.open));
  s.open.clear();
}

// Only when this returns may anyone know that the memory was read: until then it counts as read.
void tma_store_wait_read(int groups) {
  std::deque<Group>& committed = stores[thread_id()].committed;
  size_t due = committed.size() - std::min(committed.size(), static_cast<size_t>(groups));
  auto were_read = [&] {
    return std::all_of(committed.begin(), committed.begin() + due, [](const Group& group) {
      return std::all_of(group.begin(), group.end(), [](auto& s) { return s->was_read(); });
    });
  };
  wait_until(&stores[thread_id()], were_read,
             [&] { return text("cp.async.bulk.wait_group.read %d", groups); });
  for (; due > 0; --due, committed.pop_front()) {
    for (const auto& store : committed.front()) {
      store->released = true;
      for_words(store->map, store->at, [&](uint32_t word) { end_read(store->rank, word); });
    }
  }
  std::erase_if(unread, [](const auto& store) { return store->released; });
}

}  // namespace cuda_on_cpu::sm90
