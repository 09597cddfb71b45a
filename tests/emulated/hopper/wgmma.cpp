// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async, wgmma.fence,
// wgmma.commit_group, wgmma.wait_group, Async Proxy". Each warp's 16 rows are computed on their
// own, some time after that warp has issued; registers hold NaN until that warp waits for them.
#include <cuda_runtime.h>

#include <algorithm>
#include <deque>

#include "math/tensor_core.h"
#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

constexpr uint32_t kPoison = 0xFFFFA5A5;  // a NaN of its own
constexpr unsigned kAll = 0xFFFFFFFFu;
bool truncate_sums = false;

// The accumulators of a warpgroup, [64][n], between the first wgmma on them and the wait.
struct Sums {
  int n;
  std::vector<float> value;
};

struct Op {
  Shape shape;
  uint64_t desc_a, desc_b;
  bool accumulate, chained;
  std::shared_ptr<Sums> sums;
  std::vector<uint32_t> a_words, b_words;
  bool together = draw(2) == 0;  // starts only when all four warps have issued it
  int issued[4] = {}, released = 0;
};

struct InFlight {
  float* d;
  std::shared_ptr<Sums> sums;
  int64_t last;  // number of the last wgmma on it
};

struct Thread {
  int64_t issued = 0;
  std::deque<int64_t> groups;  // committed: number of wgmmas issued up to each
  bool fenced = false;
  std::vector<InFlight> flying;
};

struct Warpgroup {
  int rank = 0;
  int64_t first = 0;  // number of ops.front()
  std::deque<Op> ops;
  int64_t done[4] = {}, released[4] = {};

  Op& op(int64_t number) { return ops[static_cast<size_t>(number - first)]; }
};

std::vector<Thread> threads;
std::vector<std::unique_ptr<Warpgroup>> warpgroups;

int warpgroups_per_block() { return (block_threads() + 127) / 128; }
Warpgroup& my_warpgroup() {
  return *warpgroups[block_rank() * warpgroups_per_block() + thread_of_block() / 128];
}
int warp() { return thread_of_block() / 32 % 4; }

// The words that warp w reads of a: its rows. MN-major: 16 rows are 2 of the 8 words of each k.
template <class F>
void for_words_of(const Op& op, int w, const F& f) {
  for (size_t i = 0; i < op.a_words.size(); ++i) {
    int owner = static_cast<int>(op.shape.a_mn_major ? i % 8 / 2 : i / 32);
    if (owner == w) f(op.a_words[i]);
  }
  for (uint32_t word : op.b_words) f(word);
}

// As the hardware does it.
float tensor_core_sum(float sum, const float* a, const float* b, int n, const Shape& shape) {
  auto least = [](Format f) {
    return mixprec::min_exponent(f == Format::e4m3 ? mixprec::Dtype::e4m3 : mixprec::Dtype::e5m2);
  };
  constexpr auto core = mixprec::tensor_core(mixprec::Gpu::hopper, mixprec::Dtype::e4m3);
  return mixprec::tensor_core_step(core, a, 1, least(shape.a), b, n, least(shape.b), kStepBytes,
                                   sum);
}

void multiply_rows(const float* a, const float* b, float* c, int depth, int n) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < depth; ++k) {
      float x = a[row * depth + k];
      for (int col = 0; col < n; ++col) c[row * n + col] += x * b[k * n + col];
    }
  }
}

void compute(Op& op, int rank, int w) {
  static float a[16 * kStepBytes], b[kStepBytes * 256];
  const uint8_t* shared = shared_of(rank);
  int depth = kStepBytes / element_bytes(op.shape.a), n = op.shape.n;
  decode(shared, op.a_words, op.shape.a, op.shape.a_mn_major, 64, 16 * w, 16, a, depth, 1);
  decode(shared, op.b_words, op.shape.b, op.shape.b_mn_major, n, 0, n, b, 1, n);
  float* c = op.sums->value.data() + static_cast<size_t>(16 * w) * n;
  if (!op.accumulate) std::fill(c, c + 16 * n, 0.0f);
  if (truncate_sums && element_bytes(op.shape.a) == 1) {
    for (int i = 0; i < 16 * n; ++i) {
      c[i] = tensor_core_sum(c[i], a + i / n * depth, b + i % n, n, op.shape);
    }
  } else {
    multiply_rows(a, b, c, depth, n);
  }
}

// The wgmmas of one warp, in the order of their issue.
struct WarpTask final : Task {
  Warpgroup* group;
  int w;

  WarpTask(Warpgroup* group, int w) : group(group), w(w) {}

  bool can_step() const override {
    int64_t next = group->done[w];
    if (next >= group->first + static_cast<int64_t>(group->ops.size())) return false;
    const Op& op = group->op(next);
    int count = op.issued[w];
    if (op.together) count = *std::min_element(op.issued, op.issued + 4);
    return count == 32;
  }
  bool step() override {
    compute(group->op(group->done[w]), group->rank, w);
    ++group->done[w];
    wake(&group->done[w]);
    return false;
  }
};

// Where register i of this thread belongs in Sums ("Register Fragments", accumulator D).
size_t place_of(int i, int n) {
  int t = thread_of_block() % 128;
  int row = t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4, col = i / 4 * 8 + t % 4 * 2 + i % 2;
  return static_cast<size_t>(row) * n + col;
}

void check_poison(const InFlight& f) {
  for (int i = 0; i < f.sums->n / 2; ++i) {
    uint32_t bits;
    std::memcpy(&bits, f.d + i, 4);
    if (bits != kPoison) fail("wgmma: accumulators were written while a wgmma runs on them");
  }
}

