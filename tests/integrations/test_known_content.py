"""Classes with the text of a class of transformers: known where the text is all that they are."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402
from mixprec.nn._replaced import replaced_of  # noqa: E402
from mixprec.nn.known import spec_of  # noqa: E402

K = 16
HEAD = "import torch\nfrom torch import nn\n\n\n"
TEXTS = {
    "norm": "llama/LlamaRMSNorm",
    "centered": "gemma/GemmaRMSNorm",
    "mlp": "llama/LlamaMLP",
}


def text_of(what: str) -> str:
    """The class as transformers has it, called Own, without its decorators."""
    where, name = TEXTS[what].split("/")
    kind = getattr(importlib.import_module(f"transformers.models.{where}.modeling_{where}"), name)
    text = inspect.getsource(kind)
    text = text[text.index(f"class {name}") :].replace(name, "Own")
    start = text.index("    def __init__") if what == "mlp" else None
    if start is not None:
        end = text.index("    def forward")
        text = text[:start] + text[end:]
    return text


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The class of a text, in a module of its own."""

    def load(text: str, head: str = HEAD) -> Any:
        name = f"own_module_{len(list(tmp_path.iterdir()))}"
        path = tmp_path / f"{name}.py"
        path.write_text(head + text)
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        request.addfinalizer(lambda: sys.modules.pop(name))
        spec.loader.exec_module(module)
        return module.Own

    return load


def made(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    if "__init__" in vars(kind):
        module = kind(K)
        nn.init.normal_(module.weight)
        return module
    module = kind()
    module.gate_proj, module.up_proj = nn.Linear(K, 24), nn.Linear(K, 24)
    module.act_fn, module.down_proj = nn.SiLU(), nn.Linear(24, K)
    return module


def fused(module: nn.Module) -> nn.Module:
    both = nn.ModuleList([nn.Linear(2, 2), copy.deepcopy(module)])
    return mixprec.convert(both, "bf16", fuse=True)[1]


def is_fused(module: nn.Module) -> bool:
    return type(replaced_of(module)).__name__ in ("FusedNorm", "FusedMLP")


def annotated(text: str) -> str:
    docstring = '        """In other words."""\n        # and a comment\n'
    start = text.index("\n", text.index("def forward")) + 1
    return (text[:start] + docstring + text[start:]).replace("(self, x", "(self, x: 'Any' ")


@pytest.mark.parametrize("what", TEXTS)
@pytest.mark.parametrize("change", [str, annotated])
def test_a_class_of_the_same_text_is_fused_rightly(what: str, change: Any, own: Any) -> None:
    module, x = made(own(change(text_of(what)))), torch.randn(5, K, requires_grad=True)
    got, ends = fused(module), []
    assert is_fused(got)
    for each in (module, got):
        y = each(x)
        ends.append([y, *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])])
    for theirs, ours in zip(*ends, strict=True):
        bound = 0.03 if what == "mlp" else 1e-5  # of BF16 and of FP32
        assert (ours - theirs).norm() <= bound * theirs.norm()


CHANGES: dict[str, tuple[str, Callable[[str], str]]] = {
    "a constant": ("norm", lambda t: t.replace("pow(2)", "pow(4)")),
    "a name": ("mlp", lambda t: t.replace("self.up_proj(x)", "self.gate_proj(x)")),
    "a method": ("centered", lambda t: t.replace("torch.rsqrt", "torch.sqrt")),
    "another base": ("norm", lambda t: t.replace("(nn.Module)", "(nn.Identity)")),
    "a call": ("norm", lambda t: t + "\n    def __call__(self, x):\n        return 2 * x\n"),
    "attributes": ("norm", lambda t: t + (
        "\n    def __getattr__(self, name):\n        return super().__getattr__(name) * 2\n"
    )),
    "a property": ("mlp", lambda t: t + (
        "\n    @property\n    def act_fn(self):\n        return torch.neg\n"
        "\n    @act_fn.setter\n    def act_fn(self, value):\n        pass\n"
    )),
    "a default": ("norm", lambda t: t + "\nOwn.forward.__defaults__ = (torch.ones(2, K := 16),)\n"),
    "a closure": ("norm", lambda t: (
        "def make(torch):\n" + textwrap.indent(t, "    ") + "\n    return Own\n\n\n"
        "Own = make(torch)\n"
    )),
    "other code": ("norm", lambda t: t + (
        "\ndef other(self, hidden_states):\n    return 3 * hidden_states\n\n\n"
        "Own.forward.__code__ = other.__code__\n"
    )),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_class_that_differs_is_left_as_it_is(change: str, own: Any) -> None:
    what, edit = CHANGES[change]
    text = text_of(what)
    assert edit(text) != text
    module = made(own(edit(text)))
    got = fused(module)
    assert not is_fused(got)
    assert spec_of(module) is None


def test_other_objects_under_the_names_of_globals(own: Any) -> None:
    head = "from __future__ import annotations\nimport torch\nfrom torch import nn\n"
    assert is_fused(fused(made(own(text_of("norm"), head))))
    head += "from types import SimpleNamespace\n"
    head += "torch = SimpleNamespace(rsqrt=torch.sqrt, float32=torch.float32, ones=torch.ones)\n"
    assert not is_fused(fused(made(own(text_of("norm"), head))))


def test_a_file_that_changed_after_it_was_imported_says_nothing(own: Any) -> None:
    kind = own(text_of("norm").replace("pow(2)", "pow(4)"))
    path = Path(inspect.getfile(kind))
    path.write_text(path.read_text().replace("pow(4)", "pow(2)") + "\n")
    assert not is_fused(fused(made(kind)))


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def other_code(kind: Any, module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kind._norm, "__code__", doubled.__code__)


def other_global(kind: Any, module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(rsqrt=torch.sqrt)
    patch.setattr(sys.modules[kind.__module__], "torch", theirs)


REPLACED: dict[str, Callable[[Any, Any, pytest.MonkeyPatch], None]] = {
    "forward": lambda kind, m, patch: patch.setattr(kind, "forward", doubled),
    "a method": lambda kind, m, patch: patch.setattr(kind, "_norm", doubled),
    "a method of the module": lambda kind, m, patch: patch.setitem(vars(m), "_norm", torch.exp),
    "its code": other_code,
    "a global": other_global,
    "attributes": lambda kind, m, patch: patch.setattr(
        kind, "__getattr__", lambda self, n: 3 * nn.Module.__getattr__(self, n), raising=False
    ),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_replaced_after_convert_is_seen(
    what: str, compiled: bool, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = own(text_of("centered"))
    plain, x = made(kind), torch.randn(5, K)
    got = fused(plain)
    if compiled and what in ("a method of the module", "attributes"):
        pytest.skip("as torch.compile sees it")
    run = torch.compile(got, backend="eager") if compiled else got
    before = run(x)
    assert is_fused(got)
    for module in (plain, got):
        REPLACED[what](kind, module, monkeypatch)
    y = run(x)
    assert not torch.equal(y, before)
    assert torch.equal(y, plain(x))
    monkeypatch.undo()
    assert torch.equal(got(x), before)
