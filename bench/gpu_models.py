"""docs/gpu.md: the training runs and the vision models of one GPU, as tables."""

from __future__ import annotations

from . import gpu_folder, readme
from .gpu_folder import TRAINING, VISION, Folder
from .table import duration

AUTOCAST = "autocast-bf16"  # torch's own mixed precision, the rival of the vision models
LONGEST_LIST = 30
_PARTS = ("forward", "backward", "optimizer", "scaler")
_TF32 = {True: "on", False: "off", None: "-"}


def gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3g} GB"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def cell(words: object) -> str:
    """Text of a program in a table of Markdown."""
    return str(words).replace("|", "\\|").replace("\n", " ")


def bullets(lines: list[str]) -> str:
    more = [f"and {len(lines) - LONGEST_LIST} more"] if len(lines) > LONGEST_LIST else []
    return "".join(f"\n- {line}" for line in [*lines[:LONGEST_LIST], *more])


def training(folder: Folder) -> str:
    content = folder.files.get(TRAINING)
    if content is None:
        return f"Not run: `{gpu_folder.FILES[TRAINING]}`."
    rows, options = content["rows"], content["options"]
    base = next((r["tokens_per_second"] for r in rows if r["recipe"] == "fp32"), None)
    lines = []
    for row in rows:
        speed, parts = row["tokens_per_second"], row["median_seconds_by_part"]
        loss = row[f"validation {content['loss_name']}"]
        tf32 = (options.get("tf32") or {}).get(row["recipe"])
        lines.append(
            (
                *(row["recipe"], _TF32[tf32], number(speed)),
                f"{speed / base:.2f}x" if base and speed else "-",
                *(duration(parts[part]) if part in parts else "-" for part in _PARTS),
                gigabytes(row["peak_bytes"]),
                "-" if loss is None else f"{loss:.4f}",
                share(row["difference_to_fp32"]),
                "-" if row["skipped_steps"] is None else str(row["skipped_steps"]),
                cell(row["status"]),
            )
        )
    header = (
        *("recipe", "TF32", "tokens/s", "vs fp32", *_PARTS, "peak memory"),
        *(content["loss_name"], "vs fp32", "skipped", "status"),
    )
    size, text = options["parameters"], content["environment"]
    said = (
        f"{size / 1e6:.0f} million parameters, {options['steps']} steps of "
        f"{options['batch'] * options['context']:,} tokens (bytes of text, {text['text']}), seed "
        f"{options['seed']}. Times are medians over the steps; losses are of held-out text. TF32: "
        "whether torch's FP32 products were allowed to use it."
    )
    wrong = [f"failed: {words}" for words in text.get("problems") or []]
    gap = "\n" if wrong else ""
    return f"{readme.markdown(header, lines)}\n\n{said}{gap}{bullets(wrong)}"


def vision(folder: Folder) -> str:
    content = folder.files.get(VISION)
    if content is None:
        return f"Not run: `{gpu_folder.FILES[VISION]}`."
    rows = content["rows"]
    rivals = {r["model"]: r["images_per_s"] for r in rows if r["precision"] == AUTOCAST}
    lines: list[tuple[str, ...]] = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.get("reason"):
            name = f"{row['model']} {row['precision']}{' with TF32' if row['tf32'] else ''}"
            reasons.setdefault(row["reason"], []).append(name)
        first = (row["model"], row["source"] or "-", row["precision"], _TF32[row["tf32"]])
        if row["status"] != "ok":
            lines.append((*first, *[""] * 7, row["status"]))
            continue
        speed, rival = row["images_per_s"], rivals.get(row["model"])
        largest = number(row["largest_batch"])
        if row["largest_batch"] is not None and row["largest_batch_bounded"]:
            largest = f"at least {largest}"
        lines.append(
            (
                *first,
                *(number(row["batch"]), f"{row['params'] / 1e6:.1f} M"),
                *(number(speed), duration(row["batch"] / speed)),
                *(f"{speed / rival:.2f}x" if rival else "-", gigabytes(row["peak_bytes"])),
                *(largest, "ok"),
            )
        )
    header = (
        *("model", "source", "precision", "TF32", "batch", "parameters"),
        *("images/s", "step", f"vs {AUTOCAST}", "peak memory", "largest batch", "status"),
    )
    said = bullets([f"{', '.join(names)}: {reason}" for reason, names in reasons.items()])
    gap = "\n" if said else ""
    return f"{readme.markdown(header, lines)}{gap}{said}"
