"""Runs every arm of the demonstration as a client of the two nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachelink_core.cli.demo.daemons import RECEIVER_NAME
from cachelink_core.cli.demo.plan import CODECS, OTHER, RE_READ, STREAMED, ZEROED, Plan
from cachelink_core.cli.demo.prepare import Prepared
from cachelink_core.cli.demo.progress import Steps
from cachelink_core.cli.demo.rows import Row, Said
from cachelink_core.cli.demo.zeroed import hand_zeros_over, zeroed_header
from cachelink_core.codec_spec import ITEM_BYTES
from cachelink_core.errors import InternalError
from cachelink_core.identity import ModelIdentity
from cachelink_core.rpc.client import (
    Document,
    HeldCache,
    Question,
    Receipt,
    ReceiverClient,
    Sampling,
    SenderClient,
)
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.types import Context, PrefixSource


class Demonstration:
    """One run, arm by arm."""

    def __init__(
        self,
        plan: Plan,
        prepared: Prepared,
        sender: SenderClient,
        receiver: ReceiverClient,
        steps: Steps,
    ) -> None:
        """Binds a plan to two nodes.

        Args:
            plan: what to do.
            prepared: the document's tokens.
            sender: that reads it.
            receiver: that answers.
            steps: told of all progress.
        """
        self.identity: ModelIdentity = receiver.ping().identity
        self._plan = plan
        self._prepared = prepared
        self._sender = sender
        self._receiver = receiver
        self._steps = steps

    def run(self) -> list[Row]:
        """Runs every arm in the order of the table.

        Raises:
            CacheLinkError: a node refused or failed.
        """
        document = Document(self._plan.document)
        prefilled = self._prefilled("prefill", document)
        rows = [self._moved(codec, codec, prefilled) for codec in CODECS]
        rows.append(self._streamed(document))
        rows.append(self._re_read(document))
        rows.append(self._zeroed())
        rows.append(
            self._moved(OTHER, "native", self._prefilled(OTHER, Document(self._plan.other)))
        )
        return rows

    def _prefilled(self, step: str, document: Document) -> Receipt:
        with self._steps.step(step) as show:
            return self._sender.prefill(document, on_progress=show.handoff)

    def _moved(self, arm: str, codec: str, prefilled: Receipt) -> Row:
        """A cache that the sender holds already, then the question."""
        return self._row(
            arm,
            lambda: HeldCache(prefilled.cache_id),
            codec,
            prefill_s=prefilled.phases["prefill"],
        )

    def _streamed(self, document: Document) -> Row:
        """Nothing held anywhere: each block is sent while the next one is prefilled."""
        _evict_all(self._sender)
        return self._row(STREAMED, lambda: document, "native")

    def _row(
        self,
        arm: str,
        prefix: Callable[[], PrefixSource],
        codec: str,
        prefill_s: float | None = None,
    ) -> Row:
        _evict_all(self._receiver)
        with self._steps.step(arm) as show:
            began = time.monotonic()
            receipt = self._sender.handoff(
                prefix(), RECEIVER_NAME, codec=codec, on_progress=show.handoff
            )
            said = self._ask(HeldCache(receipt.cache_id), show.answer)
            round_trip_s = time.monotonic() - began
        if receipt.already_installed:
            raise InternalError(f"{arm}: the receiver held the cache, though it was evicted")
        return Row(
            arm=arm,
            tokens=receipt.tokens,
            wire_bytes=receipt.wire_bytes,
            bf16_bytes=self._bf16_bytes(receipt.native_bytes),
            prefill_s=receipt.phases["prefill"] if prefill_s is None else prefill_s,
            send_s=receipt.phases["send"],
            load_s=receipt.phases["load"],
            load_busy_s=receipt.phases["load_busy"],
            install_s=receipt.phases["install"],
            round_trip_s=round_trip_s,
            cold=prefill_s is None,
            said=said,
            receipt=receipt,
        )

    def _re_read(self, document: Document) -> Row:
        """The text goes to the receiver, which reads it: what a handoff saves."""
        with self._steps.step(RE_READ) as show:
            began = time.monotonic()
            said = self._ask(document, show.answer)
            round_trip_s = time.monotonic() - began
        return Row(
            arm=RE_READ,
            tokens=len(self._prepared.token_ids),
            wire_bytes=0,
            bf16_bytes=0,
            prefill_s=said.final.phases["prefix"],
            send_s=None,
            load_s=None,
            load_busy_s=None,
            install_s=None,
            round_trip_s=round_trip_s,
            cold=True,
            said=said,
        )

    def _zeroed(self) -> Row:
        """The right header with zeros behind it."""
        _evict_all(self._receiver)
        header = zeroed_header(self.identity, self._prepared.token_ids, self._prepared.frame)
        with (
            self._steps.step(ZEROED) as show,
            TransferClient(self._receiver.address) as transfer,
        ):
            began = time.monotonic()
            receipt = hand_zeros_over(transfer, header)
            sent_s = time.monotonic() - began
            said = self._ask(HeldCache(receipt.cache_id), show.answer)
            round_trip_s = time.monotonic() - began
        return Row(
            arm=ZEROED,
            tokens=header.tokens,
            wire_bytes=receipt.wire_bytes,
            bf16_bytes=self._bf16_bytes(header.layout.native_bytes),
            prefill_s=None,
            send_s=max(0.0, sent_s - receipt.tail_s),
            load_s=receipt.load_s,
            load_busy_s=receipt.load_busy_s,
            install_s=receipt.install_s,
            round_trip_s=round_trip_s,
            cold=False,
            said=said,
            receipt=receipt,
        )

    def _ask(self, context: Context, show: Callable[[int, int], None]) -> Said:
        plan = self._plan
        ids: list[int] = []
        text = answer = ""
        ended = False
        running = self._receiver.answer(
            context,
            Question(plan.question),
            sampling=Sampling(max_new_tokens=plan.tokens, ignore_eos=True),
        )
        for delta in running:
            ids += delta.token_ids
            text += delta.text
            if not ended:
                answer = text
                ended = bool(self._prepared.eos_ids.intersection(delta.token_ids))
            show(len(ids), plan.tokens)
        assert running.final is not None, "the answer was read to its end"
        return Said(tuple(ids), text, answer.strip(), running.final)

    def _bf16_bytes(self, native_bytes: int) -> int:
        return native_bytes * ITEM_BYTES["bfloat16"] // ITEM_BYTES[self.identity.dtype]


def _evict_all(client: SenderClient | ReceiverClient) -> None:
    for cache in client.caches().caches:
        client.evict(cache.cache_id)
