"""Every metric of both daemons, in one place: name, help, labels, buckets.

Rules: the prefix is ``cachelink_``, the unit is seconds or bytes and comes last, counters end in
``_total``. Every label's values are a closed list, so that no document, cache, tenant or address ever
becomes a series, and every counter exists at zero from the start, so that ``rate()`` sees the first
event. ``prometheus_client`` is imported nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.process_collector import ProcessCollector

from cachelink_core import __version__
from cachelink_core.errors import CacheLinkError, all_errors

Role = Literal["sender", "receiver"]

CODECS: Final = tuple(
    codec + packing for codec in ("native", "bf16", "int8", "int4") for packing in ("", "+zstd")
)
OUTCOMES: Final = ("installed", "already_installed", "re_read", "refused", "failed", "expired")
PATHS: Final = ("exact", "lossy", "mapped", "recompute")
EVICTION_CAUSES: Final = ("budget", "ttl", "request")
DEVICE_WORK: Final = ("answer", "install", "prefill")
TOKEN_KINDS: Final = ("prefix", "query", "generated")

TIME_BUCKETS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)
"""Seconds: 1 ms to 60 s."""

BYTE_BUCKETS: Final = (*(float(1024 * 4**power) for power in range(12)), float(8 * 1024**3))
"""1 KiB to 8 GiB by powers of four (the last step is two)."""

_Labels = Mapping[str, tuple[str, ...]]
_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric, for documents and tests.

    Attributes:
        name: as it is exported.
        kind: ``counter``, ``gauge`` or ``histogram``.
        help: what it counts.
        labels: each label with every value that it can have.
    """

    name: str
    kind: str
    help: str
    labels: _Labels


class Labelled(Generic[_Metric]):
    """A metric whose labels take only the values of closed lists."""

    def __init__(self, metric: _Metric, labels: _Labels) -> None:
        self._metric = metric
        self._closed = {name: frozenset(values) for name, values in labels.items()}

    def labels(self, **values: str) -> _Metric:
        """The series of these labels.

        Raises:
            ValueError: a label or value that is not listed: a bug of the caller.
        """
        for name, value in values.items():
            if value not in self._closed.get(name, ()):
                raise ValueError(f"{name}={value!r} is not a listed label value of {self._metric}")
        return self._metric.labels(**values)


