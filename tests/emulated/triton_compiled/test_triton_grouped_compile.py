"""The grouped GEMM of Triton compiled ahead of time, without a GPU, with the tiles that would be
used: one launch for all groups, whose number of programs does not depend on offs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import FP8, name, pairwise
from emulated.triton_compiled.helpers import Launch, local_bytes, record_launches

from mixprec.triton_kernels import configs, gemm, gemm_grouped

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
S, E, K, N = 2048, 4, 512, 512
PAIRS = ((BF16, BF16), (E4M3, E4M3), (E4M3, E5M2))
SCALES: dict[str, tuple[Any, Any, Any, Any]] = {
    "none": (None, None, None, None),
    "rows": ((S, 1), (E, 1, N), (E, K, 1), (E, 1, N)),
    "blocks": ((S, 4), (E, 4, 4), (K, 16), (16, N)),
    "groups": ((), (E, 1, 1), (E, 1, 1), ()),
}


def ones(shape: Any) -> torch.Tensor | None:
    return None if shape is None else torch.ones(shape)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def on(capability: int) -> list[Launch]:
        monkeypatch.setattr(gemm, "_gpu", lambda _: (capability, 100))
        return record_launches(monkeypatch, capability)

    return on


@pytest.mark.parametrize(
    ("capability", "scales", "pair"), pairwise((80, 90, 100), tuple(SCALES), PAIRS), ids=name
)
def test_one_launch_without_spills(launched: Any, capability: int, scales: str, pair: Any) -> None:
    launches = launched(capability)
    a, b = torch.zeros(S, K).to(pair[0]), torch.zeros(E, N, K).to(pair[1]).transpose(1, 2)
    g, offs = torch.zeros(S, N).to(pair[1]), torch.tensor([S // E] * E, dtype=torch.int32)
    sa, sb, ka, kb = map(ones, SCALES[scales])
    gemm_grouped.gemm_grouped(a, b, sa, sb, offs, BF16, False)
    gemm_grouped.gemm_grouped(a.t(), g, ka, kb, offs, BF16, False)
    if pair[0] == BF16 or capability == 90:
        gemm_grouped.gemm_grouped_accumulate_(torch.zeros(E, K, N), a.t(), g, ka, kb, offs)
    assert {one.name for one in launches} == {"gemm_grouped_kernel"}
    programs = launches[0].grid[0]
    tile = launches[0].keywords["BLOCK_M"], launches[0].keywords["BLOCK_N"]
    assert programs == (S // tile[0] + E + 1) * -(-N // tile[1])
    for one in launches:
        ptx = one.compiled.asm["ptx"]
        instruction = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}[capability]
        assert instruction in ptx
        assert ".local" not in ptx
        assert one.compiled.metadata.shared <= configs.SHARED_KIB[capability] * 1024
        of_matrices = re.findall(r"tt\.addptr .*, tensor<\d+x\d+x(i\d+)>", one.compiled.asm["ttir"])
        assert set(of_matrices) == {"i64"}
        if capability < 100:
            # Decoded in integers, with scales of blocks along S.
            most = 72 if (capability, scales) == (80, "blocks") and pair[0] in FP8 else 0
            assert local_bytes(one.compiled) <= most, "registers are spilled"


@pytest.mark.parametrize("capability", [90])
def test_groups_along_k_are_read_in_lines(launched: Any, capability: int) -> None:
    """FP8 with S next to each other in memory: 16 codes a load, where groups begin at lines."""
    launches = launched(capability)
    a, b = torch.zeros(K, S).to(E4M3), torch.zeros(N, S).to(E5M2).t()
    offs = torch.tensor([S // E] * E, dtype=torch.int32)
    gemm_grouped.gemm_grouped(a, b, torch.ones(()), torch.ones(()), offs, BF16, False)
    assert "cp.async.cg.shared.global" in launches[0].compiled.asm["ptx"]
