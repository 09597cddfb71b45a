"""Who may import whom, where arithmetic may stand, and what `import mixprec` must not do."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

import mixprec

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mixprec"

# From the bottom up: a module imports only from layers below its own, never sideways. The names are
# modules of mixprec; a package stands for all its modules, except that ops is taken apart.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("formats", "_context", "_originals", "_said"),
    ("quantized", "_modes"),
    ("ops._dispatch.checks",),
    ("ops._reference",),
    ("ops._dispatch",),
    ("ops._dispatch.op",),
    ("ops._dispatch.optimizer_update",),
    ("ops.*",),
    ("ops",),
    ("_local_gradients", "_steps"),
    ("_master_forms", "_recipe_checks"),
    ("_masters",),
    ("recipes",),
    ("functional.operands", "scaling", "grad_report", "distributed", "memory", "availability"),
    ("functional",),
    ("nn", "optim", "amp"),
    ("_checkpoint_file",),
    ("checkpoint",),
    ("diagnostics",),
    ("integrations", "filters", "stats"),
    ("mixprec",),  # the package itself, __init__.py
)
# Leaves use anything and are used by nothing but __init__.
LEAVES = (
    *("testing", "env", "frozen", "frozen_linear"),
    *("lean_training", "cuda_graph", "_graph_users"),
)
# Between ops, only these: helpers of the reference, a list of dtypes, what runs the block formats.
SIDEWAYS = {
    "quantize": "scale.amax_reference scale.scale_from_amax quantize_mx.quantize_mx_op "
    "quantize_mx.quantize_mx_reference",
    "quantize_mx": "scale.amax_reference scale.scale_from_amax",
    "delayed_scales": "scale.scale_from_amax",
    "norm_quantize": "quantize.quantize_reference",
    "act_quantize": "quantize.quantize_reference",
    "block_operands": "dequantize.dequantize_mx_op",
    "gemm": "block_operands.blocks_of block_operands.decode block_operands.exponents "
    "block_operands.is_block",
    "gemm_grouped": "gemm.plain_operand",
    "linear_pass": "gemm.gemm_op gemm.gemm_accumulate_op quantize.quantize_op",
    "grad_stats": "unscale.check_grads unscale.count_reference",
}

# Arithmetic on tensor elements stands in the ops (their references), in functional and stats, and
# where results are judged.
ARITHMETIC = {
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("add_", "sub_", "mul_", "div_", "lerp", "lerp_", "addcmul", "addcmul_"),
    *("addcdiv", "addcdiv_", "rsqrt", "square", "clamp", "clamp_", "amax", "aminmax"),
}
MAY_COMPUTE = ("ops", "functional", "diagnostics", "testing")


def module_name(path: Path) -> str:
    """mixprec/ops/gemm.py -> "ops.gemm"; a package's __init__.py is the package."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "mixprec"


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`, which import nothing when run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from runtime_nodes(node)


def imports(module: str, source: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """(imported module of mixprec, name taken from it or "") for each import in `source`."""
    here = "mixprec" if module == "mixprec" else f"mixprec.{module}"
    package = here if is_package else here.rpartition(".")[0]
    for node in runtime_nodes(ast.parse(source)):
        found: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            target = resolve_name("." * node.level + (node.module or ""), package)
            found = [(target, alias.name) for alias in node.names]
        for target, name in found:
            if f"{target}.{name}".removeprefix("mixprec.") in SOURCES:  # `from . import formats`
                target, name = f"{target}.{name}", ""
            if target.split(".")[0] == "mixprec":
                yield target.removeprefix("mixprec."), name


def unit(module: str) -> str:
    """The name under which LAYERS knows a module, e.g. optim.adamw -> optim, ops.gemm -> ops.*"""
    named = {name for layer in LAYERS for name in layer} | set(LEAVES)
    parts = module.split(".")
    if parts[0] == "ops" and len(parts) == 2 and not parts[1].startswith("_"):
        return "ops.*"
    for n in range(len(parts), 0, -1):
        if (name := ".".join(parts[:n])) in named:
            return name
    raise AssertionError(f"mixprec.{module} stands in no layer: give it its place in LAYERS")


def height(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if unit(module) in layer)


def wrong_imports(module: str, source: str, *, is_package: bool) -> list[str]:
    wrong = []
    for target, name in imports(module, source, is_package=is_package):
        inside_one_package = unit(module) == unit(target) != "ops.*"
        listed = SIDEWAYS.get(module.removeprefix("ops."), "").split()
        sideways = f"{target.removeprefix('ops.')}.{name}" in listed
        if unit(module) in LEAVES or inside_one_package or sideways:
            continue
        is_leaf = unit(target) in LEAVES
        allowed = module == "mixprec" if is_leaf else height(target) < height(module)
        if not allowed:
            wrong.append(f"mixprec.{module} imports {name or 'all'} from mixprec.{target}")
    return wrong


def test_imports_point_downwards() -> None:
    wrong = [
        w
        for module, path in SOURCES.items()
        for w in wrong_imports(module, path.read_text(), is_package=path.name == "__init__.py")
    ]
    assert wrong == []


def arithmetic(source: str) -> list[str]:
    """The calls of ARITHMETIC, and of torch._foreach_*, in a source text, by line."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = []
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in ARITHMETIC or name.startswith("_foreach_"):
            found.append(f"line {call.lineno}: {ast.unparse(call.func)}")
    return found


def test_arithmetic_stands_where_it_belongs() -> None:
    others = [p for m, p in SOURCES.items() if m.split(".")[0] not in MAY_COMPUTE]
    assert {p.name: found for p in others if (found := arithmetic(p.read_text()))} == {}


def test_formulas_in_csrc_math_include_neither_torch_nor_cuda() -> None:
    headers = sorted((ROOT / "csrc" / "math").glob("*.h"))
    assert headers, "csrc/math holds no headers"
    for header in headers:
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', header.read_text(), re.M)
        foreign = [i for i in included if re.match(r"(torch|ATen|c10|pybind11|cuda|cub)", i)]
        assert not foreign, f"{header.name} includes {foreign}"


def absolute_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every `import name` and `from name import ...` without a dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_what_is_installed_under_another_name_is_imported_relatively() -> None:
    """bench and triton_kernels are installed as mixprec.bench and mixprec.triton_kernels. bench may
    import mixprec, which it measures; triton_kernels may not; mixprec imports none of the rest."""
    renamed = ("bench", "triton_kernels", "mixprec.bench", "mixprec.triton_kernels")
    for folder, forbidden in (
        ("bench", renamed),
        ("triton_kernels", (*renamed, "mixprec")),
        ("mixprec", ("bench", "examples")),
    ):
        sources = sorted((ROOT / folder).rglob("*.py"))
        assert sources, folder
        for path in sources:
            for line, name in absolute_imports(path):
                wrong = [f for f in forbidden if name == f or name.startswith(f + ".")]
                assert not wrong, f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_import_is_light(tmp_path: Path) -> None:
    """No Triton, no CUDA context, no torch._dynamo (1.3 s) unless torch brings it itself, and of
    mixprec the ops alone: the rest is imported when it is first used."""
    code = """
import json, sys, torch
before = set(sys.modules)
import mixprec
print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))
"""
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path)
    new, cuda_initialized = json.loads(out)
    own = {name.split(".")[1] for name in new if name.startswith("mixprec.")}
    assert own == {"_C", "_context", "_modes", "_originals", "formats", "ops", "quantized"}
    heavy = [m for m in new if re.match(r"(triton|torch\._(dynamo|inductor)|numpy|matplotlib)", m)]
    assert not heavy
    assert not cuda_initialized


WITHOUT = """
import sys
sys.modules[{name!r}] = None  # as if it were not installed
import mixprec.integrations
try:
    import mixprec.integrations.{name}
except ImportError as error:
    print(error)
assert not {{"accelerate", "transformers", "lightning", "peft", "torchtitan"}} & {{
    name for name, module in sys.modules.items() if module is not None
}}
"""


@pytest.mark.parametrize("name", ["accelerate", "lightning", "torchtitan", "transformers"])
def test_an_absent_package_breaks_only_its_adapter(name: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"mixprec.integrations.{name} needs ")
    assert done.stdout.count("\n") == 1


def test_public_names_are_documented() -> None:
    for name in mixprec.__all__:
        value = getattr(mixprec, name)
        own = vars(value).get("__doc__") if hasattr(value, "__dict__") else None
        doc = own or type(value).__doc__ or ""
        assert len(doc) > 40, f"mixprec.{name} has no docstring"


def test_every_listed_name_exists() -> None:
    for name, path in SOURCES.items():
        if "__all__" not in path.read_text() or name.startswith("integrations."):
            continue  # those of integrations need packages that may not be installed
        module = importlib.import_module(f"mixprec.{name}".removesuffix(".mixprec"))
        assert len(set(module.__all__)) == len(module.__all__), name
        for public in module.__all__:  # a name in it, or a module that is imported on demand
            assert hasattr(module, public) or find_spec(f"{module.__name__}.{public}"), name
    assert set(dir(mixprec)) == {*mixprec.__all__, "__doc__", "__version__"}
