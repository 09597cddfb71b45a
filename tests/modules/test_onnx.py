"""torch.onnx.export of converted and of frozen models; the values are those of ONNX Runtime."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from cases import normal
from torch import nn

import mixprec

KINDS = {
    **{"bf16": 0.0, "fp8": 0.0, "int8 frozen": 0.01, "fp8 frozen": 0.05},
    **{f"{fmt} frozen": 0.2 for fmt in ("mxfp4", "nvfp4")},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_exported_models_run(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 9)).eval()
    model, x, path = copy.deepcopy(plain), normal((4, 16), torch.float32), tmp_path / "model.onnx"
    if kind.endswith("frozen"):
        model, _ = mixprec.freeze(model, kind.split()[0])
    else:
        mixprec.convert(model, kind)
    torch.onnx.export(model, (x,), path, dynamo=True)
    session = runtime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), plain(x), atol=1e-6 + KINDS[kind], rtol=0)
