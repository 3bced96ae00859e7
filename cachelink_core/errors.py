"""Every error that CacheLink raises, as one tree.

    CacheLinkError
    ├── ConfigError                  a setting is wrong; the message names it
    ├── ModelUnavailable             the model cannot be found or loaded here
    ├── UnsupportedModel             the model's cache cannot be moved, or can only be moved
    ├── InvalidRequest               a caller's argument is wrong
    │   ├── EmptyQuery               a question of no tokens
    │   ├── PrefixMismatch           re-rendered messages differ from the cached ids
    │   └── QueryTooLong             beyond the model's window
    ├── UnknownCache                 no cache of that name for this tenant
    │   └── StillInTransfer          known, but not installed within the wait
    ├── InsufficientTrust            the cache is less exact than asked for
    ├── Denied                       not allowed: receiver unlisted, token wrong
    │   └── Unauthenticated          no token where one is asked for
    ├── ResourceExhausted            a budget, slot or headroom is used up
    │   ├── BudgetExceeded           cache bytes
    │   ├── HeadroomExceeded         query + answer beyond the preallocated room
    │   └── SlotsTaken               as many transfers or answers as allowed are running
    ├── IncompatiblePeer             the two nodes do not fit; every differing field is named
    │   ├── IdentityMismatch
    │   └── UnsupportedVersion
    ├── ManifestError                the manifest is malformed or contradicts itself
    │   ├── UnknownCodec
    │   └── UnknownPacking
    ├── ProtocolError                an event that the session's state does not allow
    │   ├── LocalProtocolError       this side broke the protocol: a bug here
    │   └── RemoteProtocolError      the peer broke it
    │       ├── DuplicateHandoff     a live handoff has that id already
    │       ├── StaleEpoch           a message of an earlier life of a daemon
    │       ├── TruncatedStream      the stream ended without a commit
    │       ├── MissingChunk         the commit came before every chunk did
    │       ├── DuplicateChunk
    │       ├── UnexpectedChunk      outside the plan: an overlap, or a tensor that is not there
    │       ├── WrongLength          a chunk that is longer or shorter than its plan
    │       └── SealMismatch         the commit contradicts what arrived
    ├── DataLoss                     bytes arrived, but not those that were sent
    │   ├── ChecksumMismatch
    │   ├── CorruptChunk             a payload that does not decode to what it declares
    │   └── DecompressionBomb        it would decompress beyond its declared size
    ├── LinkError                    the other side cannot be reached or went away
    │   ├── LinkTimeout
    │   └── PeerGone
    ├── HandoffExpired               no progress within the lease
    ├── HandoffAborted               given up by the caller
    ├── HandoffFailed                the other side reports that the handoff failed
    ├── Draining                     the daemon is shutting down
    └── InternalError                a bug, reported without its details to the peer

Each class says whether the same call may succeed when it is tried again (``retryable``), and the
name of the gRPC status that a server answers with (``status``). ``reason`` is the metric label:
it comes from the class, so the set of labels is closed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol


class CacheLinkError(Exception):
    """Base of all errors of this project."""

    retryable: bool = False
    status: str = "INTERNAL"
    reason: str = "cache_link_error"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.reason = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


class ConfigError(CacheLinkError):
    """A setting is missing, unknown or impossible."""

    status = "FAILED_PRECONDITION"


class ModelUnavailable(CacheLinkError):
    """The model's files are not here."""

    status = "FAILED_PRECONDITION"


class UnsupportedModel(CacheLinkError):
    """The model's cache cannot be moved, or is made for nothing else; the message has the reason."""

    status = "FAILED_PRECONDITION"


class InvalidRequest(CacheLinkError):
    """A caller's argument is wrong; the message names it and its value."""

    status = "INVALID_ARGUMENT"


class EmptyQuery(InvalidRequest):
    """A question of no tokens."""


class PrefixMismatch(InvalidRequest):
    """Re-rendered messages do not begin with the cached token ids."""


class QueryTooLong(InvalidRequest):
    """Prefix, query and answer together exceed the model's window."""


class UnknownCache(CacheLinkError):
    """No cache of that name is installed for this tenant."""

    status = "NOT_FOUND"


class StillInTransfer(UnknownCache):
    """The handoff is known, but was not installed within the time waited."""

    retryable = True


class InsufficientTrust(CacheLinkError):
    """The cache is less exact than the caller asked for."""

    status = "FAILED_PRECONDITION"


class Denied(CacheLinkError):
    """Not allowed."""

    status = "PERMISSION_DENIED"


class Unauthenticated(Denied):
    """The call carries no token, and this daemon asks for one."""

    status = "UNAUTHENTICATED"


class ResourceExhausted(CacheLinkError):
    """A budget is used up."""

    retryable = True
    status = "RESOURCE_EXHAUSTED"


