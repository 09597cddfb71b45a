// All that is under way beside the threads, and in which order it happens.
#include "units.h"

namespace cuda_on_cpu::sm90 {

namespace {

std::vector<std::unique_ptr<Task>> tasks;

struct All final : Units {
  std::vector<size_t> able;

  void begin_cluster() override {
    tasks.clear();
    clear_words();
    clear_barriers();
    clear_tma();
    clear_wgmma();
    clear_warps();
  }
  bool can_step() override {
    able.clear();
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i]->can_step()) able.push_back(i);
    }
    return !able.empty();
  }
  void step() override {
    size_t i = able[draw(able.size())];
    if (!tasks[i]->step()) return;
    tasks[i] = std::move(tasks.back());
    tasks.pop_back();
  }
  void block_exits(int rank) override {
    check_exit_of_wgmma(rank);
    check_exit_of_tma(rank);
    check_exit_of_barriers(rank);
    check_exit_of_warps(rank);
  }
};

All all;
const bool attached = [] {
  attach(&all);
  return true;
}();

}  // namespace

void add_task(std::unique_ptr<Task> task) { tasks.push_back(std::move(task)); }

}  // namespace cuda_on_cpu::sm90
