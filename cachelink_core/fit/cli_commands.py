"""``cachelink fit`` and ``cachelink solve``. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from cachelink_core.fit.build import SolveOptions
    from cachelink_core.fit.plan import FitPlan
    from cachelink_core.fit.selection import Progress as Told
    from cachelink_core.transport.card import Card

fit_app = typer.Typer(help="Fit a mapper from one model's cache to another's.")
solve_app = typer.Typer(help="Make another mapper of saved moments, without models or data.")

KOption = Annotated[int, typer.Option(help="Sender layers that each receiver layer reads.")]
SelectionOption = Annotated[
    str, typer.Option(help="How they are chosen: same-head, all-head or greedy.")
]
LambdaOption = Annotated[float, typer.Option("--lambda", help="Ridge penalty.")]
ModeOption = Annotated[
    str, typer.Option(help="What lambda is added to: sum, mean, relative or heldout.")
]
HeadsOption = Annotated[str, typer.Option(help="Sender heads a receiver head reads: all or local.")]
WeightsOption = Annotated[str, typer.Option(help="Dtype of the artifact: float32 or bfloat16.")]
OutOption = Annotated[Path, typer.Option(help="Folder for the mapper.")]


@fit_app.callback(invoke_without_command=True)
def fit_command(
    sender: Annotated[str, typer.Option(help="Model whose cache is read.")] = "",
    receiver: Annotated[str, typer.Option(help="Model whose cache is written.")] = "",
    calibration: Annotated[
        str, typer.Option(help="Text file, JSONL, folder, or a data set on the hub.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for mapper and moments.")] = None,
    sequences: Annotated[int, typer.Option(help="Sequences to fit on.")] = 500,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 1_024,
    stride: Annotated[int, typer.Option(help="Every how manyth position is observed.")] = 4,
    held_out: Annotated[float, typer.Option(help="Held-out sequences as a share of them.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the order of documents.")] = 0,
    k: KOption = 8,
    selection: SelectionOption = "all-head",
    lambda_: LambdaOption = 0.01,
    lambda_mode: ModeOption = "sum",
    heads: HeadsOption = "all",
    weights: WeightsOption = "float32",
    panels: Annotated[
        str, typer.Option(help="Moments: full, per-layer where that does not fit, or auto.")
    ] = "auto",
    products: Annotated[
        str, typer.Option(help="In which a chunk is multiplied: float64, or float32 for speed.")
    ] = "float64",
    memory: Annotated[str, typer.Option(help="What moments may take, such as 64GB.")] = "",
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "auto",
    device: Annotated[str, typer.Option(help="Of both models.")] = "auto",
    moments_device: Annotated[
        str, typer.Option(help="Where moments are kept and multiplied; cuda if they fit there.")
    ] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cost and stop; needs configurations only.")
    ] = False,
    pair: Annotated[
        Path | None, typer.Option(help="With --dry-run: a pair card, manifests/pairs/NAME.json.")
    ] = None,
) -> None:
    """Fit a mapper from one model's cache to another's."""
    from cachelink_core.fit.plan import plan_fit
    from cachelink_core.fit.shapes import model_shape, read_pair_card

    if pair is not None and not dry_run:
        raise typer.BadParameter("--pair names no weights; it goes with --dry-run")
    if pair is None and not (sender and receiver):
        raise typer.BadParameter("--sender and --receiver are needed")
    card = None if pair is None else read_pair_card(pair)
    plan = plan_fit(
        model_shape(sender) if card is None else card.sender,
        model_shape(receiver) if card is None else card.receiver,
        k=k,
        sequences=sequences,
        length=length,
        stride=stride,
        held_out=held_out,
    )
    Console(stderr=not dry_run).print(plan_table(plan))
    if dry_run:
        return
    from cachelink_core.engine.loading import load_engine
    from cachelink_core.fit.run import FitOptions, fit
    from cachelink_core.units import parse_size

    if not calibration or out is None:
        raise typer.BadParameter("--calibration and --out are needed, or --dry-run")
    place = own_device(device)
    engines = [load_engine(name, dtype=dtype, device=place) for name in (sender, receiver)]
    options = FitOptions(
        calibration=calibration,
        sequences=sequences,
        length=length,
        stride=stride,
        held_out=held_out,
        seed=seed,
        panels=checked("panels", panels, ("auto", "full", "per-layer")),
        products=checked("products", products, ("float64", "float32")),
        memory_bytes=parse_size(memory) if memory else None,
        device=moments_device,
        solve=solve_options(k, selection, lambda_, lambda_mode, heads, weights),
    )
    with progress_bars() as told:
        fitted = fit(engines[0], engines[1], options, out, resume=resume, progress=told)
    if fitted is not None:
        show_card(fitted, out)


@solve_app.callback(invoke_without_command=True)
def solve_command(
    moments: Annotated[Path, typer.Option(help="File that a fit left: moments.safetensors.")],
    out: OutOption,
    k: KOption = 8,
    selection: SelectionOption = "all-head",
    lambda_: LambdaOption = 0.01,
    lambda_mode: ModeOption = "sum",
    heads: HeadsOption = "all",
    weights: WeightsOption = "float32",
) -> None:
    """Make another mapper of saved moments, without models or data."""
    from cachelink_core.fit.run import solve

    options = solve_options(k, selection, lambda_, lambda_mode, heads, weights)
    with progress_bars() as told:
        card = solve(moments, options, out, progress=told)
    show_card(card, out)


def own_device(device: str) -> str:
    """``auto`` in one of torchrun's processes on a host with GPUs is the GPU of that process."""
    import torch

    local = os.environ.get("LOCAL_RANK", "")
    if device == "auto" and local and torch.cuda.is_available():
        return f"cuda:{int(local) % torch.cuda.device_count()}"
    return device


