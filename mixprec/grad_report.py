"""Which parameters' gradients overflowed or underflowed, counted while a step reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .ops import underflow_share

if TYPE_CHECKING:
    from .distributed import Ranks


def is_set(flag: torch.Tensor) -> torch.Tensor | bool:
    """Whether a flag of one element is not 0: a bool if the host need not wait for that, else a
    tensor, bool [], on the flag's device."""
    return bool(flag) if on_host(flag) else flag.reshape(()) != 0


def on_host(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.device.type == "cpu"  # no FakeTensor, without values


class Table(NamedTuple):
    """The counts on one device."""

    params: list[torch.Tensor]
    elements: list[int] | None  # of their gradients, on this rank; None: the sizes of the params
    counts: torch.Tensor  # int64 [params, 4], see grad_stats_


class Overflow(NamedTuple):
    """One parameter whose gradient held Inf or NaN, before or after unscaling."""

    name: str
    elements: int
    inf: int
    nan: int

    def __str__(self) -> str:
        found = [f"{n:,} {w}" for n, w in ((self.nan, "NaN"), (self.inf, "Inf")) if n]
        return f"{self.name}: {' and '.join(found)} among {self.elements:,}"


class Underflow(NamedTuple):
    """The zeros and subnormals of one parameter's gradient, still scaled, in its own dtype."""

    name: str
    elements: int
    zeros: int
    subnormals: int

    @property
    def share(self) -> float:
        """The share of subnormal numbers among the nonzero elements."""
        return self.subnormals / max(1, self.elements - self.zeros)

    def __str__(self) -> str:
        zeros = self.zeros / max(1, self.elements)
        return f"{self.name}: {zeros:.1%} zeros, {self.share:.1%} of the rest subnormal"


class GradCounts:
    """Counts of Inf, NaN, zeros and subnormals in the gradients of one optimizer, at its last step
    and at its last step that overflowed.

    They stay on the devices of the gradients until a report is requested.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, Table] = {}
        self._parts: dict[torch.device, list[Table]] = {}  # of a step that goes on
        self._overflow: dict[torch.device, Table] = {}
        self._sizes: tuple[list[int], torch.Tensor] | None = None

    def start(self) -> None:
        """Begin a step: drop the counts of the last one."""
        self._last, self._parts = {}, {}

    def table(
        self,
        device: torch.device,
        params: Sequence[torch.Tensor],
        elements: list[int] | None = None,
    ) -> torch.Tensor:
        """New counts for the gradients of `params`, beside those of others in this step: int64
        [params, 4] on `device`.

        elements: the size of each gradient where it differs from its param's (sharded, sparse).
        """
        counts = torch.zeros((len(params), 4), dtype=torch.int64, device=device)
        self._parts.setdefault(device, []).append(Table(list(params), elements, counts))
        return counts

    def finish(self, overflowed: torch.Tensor | bool) -> None:
        """End a step. If it overflowed (bool []), its counts become those of the last overflow."""
        self._last, self._parts = {d: _joined(parts) for d, parts in self._parts.items()}, {}
        for device, table in self._last.items():
            if overflowed is True:
                self._overflow[device] = table
            if isinstance(overflowed, bool):
                continue
            table, before = _aligned(table, self._overflow.get(device))
            here = overflowed.to(device, non_blocking=True)
            # In place: the replays of a graph have to find it where they left it.
            self._overflow[device] = table._replace(counts=before)
            before.copy_(torch.where(here, table.counts, before))

    def underflow_share(
        self, home: torch.device, ranks: Ranks | None, everyone: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The share of subnormal numbers among the nonzero gradients of the last step, on all ranks
        that share `everyone`, all params, by an all-reduce; ranks None: on this one."""
        tables = list(self._last.values())
        counts = [table.counts.to(home, non_blocking=True) for table in tables]
        elements = [n for table in tables for n in _elements(table)]
        if ranks is None:
            return underflow_share(torch.cat(counts), sum(elements)) if tables else None
        mine = torch.zeros((0, 3), dtype=torch.float64, device=home)
        if tables:
            known, sizes = self._sizes or (None, None)
            if sizes is None or known != elements or sizes.device != home:
                sizes = torch.tensor(elements, device=home)
                self._sizes = elements, sizes
            mine = torch.cat([sizes[:, None], torch.cat(counts)[:, 2:]], 1).double()
        params = [p for table in tables for p in table.params]
        scopes = [scope for scope in range(3) for _ in params]
        flag = torch.zeros(1, device=home)
        total = ranks.agree_(flag, mine.t().flatten(), 3 * params, scopes, 3, everyone).long()
        return underflow_share(torch.cat([total.new_zeros(1), total]).view(1, 4), total[0])

    def overflows(self, name: Callable[[torch.Tensor], str]) -> list[Overflow]:
        found = [Overflow(name(p), n, c[0], c[1]) for p, n, c in _read(self._overflow)]
        return [each for each in found if each.inf or each.nan]

    def underflows(self, name: Callable[[torch.Tensor], str]) -> list[Underflow]:
        return [Underflow(name(p), n, c[2], c[3]) for p, n, c in _read(self._last)]


def _joined(tables: list[Table]) -> Table:
    if len(tables) == 1:
        return tables[0]
    params = [p for table in tables for p in table.params]
    elements = [n for table in tables for n in _elements(table)]
    return Table(params, elements, torch.cat([table.counts for table in tables]))


def _aligned(table: Table, before: Table | None) -> tuple[Table, torch.Tensor]:
    """`table` and the counts of `before`, both extended to the params of either, with zeros."""
    if before is None:
        return table, torch.zeros_like(table.counts)
    more = len(before.params) - len(table.params)
    if more >= 0 and all(map(operator.is_, table.params, before.params)):
        counts = table.counts
        if more:
            counts = torch.cat([counts, counts.new_zeros((more, counts.shape[1]))])
        return before._replace(counts=counts), before.counts
    here, there = (dict(zip(map(id, t.params), t.counts.unbind(), strict=True))
                   for t in (table, before))  # fmt: skip
    gone = [i for i, p in enumerate(before.params) if id(p) not in here]
    params = table.params + [before.params[i] for i in gone]
    elements = _elements(table) + [_elements(before)[i] for i in gone]
    none = torch.zeros_like(table.counts[0])
    now, then = (torch.stack([known.get(id(p), none) for p in params]) for known in (here, there))
    return Table(params, elements, now), then


def _read(tables: dict[torch.device, Table]) -> Iterator[tuple[torch.Tensor, int, list[int]]]:
    for table in tables.values():
        yield from zip(table.params, _elements(table), table.counts.tolist(), strict=True)


def _elements(table: Table) -> list[int]:
    return [p.numel() for p in table.params] if table.elements is None else table.elements


def namer(
    optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module | None
) -> Callable[[torch.Tensor], str]:
    """A function that returns the name of a parameter: from `model`, its optimizer or its index."""
    names: dict[int, str] = {}
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            own = group.get("param_names")
            for i, p in enumerate(group["params"]):
                place = f"param_groups[{g}]['params'][{i}] of shape {tuple(p.shape)}"
                names[id(p)] = own[i] if own else place
    if model is not None:
        names |= {id(p): name for name, p in model.named_parameters()}
    return lambda p: names.get(id(p), f"a parameter of shape {tuple(p.shape)}")


def worst_first(found: list[Overflow]) -> list[Overflow]:
    return sorted(found, key=lambda each: (each.nan + each.inf) / each.elements, reverse=True)
