"""What is wrong with the loss scaling and the optimizer of a step, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .op import SHORT

if TYPE_CHECKING:
    from .recorder import Recorder
    from .report import Audit


def of_scaler(audit: Audit, scaler: Any, recorder: Recorder) -> list[str]:
    """Of torch.amp.GradScaler or ours, if the block was given one."""
    has_fp16 = any("fp16" in op.precision for op in audit.ops)
    if scaler is None:
        is_step = recorder.has_stepped and recorder.has_backward and has_fp16
        said = "fp16 gradients are not scaled, or audit was not given the scaler"
        return [said] if is_step else []
    if not scaler.is_enabled():
        return ["GradScaler is disabled: fp16 gradients are not scaled"] if has_fp16 else []
    found = []
    called = recorder.called
    if recorder.has_backward and not {"scale", "get_scale"}.intersection(called):
        found.append(
            "scaler.scale(loss) was not called before backward(): gradients are not scaled"
        )
    elif recorder.has_stepped and "step" not in called:
        found.append("optimizer.step() ran in place of scaler.step(), which skips Inf and NaN")
    elif "step" in called and recorder.skips_all:
        found.append(
            "GradScaler has skipped every step: gradients are Inf or NaN (as is usual in the first "
            "steps, until the scale has fallen)"
        )
    # step() unscales what is not yet unscaled, which is too late for the limit of a norm. Gradients
    # of a loss that was not scaled, and those that the program divides itself, may be clipped.
    before = called[: called.index("clip")] if "clip" in called else []
    if "scale" in before and not {"unscale_", "get_scale"}.intersection(before):
        found.append(
            "gradients were clipped before scaler.unscale_(optimizer): the limit is compared with "
            "a norm that has the loss scale in it"
        )
    # torch raises in the next step; ours goes on.
    if "step" in called and "update" not in called:
        found.append("scaler.step() was called, and scaler.update() was not: the scale stays")
    if not has_fp16 and recorder.has_backward:
        found.append("GradScaler scales the loss, and no op computes in fp16: it is not needed")
    if "scale" in called and (scale := float(scaler.get_scale())) < 1:
        found.append(f"the loss scale has fallen to {scale:g}: gradients overflow, or are NaN")
    return found


def lost_updates(recorder: Recorder) -> list[str]:
    """As measured: with a large learning rate none is lost. Of more than half of the elements: a
    few have a gradient near 0 in any step."""
    updates = recorder.updates
    if updates is None or (lost := updates.lost()) <= 0.5:
        return []
    return [
        f"{lost:.0%} of the {SHORT[updates.dtype]} weights with a gradient did not change in "
        "optimizer.step(): the update is lost to rounding, which FP32 masters would keep"
    ]
