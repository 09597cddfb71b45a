// Whose bf16 products a layer gets.
#pragma once

namespace mixprec::cpu {

// Whether they are torch's, where it computes them as gemm is defined: on a processor with AMX,
// which torch's use and ours do not. MIXPREC_PRODUCTS says otherwise: torch or mixprec.
bool products_are_torchs();

}  // namespace mixprec::cpu
