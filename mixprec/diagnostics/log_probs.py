"""log_prob_gap: how far the log-probabilities of another engine are from those of a model, whether
rounding explains it, and where it begins."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..nn.autocast import autocast
from ..nn.convert import unconvert
from ..ops._dispatch import checks
from .passes import restored, tensors
from .writers import aligned

# Two engines of one precision are about equally far from FP32; the tests have other orders of sums,
# caches and recipes.
_EXPLAINED = 2.0
_FLOOR = 2.0**-16  # what FP32 itself may be off by, and the digits that an engine writes
_HIDDEN = "hidden_states."


@dataclass
class _Sample:
    """tokens [T]; log_probs [N], of the last N tokens, NaN where there is none; hidden: outputs
    [T, D] of modules, by name."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    hidden: dict[str, torch.Tensor]


@dataclass
class Distance:
    """From the same in FP32, as root mean squares: of the engine and of this model; of hidden
    states as a part of those in FP32."""

    name: str
    engine: float = 0.0
    model: float = 0.0

    @property
    def factor(self) -> float:
        """How many times what rounding explains."""
        return self.engine / max(self.model, _FLOOR)

    @property
    def is_explained(self) -> bool:
        return self.factor <= _EXPLAINED  # not of NaN


@dataclass
class LogProbGap:
    """The report of `log_prob_gap`; print it.

    mean, largest: of |engine - model| over `tokens` log-probabilities of `samples` texts; worst:
    the sample and the token of the largest one; kl: the mean of r - 1 - log r, r = p(model) /
    p(engine), which estimates KL(engine || model) in nats a token; distance: that of the
    log-probabilities from FP32; hidden: those of modules, in the order in which they run.
    """

    samples: int = 0
    tokens: int = 0
    mean: float = 0.0
    largest: float = 0.0
    worst: tuple[int, int] = (0, 0)
    kl: float = 0.0
    distance: Distance = field(default_factory=lambda: Distance("log-probabilities"))
    hidden: list[Distance] = field(default_factory=list)

    @property
    def is_explained(self) -> bool:
        """Whether the engine is about as far from FP32 as this model is, or nearer."""
        return all(d.is_explained for d in (self.distance, *self.hidden))

    @property
    def begins(self) -> str:
        """The first module whose output rounding does not explain, "" without one."""
        return next((d.name for d in self.hidden if not d.is_explained), "")

    def __str__(self) -> str:
        sample, token = self.worst
        lines = [
            f"{self.tokens:,} log-probabilities of {self.samples:,} samples",
            f"gap: {self.mean:.2g} in the mean, {self.largest:.2g} at most (sample {sample}, token "
            f"{token}); KL {self.kl:.2g}",
            "rounding explains it"
            if self.is_explained
            else f"rounding does not explain it; it begins in {self.begins}"
            if self.begins
            else "rounding does not explain it",
            "",
        ]
        rows = [["distance from FP32", "engine", "model", "factor"]]
        for d in (*self.hidden, self.distance):
            rows.append([d.name, f"{d.engine:.2g}", f"{d.model:.2g}", f"{d.factor:.2g}"])
        return "\n".join([*lines, *aligned(rows)])


