// The loops, and the formulas they use: included before the instruction set is chosen.
#pragma once

#include "block_cast.h"
#include "loops.h"
#include "math/activation.h"
#include "math/cross_entropy.h"
#include "math/exp.h"
#include "math/norm.h"
#include "math/pack.h"
#include "math/philox.h"
#include "math/rotary.h"
#include "math/rounding.h"
#include "math/scale.h"
#include "math/state8.h"
#include "math/tensor_core.h"
#include "math/unscale.h"
#include "step.h"
#include "vectors.h"
