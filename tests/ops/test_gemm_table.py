"""Which gemm runs on a GPU: what torch's own can do exactly, measured entries, the user's entries.

Played on the CPU: the tensors are CPU tensors, and `call` is told that they are CUDA's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_calls import A8, B8, BF16, BLOCKS, CAN, CANNOT, E4M3, HALF, ONE, ROW, arguments, operands

import mixprec
from mixprec.ops._dispatch import gemm_table, library
from mixprec.ops.gemm import gemm_accumulate_op, gemm_op


def chosen(args: tuple[Any, ...]) -> str:
    return gemm_op.backend("cuda", 0, args)


def on_gpu(*args: Any) -> Any:
    """A call as for tensors on a GPU."""
    try:
        return gemm_op.choose("cuda", 0, args)(*args)
    except Exception:
        gemm_op.check(*args)
        raise


def test_without_an_entry_torch_where_it_is_exact_else_ours(gpu: pytest.MonkeyPatch) -> None:
    assert all(chosen(args) == "vendor" for args in CAN.values())
    assert all(chosen(args) == "cuda" for args, _ in CANNOT.values())
    assert all(chosen(args) == "cuda" for args in BLOCKS.values()), "torch's is not compared"
    with mixprec.use_backend("vendor"):
        assert all(chosen(args) == "vendor" for args in BLOCKS.values())
    acc = torch.zeros(32, 48)
    assert gemm_accumulate_op.backend("cuda", 0, (acc, A8, B8, ONE, ONE)) == "vendor"
    assert gemm_accumulate_op.backend("cuda", 0, (acc, A8, B8, ROW, ONE)) == "cuda"
    gpu.setattr(library, "capability", lambda index: (8, 0))
    gemm_op._able.clear()
    assert chosen(CAN["bf16"]) == "vendor"
    assert chosen(CAN["fp8"]) == "triton", "the CUDA kernel is Hopper's"
    gpu.setattr(library, "TRITON_ERROR", "not installed")
    gemm_op._able.clear()
    assert chosen(CAN["fp8"]) == "reference"


def test_bad_arguments_are_named_by_the_check(gpu: pytest.MonkeyPatch) -> None:
    """Choosing looks at shapes: what it trips over, the op's own check explains."""
    a, b = operands(BF16)
    cases = {r"a must be \[M, K\]": (a[0], b), "agree in K": (a, b[:3])}
    cases |= {"a and b must both be": (a, b.half()), "b must be a torch.Tensor": (a, None)}
    for message, bad in cases.items():
        with pytest.raises((ValueError, TypeError), match=f"^gemm: .*{message}"):
            on_gpu(*arguments(*bad, BF16))


TILE = {"block_m": 64, "block_n": 128, "block_k": 64, "warps": 4, "stages": 3}
ENTRIES = {
    "9.0": {"16-bit thin": ("cuda", None), "fp8 small": ("triton", TILE)},
    "8.0": {"fp8 medium": ("cuda", None)},
}


def test_entries_decide_for_their_arch_family_and_size(
    gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "entries.json").write_text(json.dumps(ENTRIES))
    gpu.setenv("MIXPREC_TUNED", str(tmp_path / "entries.json"))
    large = operands(BF16, 80, 96, 64)
    assert chosen(CAN["bf16"]) == "cuda"
    assert chosen(arguments(*large, BF16)) == "vendor", "of another size"
    assert chosen(arguments(*operands(E4M3, 80, 96, 64), BF16, ONE, ONE)) == "triton"
    assert chosen(CAN["fp8"]) == "vendor"
    gpu.setattr(library, "has_cuda_kernel", lambda op: False)
    gemm_op._able.clear()
    assert chosen(CAN["bf16"]) == "vendor", "its variant cannot run: the usual order"


DAMAGED = [b"", b"{", b"[1]", b'{"9.0": 1}', b'{"9.0": {"fp8 thin": ["cuda"]}}', b"[" * 100_000]
DAMAGED += [b"\xff\xfe", b'{"9.0": {"fp8 thin": ["reference", null]}}']


