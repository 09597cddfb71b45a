// Repeats calls of the functions of kernels.cpp that test_sanitized.py has written to a file, over
// memory of exactly the right size. Exits with 1 where a byte differs from what it was after the
// call; the sanitizers exit with numbers of their own.
#include <cstdio>
#include <fstream>
#include <functional>
#include <list>
#include <map>
#include <string>

#include "kernels.cpp"

namespace {

struct Recording {
  std::ifstream file;
  // Of one call: memory that starts on a 16-byte boundary, and how far behind it the array does.
  std::list<std::pair<std::vector<char>, int64_t>> arrays;
  std::list<std::vector<void*>> lists;

  template <class T>
  T number() {
    T value = {};
    file.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }

  void* array() {
    int64_t size = number<int64_t>(), distance = number<int64_t>();
    if (size < 0) return nullptr;
    auto& memory = arrays.emplace_back(std::vector<char>(distance + size), distance).first;
    file.read(memory.data() + distance, size);
    return memory.data() + distance;
  }

  template <class T>
  T argument() {
    if constexpr (std::is_same_v<T, void**>) {
      std::vector<void*>& list = lists.emplace_back(number<int64_t>());
      for (void*& element : list) element = array();
      return list.data();
    } else if constexpr (std::is_pointer_v<T>) {
      return static_cast<T>(array());
    } else {
      static_assert(sizeof(T) == 8);
      return number<T>();
    }
  }

  bool arrays_are_as_recorded() {
    bool same = true;
    for (const auto& [memory, distance] : arrays) {
      std::vector<char> want(memory.size() - distance);
      file.read(want.data(), static_cast<std::streamsize>(want.size()));
      same = same && std::equal(want.begin(), want.end(), memory.begin() + distance);
    }
    arrays.clear();
    lists.clear();
    return same;
  }
};

template <class... Args>
int repeat(int (*function)(Args...), Recording& recording) {
  std::tuple<Args...> args{recording.argument<Args>()...};  // braces: in this order
  return std::apply(function, args);
}

#define FUNCTION(name) {#name, [](Recording& r) { return repeat(::name, r); }}
const std::map<std::string, std::function<int(Recording&)>> functions = {
    FUNCTION(unscale),         FUNCTION(grad_stats),    FUNCTION(amax),
    FUNCTION(quantize),        FUNCTION(dequantize),    FUNCTION(update),
    FUNCTION(inv_scale),       FUNCTION(clip_coef),     FUNCTION(update_scale),
    FUNCTION(scale_from_amax), FUNCTION(pack),          FUNCTION(unpack),
    FUNCTION(norm_quantize),   FUNCTION(norm_backward), FUNCTION(act_quantize),
    FUNCTION(act_backward),    FUNCTION(quantize_mx),   FUNCTION(dequantize_mx)};

}  // namespace

int main(int, char** arguments) {
  Recording recording = {std::ifstream(arguments[1], std::ios::binary), {}, {}};
  cuda_on_cpu::set_seed(1);
  bool failed = false;
  std::string name;
  while (std::getline(recording.file, name)) {
    bool same = functions.at(name)(recording) == 0 && recording.arrays_are_as_recorded();
    if (!same) std::printf("wrong: %s\n", name.c_str());
    failed |= !same;
    if (failed) break;
  }
  return failed ? 1 : 0;
}
