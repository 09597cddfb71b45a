"""torch.jit and torch.fx, which cannot trace the layers, and what has to be done for them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from cases import for_each, normal
from torch import nn

import mixprec

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is deprecated, and traced
MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8)), (2, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (2, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), (1, 3, 5, 5)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 3)), (1, 3, 5)),
}


@for_each("fuse", [False, True])
@for_each("recipe", ["bf16", "fp8"])
@for_each("name", MODELS)
def test_the_error_names_unconvert(name: str, recipe: str, fuse: bool) -> None:
    make, shape = MODELS[name]
    model, x = mixprec.convert(make(), recipe, fuse=fuse), torch.randn(shape)
    for trace in (torch.jit.script, lambda m: torch.jit.trace(m, x), torch.fx.symbolic_trace):
        with pytest.raises((RuntimeError, TypeError), match=r"mixprec\.unconvert\(model\)"):
            trace(model)
    with mixprec.autocast(enabled=False):
        torch.jit.trace(model, x)
    torch.jit.trace(mixprec.unconvert(model), x)


def test_multihead_attention() -> None:
    layer = mixprec.convert(nn.Sequential(nn.MultiheadAttention(8, 2)), "bf16")[0]

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x)[0]

    with pytest.raises(TypeError, match=r"mixprec\.unconvert\(model\)"):
        torch.fx.symbolic_trace(Self())


# torch.onnx: the values are those of ONNX Runtime


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