class BudgetExceeded(ResourceExhausted):
    """The cache does not fit the byte budget; the message has both numbers."""


class HeadroomExceeded(ResourceExhausted):
    """Query and answer need more room than the cache has, and it cannot grow."""


class SlotsTaken(ResourceExhausted):
    """As many transfers or answers as allowed are running."""


class IncompatiblePeer(CacheLinkError):
    """The two nodes do not fit."""

    status = "FAILED_PRECONDITION"


class Diff(Protocol):
    """A differing field with both values: ``identity.FieldDiff``, or one that came over the wire."""

    @property
    def field(self) -> str:
        """Its dotted name."""

    @property
    def ours(self) -> str:
        """The value of the node that compared."""

    @property
    def theirs(self) -> str:
        """The value of its peer."""


class IdentityMismatch(IncompatiblePeer):
    """The models differ; the message names each differing field with both values.

    Attributes:
        diffs: the same, field by field, as seen by the node that refused.
    """

    def __init__(self, diffs: Iterable[Diff] = (), message: str | None = None) -> None:
        self.diffs = tuple(diffs)
        named = "; ".join(f"{d.field}: ours {d.ours}, theirs {d.theirs}" for d in self.diffs)
        fields = "1 field" if len(self.diffs) == 1 else f"{len(self.diffs)} fields"
        super().__init__(message or f"identity differs in {fields}: {named}")


class UnsupportedVersion(IncompatiblePeer):
    """The manifest needs a newer reader than this one."""


class ManifestError(CacheLinkError):
    """The manifest is malformed or contradicts itself."""

    status = "INVALID_ARGUMENT"


class UnknownCodec(ManifestError):
    """No codec of that id, or not with those parameters."""


class UnknownPacking(ManifestError):
    """No packing of that id."""


class ProtocolError(CacheLinkError):
    """An event that the session's state does not allow."""

    status = "FAILED_PRECONDITION"


class LocalProtocolError(ProtocolError):
    """This side broke the protocol."""

    status = "INTERNAL"


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class DuplicateHandoff(RemoteProtocolError):
    """A live handoff has that id already; the first one is unharmed."""

    status = "ALREADY_EXISTS"


class StaleEpoch(RemoteProtocolError):
    """A message of an earlier life of a daemon."""


class TruncatedStream(RemoteProtocolError):
    """The stream ended without a commit."""

    retryable = True
    status = "DATA_LOSS"


class MissingChunk(RemoteProtocolError):
    """The commit came before every chunk did."""

    status = "DATA_LOSS"


class DuplicateChunk(RemoteProtocolError):
    """The same chunk twice."""

    status = "INVALID_ARGUMENT"


class UnexpectedChunk(RemoteProtocolError):
    """A chunk that the plan does not hold."""

    status = "INVALID_ARGUMENT"


class WrongLength(RemoteProtocolError):
    """A chunk that is longer or shorter than its plan."""

    status = "INVALID_ARGUMENT"


class SealMismatch(RemoteProtocolError):
    """The commit contradicts what arrived."""

    status = "DATA_LOSS"


class DataLoss(CacheLinkError):
    """Bytes arrived, but not those that were sent."""

    retryable = True
    status = "DATA_LOSS"


class ChecksumMismatch(DataLoss):
    """A digest does not fit its bytes."""


class CorruptChunk(DataLoss):
    """A payload does not decode to what it declares."""


class DecompressionBomb(DataLoss):
    """A payload would decompress beyond its declared size."""

    retryable = False


class LinkError(CacheLinkError):
    """The other side cannot be reached or went away."""

    retryable = True
    status = "UNAVAILABLE"


class LinkTimeout(LinkError):
    """A deadline passed."""

    status = "DEADLINE_EXCEEDED"


class PeerGone(LinkError):
    """The connection broke."""


class HandoffExpired(CacheLinkError):
    """The handoff made no progress within its lease and was freed."""

    retryable = True
    status = "DEADLINE_EXCEEDED"


class HandoffAborted(CacheLinkError):
    """The handoff was given up by its caller."""

    status = "CANCELLED"


class HandoffFailed(CacheLinkError):
    """The other side reports that the handoff failed."""

    status = "ABORTED"


class Draining(CacheLinkError):
    """The daemon is shutting down and takes no new work."""

    retryable = True
    status = "UNAVAILABLE"


class InternalError(CacheLinkError):
    """A bug here. The log has the details; the peer does not get them."""


def all_errors() -> dict[str, type[CacheLinkError]]:
    """Every error class by its ``reason``: the closed set of metric labels."""
    found: dict[str, type[CacheLinkError]] = {}
    queue: list[type[CacheLinkError]] = [CacheLinkError]
    while queue:
        cls = queue.pop()
        found[cls.reason] = cls
        queue.extend(cls.__subclasses__())
    return found
