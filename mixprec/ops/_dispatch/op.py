"""Op: one operation, with its schema, its reference, its check and its variants."""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..._context import context
from .._reference.gemm_scales import Operands
from . import autocast, backends, checks, gemm_table, library, self_check
from .casts import Cast

logger = logging.getLogger("mixprec")

Function = Callable[..., Any]
Args = tuple[Any, ...]  # a call's arguments, in the schema's order

_UNKNOWN = ("", None)
_GROUPS: dict[str, Any] = {"cast": Cast, "operands": Operands}  # arguments that stand together
OPS: dict[str, Op] = {}  # every op, by name


class Op:
    """`mixprec::name` and its variants, all with one schema.

    schema: the arguments and results, in the form of torch.library.define: the only list of them.
    Each function below receives the arguments that it names, those of a `Cast` or of
    `Operands` as `cast` and `operands`, or all as one named tuple if its only parameter is `args`.

    reference: the definition of the op in plain torch for any device: `mixprec::name_reference`.
    check: raises ValueError or TypeError for invalid arguments (the compiled kernels check again,
    in C++). fake: shapes, dtypes and strides of the results; None for an op without any. examples:
    small inputs on a device, for the comparison with the reference before a GPU kernel is first
    used; None: the function of `example_inputs` with the op's name, and without one no GPU kernel
    is used. triton: the module of mixprec.triton_kernels with a function of the op's name, imported
    when it is first launched. vendor: the equivalent in torch on a GPU. prefers: the backends to
    try on a GPU, best first, for a call's arguments (a tuple with their names) and the GPU's
    compute capability, None for what is not known. refuses: by backend, the reason that it does not
    support a call; only for backends that do not support every call. operands: the arguments that
    torch.autocast casts; it does not affect other arguments or ops without operands.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        reference: Function,
        check: Function,
        fake: Function | None = None,
        examples: Callable[[str], Iterator[list[Any]]] | None = None,
        triton: str | None = None,
        vendor: Function | None = None,
        prefers: Callable[[Any, library.Capability | None], tuple[str, ...]] | None = None,
        refuses: Mapping[str, Callable[[Any, library.Capability | None], str | None]] | None = None,
        operands: tuple[str, ...] = (),
    ) -> None:
        parsed = torch._C.parse_schema(f"mixprec::{name}{schema}").arguments
        self.name, self.triton = name, triton
        self._prefers, self._refuses = prefers, refuses or {}
        self.examples: Callable[[str], Iterator[list[Any]]] = examples or self_check.examples(name)
        self.arguments = tuple(argument.name for argument in parsed)
        # (One that a call may leave out is the last, and None.)
        defaults = [None for argument in parsed if argument.has_default_value()]
        self.Args = namedtuple("Args", self.arguments, defaults=defaults)  # type: ignore[misc]
        self._check = self.by_name(check)
        kinds = [str(argument.type) for argument in parsed]
        # The argument whose device is that of the call: the first tensor, else the first list.
        self._owner_is_list = "Tensor" not in kinds
        self._owner = kinds.index("List[Tensor]" if self._owner_is_list else "Tensor")
        self._required = [i for i, kind in enumerate(kinds) if kind == "Tensor"]
        self._lists = [i for i, kind in enumerate(kinds) if kind == "List[Tensor]"]
        self._written = [i for i, a in enumerate(parsed) if a.alias_info and a.alias_info.is_write]
        self._operands = tuple(self.arguments.index(operand) for operand in operands)
        self._vendor = None if vendor is None else self._without_autocast(self.by_name(vendor))
        # By use_backend's choice and device: the function for every call, and the device's type.
        self._chosen: dict[tuple[str | None, torch.device], tuple[str, Function]] = {}
        self._able: dict[int, tuple[str, ...]] = {}  # backends that can do some calls, by GPU
        # By backend, GPU and kind of call, of those compared with the reference: the equal ones;
        # by backend and GPU: why not.
        self.agreed: dict[tuple[str, int, Args | None], Function] = {}
        self.left_out: dict[tuple[str, int], str] = {}
        self._warned = False
        self._define(schema, self.by_name(reference), fake)
        OPS[name] = self
        if self._has_cpp:
            self.choose("cpu")  # now, so that compiled code has no guard on a choice made later

    def by_name(self, function: Function) -> Function:
        """Wrap `function` to take all arguments in the schema's order and use those it names."""

        def take(name: str) -> Callable[[Args], Any]:
            if (group := _GROUPS.get(name)) is None:
                return operator.itemgetter(self.arguments.index(name))
            first = self.arguments.index(group._fields[0])
            return lambda args: group(*args[first : first + len(group._fields)])

        wanted = tuple(inspect.signature(function).parameters)
        if wanted == self.arguments:
            return function
        if wanted == ("args",):
            return lambda *args: function(self.Args(*args))
        takes = [take(name) for name in wanted]

        def run(*args: Any) -> Any:
            given = self.Args(*args)
            return function(*[take(given) for take in takes])

        return run

    def check(self, *args: Any) -> None:
        """Raise ValueError or TypeError for invalid arguments."""
        for i in self._required:
            if args[i] is None:  # the checks of a tensor accept it for optional ones
                checks.is_tensor(self.name, self.arguments[i], None)
        self._check(*args)

    @cached_property
    def _has_cpp(self) -> bool:
        return library.LOAD_ERROR is None and library.has_cpu_kernel(self.name)

    def variant_name(self, variant: str) -> str:
        """`gemm`, `triton` -> `gemm_triton`; `unscale_`, `reference` -> `unscale_reference_`."""
        if variant in ("cpp", "cuda"):  # kernels of the op itself, on their dispatch keys
            return self.name
        name = self.name
        return f"{name[:-1]}_{variant}_" if name.endswith("_") else f"{name}_{variant}"

    def handle(self, variant: str = "cpp") -> Function:
        """The torch op of a variant."""
        return getattr(torch.ops.mixprec, self.variant_name(variant)).default

    @cached_property
    def launcher(self) -> Function:
        """The launcher of the Triton kernel; imports Triton."""
        # That package does not import this one: pass it the measured tiles.
        configs = importlib.import_module(f"{library.TRITON_PACKAGE}.configs")
        configs.measured = gemm_table.tile  # type: ignore[attr-defined]
        module = importlib.import_module(f"{library.TRITON_PACKAGE}.{self.triton}")
        return self.by_name(getattr(module, self.name))

    def _define(self, schema: str, reference: Function, fake: Function | None) -> None:
        def checked(function: Function) -> Function:
            def run(*args: Any) -> Any:
                self.check(*args)
                return function(*args)

            return run

        checked_fake = checked(self.by_name(fake or (lambda: None)))
        # The op defines its dtypes: torch.autocast must not change them.
        undisturbed = checked(self._without_autocast(reference))
        variants = {"reference": (undisturbed, "CompositeExplicitAutograd")}
        if self.triton is not None:
            variants["triton"] = (checked(lambda *args: self.launcher(*args)), "CUDA")
        if self._vendor is not None:
            variants["vendor"] = (self.checked_vendor, "CUDA")
        for op in (self.name, *map(self.variant_name, variants)):
            library.LIBRARY.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"mixprec::{op}", checked_fake, lib=library.LIBRARY)
            for device, key in autocast.KEYS.items():
                kernel = autocast.kernel(op, self._operands, device)
                library.LIBRARY.impl(op, kernel, key)
        for variant, (function, key) in variants.items():
            library.LIBRARY.impl(self.variant_name(variant), function, key)

    def _without_autocast(self, function: Function) -> Function:
        """Run the variant with torch.autocast off."""

        def undisturbed(*args: Any) -> Any:
            with autocast.disabled(self._device(args).type):
                return function(*args)

        return undisturbed

    def is_vendor(self, run: Function) -> bool:
        """Whether this function, of `choose`, is the equivalent in torch."""
        return self._vendor is not None and run in (self._vendor, self.handle("vendor"))

    def checked_vendor(self, *args: Any) -> Any:
        """The implementation of `mixprec::name_vendor`."""
        assert self._vendor is not None
        self.check(*args)
        reason = self.refusal("vendor", self.Args(*args), self._device(args).index or 0)
        if reason is not None:
            raise RuntimeError(f"{self.name}: {reason}")
        return self._vendor(*args)

    def _device(self, args: Args) -> torch.device:
        owner = args[self._owner]
        return (owner[0] if self._owner_is_list else owner).device

    def refusal(self, backend: str, args: Any, index: int) -> str | None:
        """Why a variant cannot run a call with these `Args` on GPU `index`; None if it can."""
        refuses = self._refuses.get(backend)
        return None if refuses is None else refuses(args, library.capability(index))

    def why_not(
        self, backend: str, device: str, index: int = 0, args: Args | None = None
    ) -> str | None:
        """Why `backend` cannot run this op on GPU `index`, or on another device type; None if it
        can. With a call's arguments it may be the reason that this call is not supported."""
        if reason := backends.why_not(backend, device):
            return reason
        if reason := backends.disabled(backend, self.name) or self.left_out.get((backend, index)):
            return reason
        if backend == "cpp" and not self._has_cpp:
            return "it has no C++ kernel"
        if backend == "triton" and self.triton is None:
            return "it has no Triton kernel"
        if backend == "vendor" and self._vendor is None:
            return "torch has no kernel for the same job"
        if backend == "cuda":
            if not library.has_cuda_kernel(self.name):
                return "it has no CUDA kernel"
            if reason := backends.not_built_for(index):
                return reason
        if args is None or device != "cuda":
            return None
        return self.refusal(backend, self.Args(*args), index)

    def order(self, device: str, index: int = 0, args: Any = None) -> tuple[str, ...]:
        """The backends to try for tensors on `device`, best first; args: a call's `Args`."""
        if (forced := context.backend) is not None:
            return (forced,)
        if device == "cuda" and self._prefers is not None:
            return self._prefers(args, library.capability(index))
        if device == "cpu" and library.LOAD_ERROR is None and not self._has_cpp:
            return backends.ANYWHERE
        return backends.ORDER.get(device, backends.ANYWHERE)

    def backend(self, device: str, index: int = 0, args: Args | None = None) -> str:
        """The first backend that can run, for a call with `args` on a GPU; RuntimeError listing the
        reasons if none can."""
        named = None if args is None else self.Args(*args)
        tried = self.order(device, index, named)
        for backend in tried:
            if named is None:
                able = self.why_not(backend, device, index) is None
            else:  # the reasons that do not depend on the call are looked for once
                able = backend in self.able_backends(index)
                able = able and self.refusal(backend, named, index) is None
            if able:
                return backend
        reasons = (f"{b}: {self.why_not(b, device, index, args)}" for b in tried)
        raise RuntimeError(f"{self.name}: no backend can run on {device}. " + "; ".join(reasons))

    def choose(self, device: str, index: int = 0, args: Args | None = None) -> Function:
        """The function that runs the op on `device` for a call with `args`."""
        if device != "cuda":
            args = None
        by_call = args is not None and self._prefers is not None
        where = torch.device(device, index) if device == "cuda" else torch.device(device)
        key = (context.backend, where)
        if not by_call and key in self._chosen:
            return self._chosen[key][1]
        run = None
        while run is None:  # a kernel that is left out makes way for the next
            backend = self.backend(device, index, args)
            run = self._ready(backend, device, index, args)
        traced = torch.compiler.is_compiling()
        if by_call:
            # Torch's own ops need no op of ours around them (8 us), unless they are traced.
            # But for fake tensors, of which torch has fewer calls than of others.
            direct = backend == "vendor" and not traced and not backends.is_fake()
            return self._vendor if direct and self._vendor is not None else run
        compared = backend in ("cpp", "reference") or (backend, index, None) in self.agreed
        # Not while it is traced: torch.compile fails on a write inside of an autograd function.
        if compared and not traced and (self._prefers is None or device != "cuda"):
            self._chosen[key] = device, run
        return run

    def able_backends(self, index: int) -> tuple[str, ...]:
        """The backends that can run this op on GPU `index` for at least some arguments."""
        able = self._able.get(index)
        if able is None:
            able = tuple(b for b in backends.BACKENDS if self.why_not(b, "cuda", index) is None)
            self._able[index] = able
        return able

    # Constant for the process: torch.compile uses it without a guard.
    able_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _ready(self, backend: str, device: str, index: int, args: Args | None) -> Function | None:
        """The torch op of a variant; None if it is left out because it computes wrong values."""
        if device == "cuda" and backend != "reference":
            return self._compared(backend, index, args)
        runs = device != "meta" and not torch.compiler.is_compiling()
        if backend == "reference" and context.backend != "reference" and runs and not self._warned:
            self._warned = True
            logger.warning(
                "%s runs as its plain torch reference on %s: no other variant can do it",
                self.name,
                device,
            )
        return self.handle(backend)

    def _compared(self, backend: str, index: int, args: Args | None) -> Function | None:
        """The torch op of a variant, compared with the reference once on GPU `index`, or None.

        A Triton kernel is compiled for each kind of call, so the examples most like the call's
        `args` are compared; None: all of them. A kernel that differs is left out from then on.
        """
        by_kind = backend == "triton" and args is not None and not torch.compiler.is_compiling()
        kind = self_check.kind(self.arguments, args) if by_kind and args is not None else None
        if (agreed := self.agreed.get((backend, index, kind))) is not None:
            return agreed
        run = self.handle(backend)
        purpose = "the kernel is loaded and compared with its reference"
        if not self_check.is_possible(self.name, f"the {backend} kernel", purpose):
            return run

        def skip(example: Args) -> bool:
            another = kinds is not None and self_check.kind(self.arguments, example) not in kinds
            return another or self.refusal(backend, self.Args(*example), index) is not None

        with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
            every = (self_check.kind(self.arguments, example) for example in self.examples("cpu"))
            kinds = None if kind is None else self_check.most_like(kind, {*every})
            difference = self.difference(run, f"cuda:{index}", skip)
        if difference is None:
            self.agreed[backend, index, kind] = run
            return run
        about = f"the {backend} kernel does not agree with its reference on this GPU"
        reason = f"{about} ({difference})"
        self_check.report(self.name, reason, "It is left out and the next variant runs")
        self.left_out[backend, index] = reason
        self._able.pop(index, None)
        return None

    def difference(
        self, run: Function, device: str, skip: Callable[[Args], bool] | None = None
    ) -> str | None:
        """How results and mutated arguments of `run` on `device` differ from those of the reference
        on the examples, or the error; None if they do not. skip: those that `run` cannot take."""
        pairs = zip(self.examples(device), self.examples(device), strict=True)
        kept = (pair for pair in pairs if skip is None or not skip(tuple(pair[0])))
        return self_check.difference(run, self.handle("reference"), kept)

    def __call__(self, *args: Any) -> Any:
        """Run the op on its chosen variant, with the operands as they are, also inside
        torch.autocast. Arguments in the schema's order.

        A compiled kernel checks its arguments before it touches memory, faster than Python could;
        when it, or the choice of a variant, cannot use them, `check` says which one is wrong.
        """
        for i in self._lists:
            if type(args[i]) is not list:
                checks.is_sequence(self.name, self.arguments[i], args[i])
        try:
            owner = args[self._owner]
            device = (owner[0] if self._owner_is_list else owner).device
            kind, run = self._chosen.get((context.backend, device), _UNKNOWN)
            # Before a choice, which is for all calls: this one may be one that no kernel can do.
            refuses = self._refuses.get("cpp" if device.type == "cpu" else "cuda")
            if refuses and self._prefers is None and (why := refuses(self.Args(*args), None)):
                forced = context.backend
                if forced not in (None, "reference"):
                    raise RuntimeError(f"{self.name}: {forced} cannot run this call: {why}")
                kind, run = device.type, self._ready("reference", device.type, 0, args)
            if run is None:
                kind = device.type
                run = self.choose(kind, device.index or 0, args)
            off = not self._operands or not torch._C._is_any_autocast_enabled()
            if not off and kind in autocast.KEYS and torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    result = run(*args)
            else:
                result = run(*args)
        except Exception as error:
            self.check(*args)
            if "CUDA out of memory" in str(error) and type(error) is RuntimeError:
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        if self._written and not torch.compiler.is_compiling():
            # Tell autograd which tensors were modified in place; the schemas alone do not.
            written: list[torch.Tensor] = []
            for i in self._written:
                x = args[i] if i < len(args) else None
                written += x if isinstance(x, (list, tuple)) else [] if x is None else [x]
            if torch.is_inference_mode_enabled():
                written = [t for t in written if not t.is_inference()]
            torch.autograd.graph.increment_version(written)
        return result
