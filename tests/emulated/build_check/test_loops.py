"""How many instructions an element takes, read out of small samples of machine code."""

from __future__ import annotations

from emulated.build_check import loops


def sass(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))


# Four instructions in the loop of vectors, 8 bf16 each; the loop of single elements comes after it.
VECTORS = sass(
    "S2R R0, SR_TID.X",
    "LDG.E.128 R4, [R2]",  # 0x10
    "HFMA2 R4, R4, R5",
    "STG.E.128 [R2], R4",
    "@P0 BRA 0x10",
    "LDG.E.U16 R4, [R2]",  # 0x50
    "STG.E.U16 [R2], R4",
    "@P1 BRA 0x50",
    "EXIT",
)
UNSCALE = "unscale_kernel<Bf16, false>"


def test_the_loop_of_vectors_counts() -> None:
    assert loops.per_element(UNSCALE, VECTORS) == {"": 0.5}
    assert loops.per_element(UNSCALE.replace("Bf16", "float"), VECTORS) == {"": 1.0}


def test_the_shortest_way_counts() -> None:
    """Around what only Inf takes, and not around the store."""
    rare = VECTORS.replace("HFMA2 R4, R4, R5", "@P2 BRA 0x30")
    assert loops.per_element(UNSCALE, rare) == {"": 0.5}
    without_store = VECTORS.replace("HFMA2 R4, R4, R5", "@P2 BRA 0x40")
    assert loops.per_element(UNSCALE, without_store) == {"": 0.5}


def test_a_loop_inside_has_no_count() -> None:
    inner = VECTORS.replace("HFMA2 R4, R4, R5", "@P2 BRA 0x20")
    assert loops.per_element(UNSCALE, inner) == {}


def test_a_switch_leads_to_each_of_its_cases() -> None:
    code = sass(
        "LDG.E.128 R4, [R2]",  # 0x00
        "BRX R8 -0x10",
        "FADD R4, R4, R5",  # 0x20: the longer case
        "FADD R4, R4, R5",
        "BRA 0x60",
        "FMUL R4, R4, R5",  # 0x50: the shorter one, which falls through
        "STG.E.128 [R2], R4",  # 0x60
        "@P0 BRA 0x0",
        "EXIT",
    )
    assert loops.per_element(UNSCALE, code) == {"": round(5 / 8, 1)}


def test_fp4_is_a_way_of_its_own() -> None:
    code = sass(
        "LDS.128 R4, [R0]",  # 0x00
        "@P2 BRA 0x50",
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R4, R5",
        "STG.E.128 [R2], R4",
        "BRA 0x80",
        "IADD3 R4, R4, R5, RZ",  # 0x50
        "LOP3.LUT R4, R4, R5, RZ",
        "STG.E.64 [R2], R4",
        "@P0 BRA 0x0",  # 0x80
        "EXIT",
    )
    counts = loops.per_element("quantize_mx_kernel<Plain<float> >", code)
    assert counts == {"": round(6 / 16, 1), "FP4": round(6 / 16, 1)}


def test_kernels_without_a_count() -> None:
    for name in ("gemm_kernel", "quantize_kernel<Activated, E4m3>", "clip_coef_kernel"):
        assert loops.per_element(name, VECTORS) == {}