def solve_options(
    k: int, selection: str, value: float, mode: str, heads: str, weights: str
) -> SolveOptions:
    """Checks and packs the options that both commands have.

    Raises:
        ConfigError: a choice that is not known; names it and the known ones.
    """
    from cachelink_core.fit.build import SolveOptions

    return SolveOptions(
        k=k,
        selection=checked("selection", selection, ("same-head", "all-head", "greedy")),
        heads=checked("heads", heads, ("all", "local")),
        lambda_value=value,
        lambda_mode=checked("lambda-mode", mode, ("sum", "mean", "relative", "heldout")),
        weights_dtype=checked("weights", weights, ("float32", "bfloat16")),
    )


def checked(option: str, value: str, known: tuple[str, ...]) -> Any:
    """The value, if it is one of the known ones.

    Raises:
        ConfigError: it is not.
    """
    from cachelink_core.errors import ConfigError

    if value not in known:
        raise ConfigError(f"--{option} is {value!r}; known: {', '.join(known)}")
    return value


def plan_table(plan: FitPlan) -> Table:
    """What a fit will cost, for people."""
    table = Table(title="what this fit takes", show_header=False, title_justify="left")
    per_kind = plan.full
    rows = (
        ("observations", f"{plan.observations:,}"),
        ("both models, bf16", size(plan.model_bytes)),
        ("sender's cache a token", f"{plan.source_token_bytes:,} B"),
        ("receiver's cache a token", f"{plan.target_token_bytes:,} B"),
        ("full moments, both kinds and splits", size(per_kind.nbytes)),
        ("  Gram of one kind and split", size(per_kind.gram_bytes)),
        ("  cross moments of one kind and split", size(per_kind.cross_bytes)),
        ("per-layer moments, likewise", size(plan.per_layer.nbytes)),
        ("scratch of the largest solve", size(plan.largest_solve_bytes)),
        ("peak beside the models", size(plan.peak_bytes)),
        ("Ridge weights, float32", f"{size(plan.ridge_bytes)}, {plan.ridge_parameters:,} numbers"),
        ("residual, if trained", f"{plan.residual_parameters:,} parameters"),
        ("FLOPs: both prefills", f"{plan.prefill_flops:.2e}"),
        ("FLOPs: moments, full", f"{per_kind.flops:.2e}"),
        ("FLOPs: moments, per layer", f"{plan.per_layer.flops:.2e}"),
        ("FLOPs: solves", f"{plan.solve_flops:.2e}"),
        ("FLOPs to map a token", f"{plan.apply_flops_per_token:.2e}"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def show_card(card: Card, out: Path) -> None:
    """Prints what was fitted, with everything that was not as asked for."""
    console = Console(stderr=True)
    table = Table("layer", "reads", "R² K", "R² V", title=f"{out}: {card.digest[:16]}")
    for index, layer in enumerate(card.layers):
        r2 = [fit.r2_held_out if fit.r2_held_out is not None else fit.r2_in_sample
              for fit in (layer.key, layer.value)]  # fmt: skip
        shown = ["-" if value is None else f"{value:.3f}" for value in r2]
        table.add_row(str(index), " ".join(map(str, layer.sources)), *shown)
    console.print(table)
    for warning in card.fit.warnings if card.fit is not None else ():
        console.print(f"warning: {warning}")


def size(nbytes: float) -> str:
    """Bytes in decimal units."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


@contextmanager
def progress_bars() -> Iterator[Told]:
    """One bar a stage, on the terminal's error output."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def told(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield told