InFlight* find_flying(Thread& thread, float* d, int n) {
  for (InFlight& f : thread.flying) {
    if (f.d == d && f.sums->n == n) return &f;
    if (d < f.d + f.sums->n / 2 && f.d < d + n / 2) {
      fail("wgmma: accumulators overlap those of another shape that is under way");
    }
  }
  return nullptr;
}

void forget_released(Warpgroup& group) {
  while (!group.ops.empty() && group.ops.front().released == 4) {
    group.ops.pop_front();
    ++group.first;
  }
}

}  // namespace

void truncate_fp8_sums(bool on) { truncate_sums = on; }

void clear_wgmma() {
  threads.assign(static_cast<size_t>(cluster_blocks()) * block_threads(), {});
  warpgroups.clear();
  for (int rank = 0; rank < cluster_blocks(); ++rank) {
    for (int g = 0; g < warpgroups_per_block(); ++g) {
      warpgroups.push_back(std::make_unique<Warpgroup>());
      warpgroups.back()->rank = rank;
      for (int w = 0; w < 4; ++w) {
        add_task(std::make_unique<WarpTask>(warpgroups.back().get(), w));
      }
    }
  }
}

void check_exit_of_wgmma(int rank) {
  for (int g = 0; g < warpgroups_per_block(); ++g) {
    if (!warpgroups[rank * warpgroups_per_block() + g]->ops.empty()) {
      fail("block %d exits while wgmmas run that were not waited for", rank);
    }
  }
}

void wgmma(const Shape& shape, float* d, uint64_t desc_a, uint64_t desc_b, bool accumulate) {
  if (block_threads() % 128 != 0) fail("wgmma: the block is not made of warpgroups");
  Thread& thread = threads[thread_id()];
  Warpgroup& group = my_warpgroup();
  int64_t number = thread.issued++;
  InFlight* flying = find_flying(thread, d, shape.n);
  if (flying == nullptr && !thread.fenced) {
    fail("wgmma: no wgmma.fence since the accumulators were used by other instructions");
  }
  if (number == group.first + static_cast<int64_t>(group.ops.size())) {
    bool chained = flying != nullptr;
    Sums fresh = {shape.n, std::vector<float>(chained ? 0 : size_t{64} * shape.n)};
    group.ops.push_back({shape, desc_a, desc_b, accumulate, chained,
                         chained ? flying->sums : std::make_shared<Sums>(std::move(fresh)),
                         operand_words(desc_a, shape.a, shape.a_mn_major, 64, "wgmma, a"),
                         operand_words(desc_b, shape.b, shape.b_mn_major, shape.n, "wgmma, b")});
  }
  Op& op = group.op(number);
  if (!(op.shape == shape) || op.desc_a != desc_a || op.desc_b != desc_b ||
      op.accumulate != accumulate) {
    fail("wgmma: the threads of a warpgroup issue different instructions");
  }
  if (op.chained ? flying == nullptr || flying->sums != op.sums : flying != nullptr) {
    fail("wgmma: the threads of a warpgroup use different accumulators");
  }
  if (op.issued[warp()]++ == 0) {
    for_words_of(op, warp(), [&](uint32_t word) { begin_read(block_rank(), word, "wgmma"); });
  }
  if (flying != nullptr) {
    check_poison(*flying);
    flying->last = number;
    return;
  }
  thread.flying.push_back({d, op.sums, number});
  for (int i = 0; i < shape.n / 2; ++i) {
    if (accumulate) op.sums->value[place_of(i, shape.n)] = d[i];
    std::memcpy(d + i, &kPoison, 4);
  }
}

void wgmma_fence() { threads[thread_id()].fenced = true; }

void wgmma_commit() {
  Thread& thread = threads[thread_id()];
  thread.groups.push_back(thread.issued);
}

// Returns when all but the last `groups` groups of the warp are done. Only then may anyone know
// that they have read their operands.
void wgmma_wait(int groups) {
  Thread& thread = threads[thread_id()];
  Warpgroup& group = my_warpgroup();
  int64_t due = 0;
  if (thread.groups.size() > static_cast<size_t>(groups)) {
    due = thread.groups[thread.groups.size() - 1 - groups];
  }
  due = std::max(due, group.released[warp()]);
  const uint64_t* all =
      warp_exchange(kAll, static_cast<uint64_t>(thread.issued * 1000 + due % 1000));
  for (int l = 0; l < 32; ++l) {
    if (all[l] != static_cast<uint64_t>(thread.issued * 1000 + due % 1000)) {
      fail("wgmma.wait_group: the lanes of the warp have issued different wgmmas");
    }
  }
  int64_t& done = group.done[warp()];
  wait_until(
      &done, [&] { return done >= due; },
      [&] {
        return text("wgmma.wait_group %d, %lld of %lld wgmmas done", groups, (long long)done,
                    (long long)due);
      });
  for (int64_t& released = group.released[warp()]; released < due; ++released) {
    Op& op = group.op(released);
    for_words_of(op, warp(), [&](uint32_t word) { end_read(block_rank(), word); });
    ++op.released;
  }
  forget_released(group);
  std::erase_if(thread.flying, [&](const InFlight& f) {
    if (f.last >= due) return false;
    check_poison(f);
    for (int i = 0; i < f.sums->n / 2; ++i) f.d[i] = f.sums->value[place_of(i, f.sums->n)];
    return true;
  });
  while (thread.groups.size() > static_cast<size_t>(groups)) thread.groups.pop_front();
  thread.fenced = false;
}

}  // namespace cuda_on_cpu::sm90