class Metrics:
    """The metrics of one daemon.

    Args:
        role: which daemon this is.
        registry: where they are registered; a new one when None.
    """

    def __init__(self, role: Role, registry: CollectorRegistry | None = None) -> None:
        self.role: Role = role
        self.registry = registry if registry is not None else CollectorRegistry()
        self._infos: list[MetricInfo] = []
        self._reasons = tuple(sorted(all_errors()))
        self._declare_times()
        self._declare_traffic()
        self._declare_outcomes()
        self._declare_state()
        ProcessCollector(registry=self.registry)

    def _declare_times(self) -> None:
        self.prefill_seconds = self._time("prefill", "Prefill of a prefix, all blocks")
        self.transfer_seconds = self._labelled_time(
            "transfer",
            "A handoff from its first payload frame to its receipt (sender) or install (receiver)",
            {"role": (self.role,), "codec": CODECS},
        )
        self.serialize_seconds = self._labelled_time(
            "serialize", "Encoding and packing in one handoff", {"codec": CODECS}
        )
        self.validate_seconds = self._time(
            "validate", "Digests, unpacking and decoding in one handoff"
        )
        self.map_seconds = self._time(
            "map", "Translation into the model of this node in one handoff"
        )
        self.install_seconds = self._time("install", "From the last decoded chunk to published")
        self.query_prefill_seconds = self._time("query_prefill", "Forward of a query")
        self.first_token_seconds = self._time(
            "first_token", "Request of an answer to its first token"
        )
        self.decode_seconds = self._time("decode", "Answer from its first token to its last")
        self.device_wait_seconds = self._labelled_time(
            "device_wait", "Wait of one piece of work for the device", {"kind": DEVICE_WORK}
        )

    def _declare_traffic(self) -> None:
        self.wire_bytes = self._counter("wire_bytes", "Payload bytes as sent or received")
        self.raw_bytes = self._counter("raw_bytes", "The same payload before packing")
        self.handoff_bytes = self._histogram(
            "cachelink_handoff_bytes",
            "Payload bytes of one handoff as sent or received",
            {},
            BYTE_BUCKETS,
        )
        self.tokens = self._labelled_counter(
            "tokens", "Tokens that this node's model processed", {"kind": TOKEN_KINDS}
        )

    def _declare_outcomes(self) -> None:
        reason = {"reason": self._reasons}
        self.handoffs = self._labelled_counter(
            "handoffs", "Handoffs that ended, by how", {"outcome": OUTCOMES}
        )
        self.manifest_rejected = self._labelled_counter(
            "manifest_rejected", "Offers refused before any payload, by reason", reason
        )
        self.chunk_rejected = self._labelled_counter(
            "chunk_rejected", "Chunks and commits refused, by reason", reason
        )
        self.answers = self._labelled_counter(
            "answers", "Answers that ended, by where their prefix came from", {"path": PATHS}
        )
        self.fallback_recompute = self._labelled_counter(
            "fallback_recompute", "Answers that read the prefix again, by why", reason
        )
        self.lease_expired = self._counter("lease_expired", "Reservations freed without progress")
        self.errors = self._labelled_counter("errors", "Calls that failed, by reason", reason)

    def _declare_state(self) -> None:
        self.cache_bytes = self._gauge(
            "cache_bytes", "Bytes of installed caches, headroom included"
        )
        self.cache_reserved_bytes = self._gauge(
            "cache_reserved_bytes", "Bytes reserved for handoffs under way"
        )
        self.cache_budget_bytes = self._gauge("cache_budget_bytes", "Bytes that caches may take")
        self.cache_entries = self._gauge("cache_entries", "Installed caches")
        self.cache_lookups = self._counter(
            "cache_lookups", "Look-ups of a cache by id or by prefix"
        )
        self.cache_hits = self._counter("cache_hits", "Look-ups that found one")
        self.cache_evictions = self._labelled_counter(
            "cache_evictions", "Caches dropped, by cause", {"cause": EVICTION_CAUSES}
        )
        self.inflight_transfers = self._gauge("inflight_transfers", "Handoffs under way")
        self.inflight_answers = self._gauge("inflight_answers", "Answers under way")
        self.codec_compile_seconds = self._gauge(
            "codec_compile_seconds", "Compiling codecs before ready; 0 if they run eager"
        )
        self.ready = self._gauge("ready", "1 while this node takes work")
        info = {"version": (__version__,), "role": (self.role,)}
        self.build_info = self._labelled_gauge("build_info", "1, with what runs here", info)
        self.build_info.labels(version=__version__, role=self.role).set(1)

    def failed(self, error: BaseException) -> None:
        """Counts a call that failed; anything that is not ours counts as an internal error."""
        reason = error.reason if isinstance(error, CacheLinkError) else "internal_error"
        self.errors.labels(reason=reason).inc()

    def describe(self) -> tuple[MetricInfo, ...]:
        """Every metric of this project, in the order of this file."""
        return tuple(self._infos)

    def names(self) -> tuple[str, ...]:
        """The exported name of each."""
        return tuple(info.name for info in self._infos)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a sample: a counter or gauge, or a histogram's ``_sum``, ``_count``.

        Raises:
            KeyError: there is no such sample yet.
        """
        found = self.registry.get_sample_value(name, labels)
        if found is None:
            raise KeyError(f"no sample {name}{labels}")
        return found

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """The content type and the text of all metrics, in the form that the scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self.registry)

    def _time(self, name: str, help_text: str) -> Histogram:
        return self._histogram(f"cachelink_{name}_seconds", help_text, {}, TIME_BUCKETS)

    def _labelled_time(self, name: str, help_text: str, labels: _Labels) -> Labelled[Histogram]:
        full = f"cachelink_{name}_seconds"
        return Labelled(self._histogram(full, help_text, labels, TIME_BUCKETS), labels)

    def _counter(self, name: str, help_text: str) -> Counter:
        full = self._describe(f"cachelink_{name}_total", "counter", help_text, {})
        return Counter(full, help_text, registry=self.registry)

    def _labelled_counter(self, name: str, help_text: str, labels: _Labels) -> Labelled[Counter]:
        full = self._describe(f"cachelink_{name}_total", "counter", help_text, labels)
        counter = Counter(full, help_text, tuple(labels), registry=self.registry)
        for values in product(*labels.values()):
            counter.labels(*values)
        return Labelled(counter, labels)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        full = self._describe(f"cachelink_{name}", "gauge", help_text, {})
        return Gauge(full, help_text, registry=self.registry)

    def _labelled_gauge(self, name: str, help_text: str, labels: _Labels) -> Labelled[Gauge]:
        full = self._describe(f"cachelink_{name}", "gauge", help_text, labels)
        return Labelled(Gauge(full, help_text, tuple(labels), registry=self.registry), labels)

    def _histogram(
        self, full: str, help_text: str, labels: _Labels, buckets: tuple[float, ...]
    ) -> Histogram:
        self._describe(full, "histogram", help_text, labels)
        return Histogram(full, help_text, tuple(labels), registry=self.registry, buckets=buckets)

    def _describe(self, full: str, kind: str, help_text: str, labels: _Labels) -> str:
        self._infos.append(MetricInfo(full, kind, help_text, labels))
        return full
