"""Every numeric limit of the protocol and of the daemons, with its reason.

A peer's number is compared with these before anything is allocated.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_PREFIX_TOKENS: Final = 262_144
"""Token ids in one manifest: 1 MiB as u32, so that the header still fits one control message."""

MAX_LAYERS: Final = 1_024
MAX_KV_HEADS: Final = 1_024
MAX_HEAD_DIM: Final = 4_096
"""Geometry bounds: an order of magnitude above the largest published model."""

DEFAULT_BLOCK_TOKENS: Final = 256
MIN_BLOCK_TOKENS: Final = 16
MAX_BLOCK_TOKENS: Final = 8_192
"""A block is the unit of overlap: too small costs a prefill launch each, too large hides nothing."""

RUN_RAW_BYTES: Final = 1 * MIB
"""Raw bytes of one run of a full block. At 1 MiB gRPC in Python costs the least CPU a byte: 64 KiB
costs three times as much, 4 MiB and more fault in fresh memory for every message."""

TOKEN_CUT: Final = 128
"""A tensor above RUN_RAW_BYTES is cut at multiples of this many tokens, so that no cut splits a
quantization group."""

MAX_CHUNK_WIRE_BYTES: Final = 4 * MIB - 4 * KIB
"""Wire bytes of one chunk. Almost all are at most RUN_RAW_BYTES; a model whose 128 tokens of one
tensor weigh more (64 heads x 128 in bf16: 2 MiB) sends larger ones, and above this it is refused."""

MAX_DATA_MESSAGE_BYTES: Final = 4 * MIB
"""``grpc.max_receive_message_length`` of the data service: gRPC's default, never unlimited."""

MAX_CONTROL_MESSAGE_BYTES: Final = 4 * MIB
"""gRPC's own default, kept for control calls: a header with 262,144 ids is 1 MiB."""

MAX_HEADER_BYTES: Final = 2 * MIB
MAX_SEAL_BYTES: Final = 4 * MIB - 4 * KIB
"""The seal travels as one frame of the data stream."""

MAX_CHUNKS: Final = 60_000
"""Chunks of one handoff: each costs about 32 bytes in the seal."""

DEFAULT_LEASE_S: Final = 30.0
MIN_LEASE_S: Final = 1.0
MAX_LEASE_S: Final = 600.0
"""Seconds without progress after which a reservation is freed."""

HEADER_MEMORY_S: Final = 600.0
"""How long token ids are kept after a cache is gone, so that re-reading works by id."""

HEADER_MEMORY_ENTRIES: Final = 1_024
HEADER_MEMORY_BYTES: Final = 256 * MIB
"""Of their token ids together: as many as 256 prefixes of MAX_PREFIX_TOKENS."""

DEFAULT_HEADROOM_TOKENS: Final = 1_024
"""Room for query and answer in a preallocated prefix cache."""

MAX_NEW_TOKENS: Final = 32_768
MAX_TEXT_CHARS: Final = 8_000_000
"""Characters of a document or question: at two characters a token still above MAX_PREFIX_TOKENS."""

MAX_STOP_STRINGS: Final = 16
MAX_TEMPERATURE: Final = 100.0
"""Beyond it every token is equally likely; a larger number is a mistake."""

MAX_LOGPROBS: Final = 256
"""Alternatives reported a token: each costs bytes of every delta. Enough for the whole distribution
of a small vocabulary, which a comparison of caches by KL needs."""

MAX_ID_CHARS: Final = 128
"""Handoff ids, cache ids, tenants: they end up in logs and tables."""

CONNECT_DEADLINE_S: Final = 5.0
CONTROL_DEADLINE_S: Final = 30.0
ANSWER_DEADLINE_S: Final = 600.0
HANDOFF_DEADLINE_S: Final = 3_600.0
"""Deadlines of a client that names none: a prefill of a long prefix on a CPU takes minutes."""

STALL_DEADLINE_S: Final = 30.0
"""No frame accepted or received for this long: the stream is cancelled."""

PUSH_BASE_DEADLINE_S: Final = 5.0
PUSH_RATE_SHARE: Final = 0.25
"""A stream of known size may take the base and its bytes at this share of the expected rate."""

MAX_STATUS_BYTES: Final = 3 * KIB
"""Message and details of a refusal: trailers above a peer's 8 KiB are lost as RESOURCE_EXHAUSTED."""

QUEUED_CHUNKS: Final = 4
"""Encoded chunks that may wait between the encoder and the stream: enough to hide one encode,
small enough that a slow receiver holds the sender's memory within four blocks of its cache."""

RESERVED_CONTROL_THREADS: Final = 8
"""Threads beyond the transfer and answer slots, so that health and control calls always get one."""

SINK_TOKENS: Final = 4
"""First tokens (attention sinks) that quantizing codecs store native: their keys and values are far
outside the range of all others."""

MIN_GROUP_TOKENS: Final = 32
"""A key group with fewer tokens is stored native: its scales would weigh more than they save."""
