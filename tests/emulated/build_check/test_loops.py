"""How instructions an element are counted, on small samples of machine code."""

from __future__ import annotations

import pytest
from emulated.build_check import loops


def sass(text: str) -> str:
    """As cuobjdump shows it; a line that begins with NAME: can be branched to as NAME."""
    lines = [line.strip() for line in text.strip().splitlines()]
    places = {}
    for i, line in enumerate(lines):
        name, colon, rest = line.partition(":")
        if colon:
            places[name], lines[i] = f"0x{16 * i:x}", rest.strip()
    for name, place in places.items():
        lines = [line.replace(f" {name} ;", f" {place} ;") for line in lines]
    return "\n".join(
        f"        /*{16 * i:04x}*/   {line}   /* 0x0 */" for i, line in enumerate(lines)
    )


# Two vectors a round, 8 instructions, or 10 where one holds Inf; then single elements.
CAST = """
    ISETP.GE.AND P0, PT, R0, R1, PT ;
    VECTORS: LDG.E.128 R4, desc[UR4][R2.64] ;
    FSETP.GEU.AND P1, PT, |R4|, +INF, PT ;
    BSSY B0, JOIN ;
    @P1 BRA INF ;
    F2FP.BF16.F32.PACK_AB R8, R5, R4 ;
    BRA JOIN ;
    INF: IADD3 R8, R4, 0x7fff, RZ ;
    LOP3.LUT R8, R8, R4, RZ, 0xc0, !PT ;
    IMAD R9, R8, R8, RZ ;
    BSYNC B0 ;
    JOIN: STG.E.64 desc[UR4][R2.64], R8 ;
    @!P0 BRA VECTORS ;
    SINGLE: LDG.E R4, desc[UR4][R2.64] ;
    STG.E.U16 desc[UR4][R2.64], R4 ;
    @!P2 BRA SINGLE ;
    EXIT ;
"""


def test_the_shortest_way_of_vectors_counts() -> None:
    assert loops.per_element("quantize_kernel<Plain<float>, Bf16>", sass(CAST)) == {"": 2.0}
    slow = CAST.replace("@P1 BRA INF ;", "BRA INF ;")
    assert loops.per_element("quantize_kernel<Plain<float>, Bf16>", sass(slow)) == {"": 2.5}


def test_a_loop_around_or_inside_does_not_count() -> None:
    around = CAST.replace("EXIT ;", "@!P3 BRA VECTORS ;\nEXIT ;")
    assert loops.per_element("quantize_kernel<Plain<float>, Bf16>", sass(around)) == {"": 2.0}
    inside = CAST.replace("BRA JOIN ;", "@P4 BRA INSIDE ;\nBRA JOIN ;", 1)
    inside = inside.replace("F2FP", "INSIDE: F2FP", 1)
    inside = inside.replace("@P1 BRA INF ;", "NOP ;")
    assert loops.per_element("quantize_kernel<Plain<float>, Bf16>", sass(inside)) == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dequantize_kernel<Bf16, Fp16, false>", {"": 2.0}),  # by what it stores
        ("amax_kernel<Plain<float> >", {"": 2.0}),  # by what it loads
        ("unpack_kernel<float, 4>", {"": 0.5}),  # 16 elements
        ("amax_kernel<Normalized>", {}),
        ("scale_from_amax_kernel", {}),
    ],
)
def test_elements_of_a_round(name: str, expected: dict[str, float]) -> None:
    assert loops.per_element(name, sass(CAST)) == expected


def test_a_switch_and_marked_ways() -> None:
    code = """
        HEAD: LDG.E.128 R4, desc[UR4][R2.64] ;
        BRX R6 -0x20 ;
        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R8, R5, R4, RZ ;
        BRA STORES ;
        IMAD R8, R4, R4, RZ ;
        IMAD R8, R8, R8, RZ ;
        IMAD R8, R8, R8, RZ ;
        STORES: @P0 BRA BYTES ;
        STG.E.64 desc[UR4][R2.64], R8 ;
        BRA NEXT ;
        BYTES: STG.E.128 desc[UR4][R2.64], R8 ;
        NEXT: @P1 BRA HEAD ;
        EXIT ;
    """
    found = loops.per_element("quantize_mx_kernel<Plain<float> >", sass(code))
    assert found == {"": round(7 / 16, 1), "FP4": round(9 / 16, 1)}
