// Where wgmma finds an operand, from the bits of its descriptor.
#pragma once

#include <vector>

#include "model.h"

namespace cuda_on_cpu::sm90 {

constexpr int kStepBytes = 32;  // of K in one wgmma

constexpr int element_bytes(Format f) { return f == Format::bf16 || f == Format::fp16 ? 2 : 1; }

// The places in shared memory of the operand's 16-byte words. K-major: for each of `rows` rows 2
// words along K; MN-major: for each k the words along M or N. Ends the launch if some lie outside.
std::vector<uint32_t> operand_words(uint64_t descriptor, Format format, bool mn_major, int rows,
                                    const char* who);

// The words as floats: rows [first, first + rows) of all_rows, `row_stride` and `k_stride` apart.
void decode(const uint8_t* shared, const std::vector<uint32_t>& words, Format format, bool mn_major,
            int all_rows, int first, int rows, float* to, int row_stride, int k_stride);

}  // namespace cuda_on_cpu::sm90
