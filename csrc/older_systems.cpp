// What the headers of GCC 11 and later take from glibc 2.32 and libstdc++ 3.4.29, defined here, so
// that a wheel loads on older systems as well. Without it the linker takes what is missing from the
// libraries of torch, which export it by chance.
#include <cstdlib>
#include <new>
#include <sstream>

#ifdef __GLIBC__
// Read by std::shared_ptr: its counters are atomic also in a process with one thread.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif

#ifdef __GLIBCXX__
// Called where the size of an array overflows.
void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }
// C++20 has added to these, or moved what they had.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
#endif