def log_prob_gap(
    model: nn.Module, file: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> LogProbGap:
    """Compare the log-probabilities that another engine, as one that samples, has written with
    those of `model`, for the same tokens and weights.

        print(mixprec.log_prob_gap(model, "rollout.jsonl"))

    file: JSON lines, a sample each, {"tokens": [T numbers], "log_probs": [N numbers]}, or
    safetensors with tokens [B, T], log_probs [B, N] and, for padding, attention_mask [B, T]. The N
    log-probabilities are natural logarithms, of the last N tokens (columns), at temperature 1; null
    or NaN: not compared. "hidden_states": {name: [T, D numbers]} in JSON, `hidden_states.NAME` [B,
    T, D] in safetensors, are what the engine computed for the output of the module of that name.
    model: takes input_ids [1, T], returns logits [1, T, V] or an output that has them.

    Each sample is computed twice, by the model as it is, in evaluation mode, and by a copy in FP32
    with the same weights. Rounding explains the gap where the engine is at most twice as far from
    FP32 as the model is, or 2^-15 where the model is FP32; with hidden states also at each of these
    modules. What remains then is the order of sums; what does not is another model: other
    weights, positions, a temperature, a scale. dtype: the precision of the engine where it is not
    the model's: the model as it is gets parameters of this dtype. The copies are of the model's
    size, in memory, for the time of the call.

    ValueError for a file without samples, shapes that do not fit, and names that are no modules.
    """
    checks.is_module("log_prob_gap", model)
    if dtype is not None:
        dtype = checks.param_dtype("log_prob_gap", "dtype", dtype)
    report, gaps = LogProbGap(), torch.empty(0)
    totals: dict[str, torch.Tensor] = {}  # by name: squares of engine, model, and FP32 itself
    with restored(model), torch.no_grad():
        exact = unconvert(copy.deepcopy(model)).float().eval()
        own = (model if dtype is None else copy.deepcopy(model).to(dtype)).eval()
        device = next((p.device for p in own.parameters()), torch.device("cpu"))
        for sample in _samples(file, own):
            with autocast(enabled=False), torch.autocast(device.type, enabled=False):
                want = _pass(exact, sample)
            got = _pass(own, sample)
            seen = ~sample.log_probs.isnan()
            for name in want:  # as they ran
                theirs = sample.hidden[name] if name else sample.log_probs[seen]
                mine, wide = (t if name else t[seen] for t in (got[name], want[name]))
                if theirs.shape != wide.shape:
                    raise ValueError(
                        f"log_prob_gap: hidden_states of {name} must be {tuple(wide.shape)}, as "
                        f"the module returns them, got {tuple(theirs.shape)}"
                    )
                away = theirs.double() - wide, mine - wide, wide
                totals[name] = totals.get(name, 0) + torch.stack([t.square().sum() for t in away])
            gap = got[""] - sample.log_probs
            gaps = torch.cat([gaps, gap[seen]])
            size, place = gap.abs().nan_to_num(0.0, posinf=math.inf).max(0)
            if size > report.largest:
                first = len(sample.tokens) - len(gap)
                report.worst, report.largest = (report.samples, first + int(place)), float(size)
            report.samples += 1
    if not gaps.numel():
        raise ValueError(f"log_prob_gap: file must have log-probabilities, got none in {file}")
    report.tokens, report.mean = gaps.numel(), float(gaps.abs().mean())
    report.kl = float((gaps.expm1() - gaps).mean())
    engine, mine, _ = (totals.pop("") / gaps.numel()).sqrt().tolist()
    report.distance = Distance("log-probabilities", engine, mine)
    for name, (*both, whole) in totals.items():
        report.hidden.append(Distance(name, *(float(t / whole) ** 0.5 for t in both)))
    return report


def _pass(model: nn.Module, sample: _Sample) -> dict[str, torch.Tensor]:
    """The outputs of the modules of the sample in FP64, in the order in which they ran, and under
    "" the log-probabilities of its tokens."""
    found: dict[str, torch.Tensor] = {}

    def keep(_: nn.Module, args: Any, output: Any, name: str) -> None:
        for first in itertools.islice(tensors(output), 1):
            found[name] = first[0].double().cpu()

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids, modules = sample.tokens.to(device)[None], dict(model.named_modules())
    hooks = [
        modules[name].register_forward_hook(functools.partial(keep, name=name))
        for name in sample.hidden
    ]
    try:
        output = model(input_ids=ids)
    except IndexError as error:
        low, high = int(ids.min()), int(ids.max())
        raise ValueError(
            f"log_prob_gap: tokens must be those of the model, got {low} to {high}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if missing := [name for name in sample.hidden if name not in found]:
        raise ValueError(
            f"log_prob_gap: hidden_states must be those of modules that return tensors, got "
            f"{missing[0]!r}, which returned none"
        )
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != ids.shape:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
        raise ValueError(f"log_prob_gap: model must return logits {(*ids.shape, 'V')}, got {got}")
    count = len(sample.log_probs)
    logits = logits[0, -1 - count : -1].double()
    chosen = logits.gather(-1, ids[0, -count:, None])[:, 0]
    return {**found, "": (chosen - logits.logsumexp(-1)).cpu()}


def _samples(file: str | os.PathLike[str], model: nn.Module) -> Iterator[_Sample]:
    """Those of a file, checked."""
    read = _of_safetensors if os.fspath(file).endswith(".safetensors") else _of_json
    modules = dict(model.named_modules())
    for i, (tokens, log_probs, hidden) in enumerate(read(file)):
        count = len(tokens)
        if len(log_probs) >= count and log_probs[: len(log_probs) - count + 1].isnan().all():
            log_probs = log_probs[len(log_probs) - count + 1 :]  # nothing comes before the first
        if not 0 < len(log_probs) < count:
            raise ValueError(
                f"log_prob_gap: log_probs must be those of the last tokens, at most {count - 1} "
                f"of {count}, got {len(log_probs)} in sample {i}"
            )
        for name, states in hidden.items():
            if name not in modules:
                raise ValueError(
                    f"log_prob_gap: hidden_states must be named as modules of the model, got "
                    f"{name!r}: model.named_modules() lists them"
                )
            if states.dim() != 2 or len(states) != count:
                raise ValueError(
                    f"log_prob_gap: hidden_states of {name} must be [{count}, D], a row a token, "
                    f"got {tuple(states.shape)} in sample {i}"
                )
        yield _Sample(tokens, log_probs, hidden)


_Parts = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def _of_json(file: str | os.PathLike[str]) -> Iterator[_Parts]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if any(type(token) is not int for token in row["tokens"]):
                    raise TypeError("tokens must be integers")
                tokens = torch.tensor(row["tokens"], dtype=torch.long)
                known = [math.nan if x is None else float(x) for x in row["log_probs"]]
                hidden = {n: torch.tensor(t) for n, t in row.get("hidden_states", {}).items()}
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f'log_prob_gap: line {number} of {file} must be {{"tokens": [...], '
                    f'"log_probs": [...]}}, got {type(error).__name__}: {error}'
                ) from None
            yield tokens, torch.tensor(known, dtype=torch.float64), hidden


def _of_safetensors(file: str | os.PathLike[str]) -> Iterator[_Parts]:
    from safetensors.torch import load_file

    table = load_file(file)
    if missing := [name for name in ("tokens", "log_probs") if name not in table]:
        raise ValueError(f"log_prob_gap: {file} must have {' and '.join(missing)}, got {[*table]}")
    tokens, log_probs = table["tokens"].long(), table["log_probs"].double()
    mask = table.get("attention_mask", torch.ones_like(tokens)).bool()
    hidden = {n.removeprefix(_HIDDEN): t for n, t in table.items() if n.startswith(_HIDDEN)}
    shapes = {n: tuple(t.shape) for n, t in table.items()}
    wrong = tokens.dim() != 2 or log_probs.dim() != 2 or len(log_probs) != len(tokens)
    wrong = wrong or log_probs.shape[1] > tokens.shape[1] or mask.shape != tokens.shape
    if wrong or any(t.shape[:2] != tokens.shape for t in hidden.values()):
        raise ValueError(
            "log_prob_gap: tokens and attention_mask must be [B, T], log_probs [B, N] with N <= T, "
            f"hidden_states [B, T, D], got {shapes}"
        )
    for i, seen in enumerate(mask):
        last = seen[-log_probs.shape[1] :]
        own = {name: t[i, seen] for name, t in hidden.items()}
        yield tokens[i, seen], log_probs[i][last], own