def test_the_users_entries_replace_ours(gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, users = tmp_path / "ours.json", tmp_path / "users.json"
    ours.write_text(
        json.dumps({"9.0": {"16-bit thin": ("cuda", None), "fp8 thin": ("cuda", None)}})
    )
    users.write_text(json.dumps({"9.0": {"16-bit thin": ("vendor", None)}}))
    gpu.setattr(gemm_table, "SHIPPED", ours)
    assert (chosen(CAN["bf16"]), chosen(CAN["fp8"])) == ("cuda", "cuda")
    gpu.setenv("MIXPREC_TUNED", str(users))
    gemm_table.table.cache_clear()
    gemm_op._chosen.clear()
    assert (chosen(CAN["bf16"]), chosen(CAN["fp8"])) == ("vendor", "cuda")
    users.write_text("{")
    gemm_table.table.cache_clear()
    gemm_op._chosen.clear()
    assert chosen(CAN["bf16"]) == "cuda", "a damaged file replaces nothing"


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_named_once_and_ignored(
    gpu: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    path = tmp_path / "entries.json"
    path.write_bytes(text)
    gpu.setenv("MIXPREC_TUNED", str(path))
    with caplog.at_level(logging.WARNING, "mixprec"):
        assert [chosen(CAN["bf16"]) for _ in range(3)] == ["vendor"] * 3
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert "mixprec.bench tune" in caplog.text


def test_size_classes() -> None:
    sizes = {
        "thin": [(64, 4096, 4096, 2), (4096, 1, 4096, 1), (0, 0, 0, 2)],
        "small": [(65, 4096, 4096, 2), (1448, 1448, 1448, 2)],
        "unaligned": [(2047, 3073, 8192, 2), (2048, 3080, 8192, 1), (1448, 1448, 1448, 1)],
        "medium": [(2048, 3080, 8192, 2), (1456, 1448, 1448, 2), (4096, 4096, 4096, 2)],
        "large": [(4096, 4096, 4112, 1)],
    }
    for size, cases in sizes.items():
        assert [gemm_table.size_class(*case) for case in cases] == [size] * len(cases)


@pytest.fixture
def vendor_on_cpu() -> Iterator[list[str]]:
    """The vendor variant for CPU tensors; yields the names of the variants that ran."""
    ran: list[str] = []

    def gemm_vendor(*args: Any) -> torch.Tensor:
        ran.append("vendor")
        return gemm_op.checked_vendor(*args)

    library = torch.library.Library("mixprec", "IMPL")
    library.impl("gemm_vendor", gemm_vendor, "CPU")
    yield ran
    library._destroy()


def test_the_choice_compiles_into_one_graph(
    gpu: pytest.MonkeyPatch, vendor_on_cpu: list[str], tmp_path: Path
) -> None:
    """fullgraph, also where the table is first read while tracing; another choice is traced anew.
    (The variant "cuda" is the op mixprec::gemm, which has a kernel for these tensors too.)"""
    (tmp_path / "entries.json").write_text(json.dumps(ENTRIES))
    gpu.setenv("MIXPREC_TUNED", str(tmp_path / "entries.json"))

    @torch.compile(fullgraph=True, backend="eager")
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return on_gpu(a, b, None, None, None, BF16, False)

    thin, larger = operands(BF16), operands(BF16, 80, 96, 64)
    assert torch.equal(product(*thin), thin[0] @ thin[1])
    assert not vendor_on_cpu, "the entry says cuda"
    assert torch.equal(product(*larger), larger[0] @ larger[1])
    assert vendor_on_cpu == ["vendor"]
    assert torch.equal(product(*thin), thin[0] @ thin[1])
    assert vendor_on_cpu == ["vendor"]


def test_sizes_that_change_compile_too(gpu: pytest.MonkeyPatch, vendor_on_cpu: list[str]) -> None:
    """With M left open, the choice is made for all of a size class at once."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=counted, dynamic=True)
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return on_gpu(a, b, ONE, ONE, None, BF16, False)

    for m in (80, 96, 112):
        a, b = operands(E4M3, m, 96, 64)
        assert torch.equal(product(a, b), (a.float() @ b.float()).bfloat16())
    assert len(graphs) == 1
    assert vendor_on_cpu == ["vendor"] * 3


def test_autocast_does_not_reach_into_the_variant(vendor_on_cpu: list[str]) -> None:
    args = arguments(*operands(HALF), HALF)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(*args[:2]).dtype == BF16, "what has to be kept out"
        assert gemm_op._vendor(*args).dtype == HALF
        assert torch.ops.mixprec.gemm_vendor(*args[:5], BF16, False).dtype == BF16
    assert vendor_on_cpu == ["vendor"]


def test_the_raw_variant_refuses_what_it_cannot_do(vendor_on_cpu: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"^gemm: torch.mm takes no scales for bfloat16"):
        torch.ops.mixprec.gemm_vendor(*CANNOT["a scale"][0])
    with pytest.raises(ValueError, match=r"^gemm: a \[M, K\] and b \[K, N\] must agree in K"):
        torch.ops.mixprec.gemm_vendor(*arguments(A8, B8[:32], BF16, ONE, ONE))
