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


def chunk(instruction: str) -> str:
    return 4 * f"{instruction} R24, gdesc[UR28], R24 ;\n" + "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"


CLUSTER_BARRIER = "MEMBAR.ALL.GPU ;\nERRBAR ;\nUCGABAR_ARV ;\nUCGABAR_WAIT ;\nCCTL.IVALL ;\n"
CODE = {
    PLAIN: MOVES + "USETMAXREG.DEALLOC\n" + 3 * chunk("HGMMA.64x256x16.F32.BF16"),
    SMALL: MOVES + chunk("HGMMA.64x128x16.F32"),
    FP8: MOVES.replace("UTMALDG.2D", "UTMALDG.2D.MULTICAST")
    + 2 * CLUSTER_BARRIER
    + "USETMAXREG.DEALLOC\n"
    + 2 * (chunk("QGMMA.64x128x32.F32.E4M3.E5M2") + "FADD R1, R1, R2 ;\n" * 64),
}


def test_names_and_the_table_say_which_instances_there_are() -> None:
    assert hopper.instance(NAME.format("Bf16", "Bf16", 1, 128, 256, 2, 1, 0)) == PLAIN
    assert hopper.instance(NAME.format("E4m3", "E5m2", 0, 256, 128, 2, 2, 1)) == FP8
    assert hopper.instance("quantize_kernel<float, E4m3>") is None
    expected = hopper.expected(ROOT / "csrc" / "cuda" / "gemm" / "config" / "tile_configs.h")
    assert expected >= {*CODE}


@pytest.mark.parametrize(
    ("it", "old", "new", "reason"),
    [
        (PLAIN, "UTMASTG", "STG", "no UTMASTG"),
        (PLAIN, "STSM", "STS", "no STSM"),
        (PLAIN, "64x256x16", "64x128x16", "no HGMMA.64x256x16"),
        (PLAIN, "USETMAXREG", "NOP", "no USETMAXREG"),
        (PLAIN, "UTMALDG.2D", "UTMALDG.2D.MULTICAST", "there is MULTICAST"),
        (PLAIN, "R24 ;\n", "R24 ;\nWARPGROUP.DEPBAR\n", "a wait after 1 wgmmas"),
        (SMALL, "STSM", "USETMAXREG\nSTSM", "there is USETMAXREG"),
        (SMALL, "STSM", "HMMA.16816\nSTSM", "there is HMMA"),
        (FP8, ".MULTICAST", "", "no MULTICAST"),
        (FP8, "QGMMA", "HGMMA", "there is HGMMA"),
        (FP8, "FADD", "FMUL", "0 FADD, promotion takes 64"),
        (FP8, "R24 ;\nWARP", "R24 ;\nMEMBAR.ALL.GPU ;\nSYNCS.ARRIVE ;\nWARP", "MEMBAR of the GPU"),
        (FP8, "UCGABAR_WAIT", "SYNCS.PHASECHK", "CCTL.IVALL after"),
        (PLAIN, "STSM", "CCTL.IVALL ;\nSTSM", "CCTL.IVALL after"),
        (PLAIN, "UTMALDG.2D [UR8]", "UTMALDG.2D [UR8] ;\n@P0 BRA.U.ANY 0xa", "around UTMALDG"),
    ],
)
def test_code_as_it_must_not_be(it: hopper.Instance, old: str, new: str, reason: str) -> None:
    assert hopper.wrong(it, CODE[it]) == []
    found = hopper.wrong(it, CODE[it].replace(old, new))
    assert any(reason in line for line in found), found
