// A pool of whole pages for large blocks on the CPU. The pages of a freed block stay for the next
// one: a page fault costs more than what most ops do with the page. Pages of several free blocks
// can become one block, so that the pool never holds more pages than were in use at one moment.
#pragma once

#include <cstdint>

namespace mixprec::page_pool {

// A block of at least this many bytes, in whole pages; null if the system has no memory.
void* allocate(int64_t bytes);

// Whether this is a block in use of the pool.
bool owns(void* block);

void free(void* block);

struct Usage {
  int64_t allocated;  // bytes of the blocks in use
  int64_t reserved;   // with the free blocks
};
Usage usage();

// Returns free blocks to the system, until they hold `bytes` or less.
void shrink(int64_t bytes);

// The most bytes that free blocks hold from now on.
void set_limit(int64_t bytes);

}  // namespace mixprec::page_pool
