"""transformers: `AuditCallback` audits chosen steps of a Trainer."""

from __future__ import annotations

from collections.abc import Container, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import transformers

from .. import _said
from ..diagnostics.audit import Audit
from ..diagnostics.writers import Recorded


class AuditCallback(Recorded, transformers.TrainerCallback):
    """Audits training steps inside of transformers' Trainer, or one of ours, with the optimizer and
    the scaler that it uses.

        audit = AuditCallback(steps=(1, 1000), path="audits")
        Trainer(model, args, train_dataset=dataset, callbacks=[audit]).train()
        print(audit.audits[1])

    steps: the numbers of the steps, as the Trainer counts them: the first is 1, and one step is all
    micro-batches and the update; range(1, 10**6, 1000) for every thousandth. An audited step takes
    longer; the others do not. path: a folder for audit-STEP.json, audit-STEP.html and audit.jsonl,
    with a line for each audited step; None writes nothing. logger: gets the numbers of each audited
    step, as in `to_logger`: "audit/findings" (how many), "audit/precision/NAME" and
    "audit/decided/NAME" (shares of the FLOPs).

    One line is logged for each audited step. `audits` has them by step, `records` what a line of
    audit.jsonl has. On several ranks only the first is audited. A step that is left by an exception
    stays under the modes of audit: call `close` before this thread runs anything else.

    TypeError if `steps` has no numbers to look up, or for another kind of logger.
    """

    def __init__(
        self,
        steps: Container[int] = (1,),
        path: str | PathLike[str] | None = None,
        logger: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(steps, Container) or isinstance(steps, (str, bytes)):
            raise TypeError(
                "AuditCallback: steps must be a collection of numbers of steps, as (1, 1000), got "
                f"{steps!r}"
            )
        self.steps, self.logger = steps, logger
        self.path = None if path is None else Path(path)
        self.audits: dict[int, Audit] = {}
        self._running: Audit | None = None
        if logger is not None:
            self.to_logger(logger)  # raises for what is none

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        if state.global_step + 1 not in self.steps or not state.is_world_process_zero:
            return
        inner = getattr(optimizer, "optimizer", optimizer)  # which Accelerate has prepared
        self._running = Audit(model, inner, getattr(optimizer, "scaler", None))
        self._running.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        audit = self._running
        if audit is None:
            return
        self.close()
        step = state.global_step
        self.audits[step] = audit
        first = [f"{len(audit.findings)} findings", *audit.findings[:1]] if audit.findings else []
        _said.say("; ".join([f"audit of step {step}: {audit.summary()}", *first]))
        self.records.append({
            "step": step,
            "findings": audit.findings,
            "flops": audit.flops,
            "decided": audit.decided,
        })  # fmt: skip
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            audit.save(self.path / f"audit-{step}.json")
            audit.save_html(self.path / f"audit-{step}.html")
            self.to_jsonl(self.path / "audit.jsonl")
        if self.logger is not None:
            self.to_logger(self.logger)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()  # of a step that was not finished

    def close(self) -> None:
        """End the audit of the current step, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)

    def _numbers(self, record: dict[str, Any]) -> Iterator[tuple[str, float]]:
        yield "audit/findings", len(record["findings"])
        for kind, shares in (("precision", record["flops"]), ("decided", record["decided"])):
            for name, flops in shares.items():
                yield f"audit/{kind}/{name}", flops / sum(shares.values())
