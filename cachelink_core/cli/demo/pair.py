"""``cachelink demo --pair``: a cross-model handoff, measured on held-out documents."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from cachelink_core.cli.demo.checks import Check, check_exits
from cachelink_core.cli.demo.daemons import ended_by_sigterm, two_nodes
from cachelink_core.cli.demo.pair_arms import (
    ARMS,
    CACHELINK,
    MISMATCHED,
    NATIVE,
    RIDGE,
    SENDER,
    ZEROED,
    PairDemonstration,
    PairResult,
)
from cachelink_core.cli.demo.pair_plan import MAPPERS, PairPlan, read_pair
from cachelink_core.cli.demo.progress import Steps
from cachelink_core.cli.output import columns, console
from cachelink_core.cli.versions import versions
from cachelink_core.rpc.client import ReceiverClient, SenderClient

NATIVE_RECALL = 0.95
"""Both models answer from their own caches at least this well, or the pair shows nothing."""

RECOVERED = 0.5
"""Share of the gap between Ridge and native that the residual must close, in recall and in KL."""


class PairReport:
    """What a run found."""

    def __init__(
        self, plan: PairPlan, result: PairResult, exits: dict[str, int], total_s: float
    ) -> None:
        """Keeps the figures and judges them."""
        self._plan = plan
        self._result = result
        self._total_s = total_s
        self.facts = sorted({document.facts for document in plan.documents})
        self.checks = [*self._judge(), *check_exits(exits)]

    @property
    def broken(self) -> list[Check]:
        """Claims that do not hold."""
        return [check for check in self.checks if not check.ok]

    def show(self, shown_on: Console) -> None:
        """Prints the table."""
        table = columns(
            "cache",
            *(f"recall of {n}" for n in self.facts),
            *(f"KL of {n}" for n in self.facts),
            "for example",
        )
        for arm in ARMS:
            cells = [self._result.of(arm, facts) for facts in self.facts]
            table.add_row(
                arm,
                *(f"{cell.recall:.2f}" for cell in cells),
                *(f"{cell.mean_kl:.3f}" for cell in cells),
                cells[0].example,
            )
        shown_on.print(table)
        first = self._plan.documents[0]
        shown_on.print(f"\nA document of {first.facts} facts: {first.text}")
        for arm, reason in self._result.reasons.items():
            shown_on.print(f"{arm}: {reason}")
        held = len(self.checks) - len(self.broken)
        shown_on.print(
            f"\n{held} of {len(self.checks)} claims hold; KL in nats to the native receiver; "
            f"{self._total_s:.0f} s."
        )

    def document(self) -> dict[str, Any]:
        """The same for a program."""
        return {
            "pair": str(self._plan.folder),
            "versions": versions(),
            "mappers": self._plan.mappers,
            "total_s": self._total_s,
            "rows": [
                {
                    "arm": arm,
                    "facts": facts,
                    "questions": cell.asked,
                    "recall": cell.recall,
                    "kl": cell.mean_kl,
                    "example": cell.example,
                }
                for arm in ARMS
                for facts in self.facts
                for cell in [self._result.of(arm, facts)]
            ],
            "reasons": self._result.reasons,
            "checks": [{"claim": c.claim, "holds": c.ok, "seen": c.seen} for c in self.checks],
        }

    def _judge(self) -> list[Check]:
        return [check for facts in self.facts for check in self._judge_facts(facts)] + [
            Check(
                "the receiver's model processes the query alone",
                self._result.model_tokens == len(self._plan.documents[0].queries[0].query_ids),
                f"{self._result.model_tokens} tokens",
            )
        ]

    def _judge_facts(self, facts: int) -> list[Check]:
        recall = {arm: self._result.of(arm, facts).recall for arm in ARMS}
        kl = {arm: self._result.of(arm, facts).mean_kl for arm in ARMS}
        half = recall[RIDGE] + RECOVERED * (recall[NATIVE] - recall[RIDGE])
        seen = ", ".join(f"{arm} {recall[arm]:.2f}" for arm in ARMS)
        natives = min(recall[NATIVE], recall[SENDER])
        low = max(recall[MISMATCHED], recall[ZEROED])
        return [
            Check(
                f"{facts} facts: both models recall from their own", natives >= NATIVE_RECALL, seen
            ),
            Check(f"{facts} facts: ridge alone does not", recall[RIDGE] < NATIVE_RECALL / 2, seen),
            Check(
                f"{facts} facts: half the gap in recall is closed", recall[CACHELINK] >= half, seen
            ),
            Check(
                f"{facts} facts: half the gap in KL is closed",
                kl[CACHELINK] <= (1 - RECOVERED) * kl[RIDGE],
                f"ridge {kl[RIDGE]:.3f}, cachelink {kl[CACHELINK]:.3f}",
            ),
            Check(f"{facts} facts: no other cache does it", low < recall[CACHELINK] / 2, seen),
        ]


def run_pair(name: str, *, quiet: bool) -> PairReport:
    """Runs the demonstration of one pair from nothing to the last exit status.

    Args:
        name: of the pair, or its folder.
        quiet: show no progress.

    Raises:
        CacheLinkError: the pair is not there, or a node did not start, refused or failed.
    """
    plan = read_pair(name)
    notes = console(stderr=True)
    notes.quiet = quiet
    began = time.monotonic()
    notes.print(f"Pair {plan.folder}; {len(plan.documents)} held-out documents.")
    mappers = [str(plan.folder / "mappers" / each) for each in MAPPERS]
    with ended_by_sigterm(), ExitStack() as stack:
        with notes.status("Starting a receiver and a sender of different models."):
            nodes = stack.enter_context(
                two_nodes(
                    ["--store.budget", "500MB", "--headroom-tokens", "64"],
                    sender_options=["--model.name", str(plan.folder / "sender")],
                    receiver_options=[
                        *("--model.name", str(plan.folder / "receiver")),
                        *(option for path in mappers for option in ("--mappers", path)),
                        # Ridge fails its gate: that is what this shows.
                        "--allow-failed-gate",
                    ],
                )
            )
        with (
            SenderClient(nodes.sender_address) as sender,
            ReceiverClient(nodes.receiver_address) as receiver,
            Steps(notes, quiet=quiet) as steps,
            steps.step("documents") as show,
        ):
            words = _words(plan.folder / "receiver")
            result = PairDemonstration(plan, sender, receiver, words).run(show.answer)
        exits = nodes.drain()
    return PairReport(plan, result, exits, time.monotonic() - began)


def _words(folder: Path) -> Any:
    """A token as people read it."""
    import json

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = {token: word for word, token in vocabulary.items()}
    return lambda token: by_id.get(token, f"<{token}>")
