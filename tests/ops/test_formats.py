"""The format table against each format's definition, and the words that name a format."""

from __future__ import annotations

import independent as ind
import numpy as np
import pytest
import torch
from cases import for_each

import mixprec
from mixprec import formats


@for_each("spec", ind.SPECS + ind.SMALL_SPECS)
def test_properties_follow_from_the_definition(spec: ind.Spec) -> None:
    fmt = formats.parse(spec.name)
    table = ind.decode_table(spec)
    finite = table[: spec.max_code + 1]
    one = int(np.flatnonzero(finite == 1.0)[0])
    assert (fmt.name, fmt.dtype, fmt.bits) == (spec.name, spec.dtype, spec.bits)
    assert fmt.max == finite[-1]
    assert fmt.smallest_subnormal == finite[1]
    assert fmt.smallest_normal == finite[1 << spec.mantissa_bits]
    assert fmt.eps == finite[one + 1] - 1.0
    assert fmt.has_inf is (spec.inf_code is not None)
    assert fmt.saturates is (spec.bits <= 8)
    assert str(fmt) == spec.name


WORDS = {
    mixprec.E4M3: ("e4m3", "E4M3", "float8_e4m3fn", torch.float8_e4m3fn),
    mixprec.E5M2: ("e5m2", torch.float8_e5m2),
    mixprec.FP16: ("fp16", "half", torch.float16),
    mixprec.BF16: ("bf16", "bfloat16", torch.bfloat16, mixprec.BF16),
    formats.E2M1: ("e2m1",),
    formats.E3M2: (formats.E3M2,),
}


@for_each("fmt", WORDS)
def test_words(fmt: formats.Format) -> None:
    for word in WORDS[fmt]:
        assert formats.parse(word) is fmt


@for_each("word", ["fp4", torch.uint8, "", None, 8, torch.float32, torch.int8, ["e4m3"]])
def test_unknown_word_lists_the_valid_ones(word: object) -> None:
    with pytest.raises(ValueError, match=r"quantize: fmt must be one of e4m3 .*bf16.*got"):
        mixprec.quantize(torch.ones(2), word)  # type: ignore[arg-type]
