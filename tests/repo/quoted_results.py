"""Tables of the documents that quote result files, made from those files.

Where a result file changes, the test beside this fails and prints the table to paste.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
Document = dict[str, Any]

CODECS = {
    "native": "`native`",
    "native+zstd": "`native+zstd`",
    "int8": "`int8`",
    "int8+zstd": "`int8+zstd`",
    "int4": "`int4`",
    "int4+zstd": "`int4+zstd`",
    "int4 per token": "*per-token int4*",
}
CHOICES = {
    "int4": "`int4` as it is",
    "int4, no sinks": "the first four tokens quantized too",
    "int4, K over 256 tokens": "key groups of 256 tokens",
    "int4, V over 32 channels": "value groups of 32 channels",
    "int4 per token": "both per token and head",
    "int4, bias 300": "`int4`, key channels shifted by 300",
    "int4 per token, bias 300": "per token and head, shifted by 300",
}
"""Arms by what the documents call them."""


def result(name: str) -> Document:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def values(document: Document, arm: str, field: str) -> list[float]:
    """One value a text."""
    return [text["arms"][arm][field] for text in document["texts"]]


def median_kl(document: Document, arm: str) -> str:
    return f"{statistics.median(values(document, arm, 'kl_nats')):.4f}"


def noise_floor(document: Document) -> str:
    floors = [text["noise_floor"]["kl_nats"] for text in document["texts"]]
    return f"{statistics.median(floors):.4f}"


def codecs_table(document: Document) -> str:
    """Of the README: what each codec costs and loses."""
    rows = [
        "| codec | wire | bits a value | KL, median | KL, worst text | top-1, worst text | encode | decode |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, name in CODECS.items():
        bits = max(values(document, arm, "bits_per_element"))
        kls = values(document, arm, "kl_nats")
        cells = [
            name,
            f"{bits / 16:.3f}",
            f"{bits:.2f}",
            f"{statistics.median(kls):.4f}",
            f"{max(kls):.4f}",
            f"{min(values(document, arm, 'top1')):.3f}",
            _rate(document, arm, "encode", "pack"),
            _rate(document, arm, "decode", "unpack"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def choices_table(document: Document) -> str:
    """Of ARCHITECTURE: what each choice in ``int4`` is worth."""
    rows = ["| | bits a value | KL, median | KL, worst text |", "|---|---|---|---|"]
    for arm, name in CHOICES.items():
        kls = values(document, arm, "kl_nats")
        bits = max(values(document, arm, "bits_per_element"))
        rows.append(f"| {name} | {bits:.2f} | {statistics.median(kls):.4f} | {max(kls):.4f} |")
    return "\n".join(rows)


def demo_table(document: Document) -> str:
    """Of the README: one line an arm, laid out as the demonstration prints it."""
    head = [
        [
            "arm",
            "wire",
            "of",
            "prefill",
            "send",
            "load",
            "install",
            "query",
            "first",
            "round",
            "path",
            "same",
        ],
        ["", "MB", "bf16", "", "", "", "", "prefill", "token", "trip", "", ""],
    ]
    lines = head + [_demo_cells(row) for row in document["rows"]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 10, 11) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def pair_table(document: Document) -> str:
    """Of the README: what each cache of the recall pair is good for."""
    facts = sorted({row["facts"] for row in document["rows"]})
    heads = [*(f"recall of {n}" for n in facts), *(f"KL of {n}" for n in facts)]
    rows = [f"| cache | {' | '.join(heads)} |", f"|{'---|' * (1 + len(heads))}"]
    cells = {(row["arm"], row["facts"]): row for row in document["rows"]}
    for arm in dict.fromkeys(row["arm"] for row in document["rows"]):
        recalls = [f"{cells[arm, n]['recall']:.2f}" for n in facts]
        divergences = [f"{cells[arm, n]['kl']:.3f}" for n in facts]
        rows.append(f"| {arm} | {' | '.join([*recalls, *divergences])} |")
    return "\n".join(rows)


def _demo_cells(row: Document) -> list[str]:
    moved = row["wire_bytes"] > 0
    same = "yes" if row["equals_re_read"] else f"no, first {row['same_first_tokens']}"
    times = ("prefill_s", "send_s", "load_s", "install_s", "query_prefill_s", "first_token_s")
    return [
        row["arm"],
        f"{row['wire_bytes'] / 1e6:.2f}" if moved else "-",
        f"{row['ratio_to_bf16']:.3f}" if moved else "-",
        *("-" if row[name] is None else f"{row[name]:.3f}" for name in times),
        f"{row['round_trip_s']:.2f}{'*' if row['cold'] else ' '}",
        row["path"],
        "-" if row["arm"] == "re-read" else same,
    ]


def _rate(document: Document, arm: str, codec: str, packing: str) -> str:
    """GB/s of codec and packing one after the other, median over the texts."""
    speeds = [text["gb_per_s"].get(arm) for text in document["texts"]]
    if None in speeds:
        return "-"
    return f"{statistics.median(1 / (1 / s[codec] + 1 / s[packing]) for s in speeds):.2f}"
