"""The examples that a kernel is compared on come in twins, and what makes calls different ones.

Which of them a call is compared on: test_triton_compile.py."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from cases import FP8, offset

from mixprec.ops._dispatch import self_check
from mixprec.ops._dispatch.op import OPS

# Their kernels take no sizes, or no GPU has a kernel for them.
WITHOUT = ("inv_scale", "clip_coef", "update_scale_", "update_delayed_scales_", "attention",
           "attention_backward", "gemm_simulated")  # fmt: skip
BF16, F32, E4M3 = torch.bfloat16, torch.float32, FP8[0]


def kind(op: str, *args: Any) -> self_check.Kind:
    return self_check.kind(OPS[op].arguments, args)


@pytest.mark.parametrize("op", sorted(OPS.keys() - set(WITHOUT)))
def test_examples_come_in_twins(op: str) -> None:
    """With the same dtypes and options there are a multiple of 16 elements and another number, and
    in each list both, and one that begins between multiples of 16 bytes."""
    twins = defaultdict(set)
    for example in OPS[op].examples("cpu"):
        first, (kernel, *_) = example[0], kind(op, *example)
        if isinstance(first, list):
            found = {(self_check._aligned(x), x.numel() % 16 == 0) for x in first}
            assert found >= {(True, True), (True, False), (False, True)}
        else:
            twins[kernel].add(first.numel() % 16 == 0)
    assert all(found == {False, True} for found in twins.values()), twins


CAST = E4M3, None, True, "tensor", True


def test_what_makes_another_kind() -> None:
    """Only what changes the binary: a model has few kinds, and a comparison for each."""
    x = torch.zeros(64, 512, dtype=BF16)
    same = kind("quantize", x, *CAST)
    for other in (torch.zeros(4096, 2048, dtype=BF16), torch.zeros(2, 128, 48, dtype=BF16)):
        assert kind("quantize", other, *CAST) == same
    for other in (x[:1], x[:63], x[:, :511].clone(), x[:, :1].clone(), x[:0], x.half(),
                  offset(x.clone())):  # fmt: skip
        assert kind("quantize", other, *CAST) != same
    assert kind("gemm", x, x.t(), None, None, None, BF16, False) != kind(
        "gemm", x, x.t().contiguous(), None, None, None, BF16, False
    )
    assert kind("pack", x, 4, 1, 2, None) == kind("pack", x, 4, 16, 2**40, None)
    assert kind("pack", x, 4, 1, 2, None) != kind("pack", x, 2, 1, 2, None)
    mx, rest = (x, "nvfp4", "rceil", True), (False, True)
    seed = torch.zeros(1).long()
    assert kind("quantize_mx", *mx, None, *rest) != kind("quantize_mx", *mx, seed, *rest)
    assert kind("unpack", x, x, 4, [2, 24], BF16) != kind("unpack", x, x, 4, [2, 25], BF16)
    assert kind("clip_coef", x, 1.0) == kind("clip_coef", x, 0.5)


def test_lists_are_sets_of_what_is_launched() -> None:
    one, flag = torch.ones(()), torch.zeros(())
    grads = [torch.zeros(n, dtype=BF16) for n in (48, 80, 5)]
    assert kind("unscale_", grads, one, flag, None) == kind(
        "unscale_", [*grads, *grads], one, flag, None
    )
    assert kind("unscale_", grads, one, flag, None) != kind("unscale_", grads[:2], one, flag, None)
