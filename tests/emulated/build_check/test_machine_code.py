"""What `make cuda` reads out of the Hopper GEMM's machine code, on small samples of it."""

from __future__ import annotations

import pytest
from emulated.build_check import machine_code as hopper
from emulated.shim.runner import ROOT

NAME = "sm90::gemm_kernel<sm90::Tile<{}, {}, 0, {}, {}, {}, {}, {}, {}> >"
PLAIN = hopper.Instance("Bf16", "Bf16", 0, 1, 128, 256, 2, 1, "direct")
SMALL = hopper.Instance("Fp16", "Fp16", 0, 0, 64, 128, 1, 1, "direct")
FP8 = hopper.Instance("E4m3", "E5m2", 0, 0, 256, 128, 2, 2, "promoted")
MOVES = "UTMALDG.2D [UR8]\nUTMASTG.2D [UR2]\nUTMAREDG.2D.ADD [UR2]\nSTSM.16.M88.4 [R6], R4\n"


def chunk(instruction: str, waits_after: int = 4) -> str:
    lines = [f"{instruction} R24, gdesc[UR28], R24 ;"] * 4
    lines.insert(waits_after, "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;")
    return "\n".join(lines) + "\n"


BF16_CODE = MOVES + "USETMAXREG.DEALLOC\n" + 3 * chunk("HGMMA.64x256x16.F32.BF16")
SMALL_CODE = MOVES + chunk("HGMMA.64x128x16.F32")
FP8_CODE = (
    MOVES.replace("UTMALDG.2D", "UTMALDG.2D.MULTICAST")
    + "USETMAXREG.DEALLOC\n"
    + 2 * (chunk("QGMMA.64x128x32.F32.E4M3.E5M2") + "FADD R1, R1, R2 ;\n" * 64)
)


def test_names_say_which_instance_it_is() -> None:
    assert hopper.instance(NAME.format("Bf16", "Bf16", 1, 128, 256, 2, 1, 0)) == PLAIN
    assert hopper.instance(NAME.format("E4m3", "E5m2", 0, 256, 128, 2, 2, 1)) == FP8
    assert hopper.instance("quantize_kernel<float, E4m3>") is None


def test_the_table_stands_for_these_instances() -> None:
    expected = hopper.expected(ROOT / "csrc" / "cuda" / "gemm" / "config" / "tile_configs.h")
    assert {PLAIN, SMALL, FP8} <= expected
    text = (ROOT / "csrc" / "cuda" / "gemm" / "config" / "tile_configs.h").read_text()
    sixteen, eight = text.count("{false, Acc"), text.count("{true, Acc")
    assert len(expected) == sixteen * 2 * 4 + eight * 4 > 50


@pytest.mark.parametrize(("it", "code"), [(PLAIN, BF16_CODE), (SMALL, SMALL_CODE), (FP8, FP8_CODE)])
def test_code_as_it_should_be(it: hopper.Instance, code: str) -> None:
    assert hopper.wrong(it, code) == []


@pytest.mark.parametrize(
    ("it", "code", "old", "new", "reason"),
    [
        (PLAIN, BF16_CODE, "UTMASTG", "STG", "no UTMASTG"),
        (PLAIN, BF16_CODE, "STSM", "STS", "no STSM"),
        (PLAIN, BF16_CODE, "64x256x16", "64x128x16", "no HGMMA.64x256x16"),
        (PLAIN, BF16_CODE, "USETMAXREG", "NOP", "no USETMAXREG"),
        (PLAIN, BF16_CODE, "UTMALDG.2D", "UTMALDG.2D.MULTICAST", "there is MULTICAST"),
        (SMALL, SMALL_CODE, "STSM", "USETMAXREG\nSTSM", "there is USETMAXREG"),
        (SMALL, SMALL_CODE, "STSM", "HMMA.16816\nSTSM", "there is HMMA"),
        (FP8, FP8_CODE, ".MULTICAST", "", "no MULTICAST"),
        (FP8, FP8_CODE, "QGMMA", "HGMMA", "there is HGMMA"),
        (FP8, FP8_CODE, "FADD", "FMUL", "0 FADD, promotion takes 64"),
    ],
)
def test_code_as_it_must_not_be(
    it: hopper.Instance, code: str, old: str, new: str, reason: str
) -> None:
    found = hopper.wrong(it, code.replace(old, new))
    assert any(reason in line for line in found), found


def test_serialised_products_are_seen() -> None:
    code = MOVES + "USETMAXREG\n" + chunk("HGMMA.64x256x16.F32.BF16", waits_after=1)
    assert hopper.wrong(PLAIN, code) == ["a wait after 1 wgmmas, which belong together in 4s"]
