"""The recall pair's figures for people: a page of tables, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cachelink_bench.recall_pair.pair_build import RIDGE, VARIANTS
from cachelink_bench.recall_pair.pair_eval import CACHELINK, MISMATCHED, NATIVE, SENDER, ZEROED

ORDER = (NATIVE, SENDER, RIDGE, *VARIANTS, MISMATCHED, ZEROED)


def page(figures: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    return (
        "\n\n".join(
            [
                "# The recall pair: a cache translated between two models",
                _about(figures),
                "![recall and KL](recall_pair.png)",
                "## Recall and divergence",
                _scores_table(figures),
                _recovered_text(figures),
                "## The gate, and what it does not look at",
                _gate_table(figures),
                _gate_text(),
                "## How far the residual moves the cache",
                _moves_table(figures),
                _moves_text(figures),
                "## Make them again",
                "```\npython -m cachelink_bench.recall_pair pair build --work WORK\n"
                "python -m cachelink_bench.recall_pair pair evaluate --work WORK --out bench/results\n"
                "```",
            ]
        )
        + "\n"
    )


def draw(figures: dict[str, Any], path: Path) -> None:
    """Recall by facts, and held-out KL over the training."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = list(figures["scores"])
    arms = [arm for arm in ORDER if arm in figures["scores"][counts[0]]]
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        places = [i + (index - len(arms) / 2) * width for i in range(len(counts))]
        heights = [figures["scores"][count][arm]["recall"] for count in counts]
        left.bar(places, heights, width, label=arm)
    left.set_xticks(range(len(counts)), [f"{count} facts" for count in counts])
    left.set_ylabel("recall on held-out documents")
    left.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    for name, points in figures["curves"].items():
        steps = [point["step"] for point in points]
        right.plot(steps, [point["held_out_kl"] for point in points], label=name)
    right.set_xlabel("training step (0 is Ridge)")
    right.set_ylabel("held-out KL of native to mapped (nats a token)")
    right.set_ylim(bottom=0)
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _about(figures: dict[str, Any]) -> str:
    settings, first = figures["settings"], figures["mappers"][RIDGE]
    layers = "; ".join(" ".join(map(str, sources)) for sources in first["layers"])
    return (
        "Sender and receiver are the two committed checkpoints of `bench/models/recall`: other "
        "widths, other depths, trained apart. The receiver never reads the document; its cache is "
        "translated from the sender's. Ridge reads k = 2 of the sender's 4 layers for each of the "
        f"receiver's 6 ({layers}). The residual has {settings['stem']} units a stem and "
        f"{settings['fused']} behind them, standardised inputs, AdamW {settings['learning_rate']:g} "
        f"with a cosine, {settings['steps']} steps of {settings['batch']} documents, loss "
        f"{settings['loss']}. Everything runs in bfloat16, the checkpoints' own dtype, on one CPU "
        "thread, through the kernels that serve."
    )


def _scores_table(figures: dict[str, Any]) -> str:
    counts = list(figures["scores"])
    arms = [arm for arm in ORDER if arm in figures["scores"][counts[0]]]
    head = ["cache", *(f"recall, n = {c}" for c in counts), *(f"KL, n = {c}" for c in counts)]
    rows = []
    for arm in arms:
        found = [figures["scores"][count][arm] for count in counts]
        rows.append(
            [arm, *(f"{s['recall']:.3f}" for s in found), *(f"{s['kl']:.3f}" for s in found)]
        )
    return _table(head, rows) + (
        "\n\nRecall: share of single queries whose likeliest next token is the answer; guessing "
        "among the document's actions gives 1/n. KL: native receiver ‖ this, mean over the tokens "
        "of up to 16 queries with their answers. 48 held-out documents of each size. At n = 8 even "
        "the two native models disagree: their own training ended on documents of 32 facts."
    )


def _recovered_text(figures: dict[str, Any]) -> str:
    counts = list(figures["scores"])
    lines = []
    for name, shares in figures["recovered"].items():
        parts = ", ".join(
            f"n = {c}: {shares[c]['recall']:.0%} of recall and {shares[c]['kl']:.0%} of KL"
            for c in counts
        )
        lines.append(f"- {name}: {parts}")
    return "Of the gap between Ridge and the native receiver it closes:\n\n" + "\n".join(lines)


def _gate_table(figures: dict[str, Any]) -> str:
    head = ["mapper", "gate", "KL mapped", "mismatched", "zeroed", "cosine by layer"]
    rows = []
    for name, found in figures["mappers"].items():
        gate = found["gate"]
        verdict = "passed" if gate["passed"] else "failed"
        kl = [f"{gate['kl'][arm]:.3f}" for arm in ("mapped", "mismatched", "zeroed")]
        cosines = " ".join(f"{value:.2f}" for value in gate["attention_cosine"])
        rows.append([name, verdict, *kl, cosines])
    return _table(head, rows)


def _gate_text() -> str:
    return (
        "A mapper passes if its KL is at most half the smaller of the other two. The cosine of each "
        "layer's attention output is reported and does not decide."
    )


def _moves_table(figures: dict[str, Any]) -> str:
    head = ["mapper", "error K", "error V"]
    head += [f"{what} {kind}" for what in ("RMS(Δ)/RMS(Ridge)", "cos(Δ, missing)") for kind in "KV"]
    rows = []
    for name, found in figures["mappers"].items():
        told = found["gate"]["reported"]
        errors = [f"{told[f'{kind}.relative_squared_l2']:.3f}" for kind in "KV"]
        moves = [
            f"{told[f'{kind}.residual_{what}']:.3f}" if f"K.residual_{what}" in told else "–"
            for what in ("rms_ratio", "cosine")
            for kind in "KV"
        ]
        rows.append([name, *errors, *moves])
    return _table(head, rows)


def _moves_text(figures: dict[str, Any]) -> str:
    before = figures["mappers"][RIDGE]["gate"]["reported"]
    lines = []
    for name, found in figures["mappers"].items():
        if name != RIDGE:
            told = found["gate"]["reported"]
            changes = ", ".join(
                f"{kind} {told[key] / before[key] - 1:+.0%}"
                for kind in "KV"
                for key in [f"{kind}.relative_squared_l2"]
            )
            lines.append(f"- {name}: {changes}")
    return (
        "Error: ‖native − mapped‖² / ‖native‖², the mean over layers, position 0 left out. Its "
        "change against Ridge:\n\n" + "\n".join(lines) + "\n\nThe paper's changed by less than "
        "0.4 %. Left alone, the residual finds another cache that the receiver reads the same way. "
        "The variant whose loss has a penalty on ‖Δ‖² / ‖Ridge‖² shows how much of that move is "
        "needed: compare its recall and its error."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


__all__ = ["CACHELINK", "draw", "page"]
