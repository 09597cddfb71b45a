"""The formulas of the optimizers, as csrc/math/step.h has them. RULE is the name of one, FLAG its
setting that is True or False."""

import triton
import triton.language as tl

# The row of a param in the table of constants, fp64: the step, the learning rate, four settings in
# the order of the op (no flags), and two numbers that a rule computes from them.
STEP = tl.constexpr(0)
LR = tl.constexpr(1)
SETTING = tl.constexpr(2)
DERIVED = tl.constexpr(6)
COLUMNS = 8
# The place of the flag among the settings of the op.
FLAGS = {"adamw": 4, "sgd": 3, "lion": None, "muon_direction": 1}


@triton.jit
def _power(beta, step):
    """beta^step in FP64 by binary exponentiation: only products, the same on every backend."""
    power = tl.full(step.shape, 1.0, tl.float64)
    factor = tl.full(step.shape, 1.0, tl.float64) * beta
    for _ in range(25):  # step is an fp32 count, exact up to 2^24
        power = tl.where((step & 1) == 1, power * factor, power)
        factor = factor * factor
        step = step >> 1
    return power


@triton.jit
def derive(row, inside, step, lr, first, second, RULE: tl.constexpr):
    """Store what an update would otherwise compute for every element; row, step: [params]."""
    if RULE == "adamw":
        one = tl.full(step.shape, 1.0, tl.float64)
        tl.store(row + DERIVED, lr / (one - _power(first, step)), mask=inside)
        tl.store(row + DERIVED + 1, one / tl.sqrt(one - _power(second, step)), mask=inside)


@triton.jit
def _setting(row, i: tl.constexpr, like):
    """Each constant is formed in fp64 and rounded once, to the width of the arithmetic."""
    return tl.load(row + SETTING + i).to(like.dtype)


@triton.jit
def _one_minus(row, i: tl.constexpr, like):
    return _complement(tl.load(row + SETTING + i)).to(like.dtype)


@triton.jit
def _complement(x):
    return tl.full((), 1.0, tl.float64) - x


@triton.jit
def formula(p, g, first, second, row, RULE: tl.constexpr, FLAG: tl.constexpr,
            HAS_STATE: tl.constexpr):  # fmt: skip
    """p and the two states after a step; those that a rule has not are what was given."""
    lr = tl.load(row + LR)
    if RULE == "adamw":  # beta1, beta2, eps, weight_decay; decoupled_weight_decay
        if FLAG:  # where decay is 0, an infinite p stays infinite
            decay = (lr * tl.load(row + SETTING + 3)).to(p.dtype)
            p = tl.where(decay != 0.0, p - p * decay, p)
        else:
            decay = _setting(row, 3, p)
            g = tl.where(decay != 0.0, g + p * decay, g)
        first = first + (g - first) * _one_minus(row, 0, p)
        beta2 = tl.load(row + SETTING + 1)
        second = second * beta2.to(p.dtype) + (g * g) * _complement(beta2).to(p.dtype)
        inv_sqrt_bc2 = tl.load(row + DERIVED + 1).to(p.dtype)
        eps = _setting(row, 2, p)
        if p.dtype == tl.float64:
            update = first / (tl.sqrt(second) * inv_sqrt_bc2 + eps)
        else:
            update = tl.div_rn(first, tl.sqrt_rn(second) * inv_sqrt_bc2 + eps)
        p = p - update * tl.load(row + DERIVED).to(p.dtype)
    elif RULE == "sgd":  # momentum, dampening, weight_decay; nesterov
        decay = _setting(row, 2, p)
        g = tl.where(decay != 0.0, g + p * decay, g)
        if HAS_STATE:
            momentum = _setting(row, 0, p)
            later = first * momentum + g * _one_minus(row, 1, p)
            first = tl.where(tl.load(row + STEP) == 1.0, g, later)
            g = g + first * momentum if FLAG else first
        p = p - g * lr.to(p.dtype)
    elif RULE == "lion":  # beta1, beta2, weight_decay
        decay = (lr * tl.load(row + SETTING + 2)).to(p.dtype)
        p = tl.where(decay != 0.0, p - p * decay, p)
        c = first + (g - first) * _one_minus(row, 0, p)
        sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))  # NaN stays
        sign = tl.where(c == 0.0, 0.0, sign)  # not -0: a p of -0 stays
        first = first + (g - first) * _one_minus(row, 1, p)
        p = p - sign * lr.to(p.dtype)
    else:  # muon_direction: momentum; nesterov
        weight = _one_minus(row, 0, g)
        first = first + (g - first) * weight
        p = first + (g - first) * weight if FLAG else first
    return p, first, second
