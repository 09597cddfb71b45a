"""What a call runs has been compared with the reference: the binaries that Triton makes for it are
those that it makes for the examples most like it, whose sizes are others.

Triton makes one for sizes and addresses that are multiples of 16, and another for those that are
not; both are made here, for every op.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
from emulated.agreement import OPS, TRITON, launcher
from emulated.triton_compiled.helpers import Launch, check_any, local_bytes, record_launches

from mixprec.ops._dispatch import example_inputs, example_products, self_check
from mixprec.triton_kernels import gemm

# In the place of the examples' sizes: these are more tiles, bands, rows and partial sums. Behind
# 252 FP32 numbers, not behind 253, an address can be a multiple of 16.
SIZES: dict[ModuleType, dict[str, Any]] = {
    example_inputs: {
        "BLOCK_SHAPES": ((128, 160), (131, 163)),
        "PACKED": ((32, 256), (31, 257)),
        "SHAPES": ((256, 384), (252, 391)),
        "ROWS": ((256, 384), (252, 391)),
        "NORMS": ((64, 304), (53, 305)),
        "NORM_GRADS": ((1024, 304), (131, 305)),
        "ACTIVATIONS": ((256, 384), (253, 391)),
        "GRADS": (65536, 5555, 16),
        "SUMMED": (262_144, 16_399, 16),
        "PARAMS": (1024, 77, 16),
    },
    example_products: {
        "SIZES": ((32, 96, 128), (13, 21, 35)),
        "CLASSES": ((16, 2080), (13, 2075)),
    },
}
# In odd sizes a thread has 64 addresses of its own.
SPILL = ("quantize_tiles_kernel",)
SCALARS = ("inv_scale", "clip_coef", "update_scale_")  # their kernels take no sizes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """On a GPU with 132 multiprocessors."""
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, 132))
    return record_launches(monkeypatch)


def calls(name: str) -> list[list[Any]]:
    """The examples in other sizes; of many every third, along the diagonal (triton_interpreter
    runs all of them)."""
    with pytest.MonkeyPatch.context() as patch:
        for module, sizes in SIZES.items():
            for constant, values in sizes.items():
                patch.setattr(module, constant, values)
        every = list(OPS[name].examples("cpu"))
    return [c for i, c in enumerate(every) if len(every) <= 6 or (i + i // 3) % 3 == 1]


def sizes_divisible(one: Launch) -> set[bool]:
    """Whether integers, that is sizes, are known to be multiples of 16."""
    head = one.compiled.asm["ttir"].split("tt.func", 1)[1].split(" attributes ", 1)[0]
    return {"divisibility" in x for x in re.findall(r"%\w+: i\d+ (\{.*?\})?", head)}


@pytest.mark.parametrize("name", TRITON)
def test_what_a_call_runs_has_been_compared(launched: list[Launch], name: str) -> None:
    op = OPS[name]
    examples = [(self_check.kind(op.arguments, e), e) for e in op.examples("cpu")]
    compiled: dict[int, set[int]] = {}

    def binaries(args: list[Any]) -> set[int]:
        first = len(launched)
        launcher(name)(*args)
        assert len(launched) > first
        return {id(one.compiled) for one in launched[first:]}

    for call in calls(name):
        kinds = self_check.most_like(self_check.kind(op.arguments, call), {k for k, _ in examples})
        compared: set[int] = set()
        for i, (kind, example) in enumerate(examples):
            if kind in kinds:
                compiled[i] = compiled.get(i) or binaries(example)
                compared |= compiled[i]
        assert binaries(call) <= compared, [x for x in call if not isinstance(x, list)]

    different = {id(one.compiled): one for one in launched}.values()
    if name not in SCALARS:
        assert set().union(*map(sizes_divisible, different)) == {False, True}
    for one in different:
        assert not one.keywords.get("SOFT_CAST")
        if not name.startswith("gemm"):
            check_any(one)
            assert one.name in SPILL or local_bytes(one.compiled) == 0, one.name
