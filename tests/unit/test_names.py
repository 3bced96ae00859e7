"""Names are content: equal under any hash seed, different whenever anything differs."""

import os
import subprocess
import sys

import pytest

from cachelink_core.codec_spec import INT4, INT8, NATIVE, CodecSpec
from cachelink_core.manifest import pack_ids
from cachelink_core.names import block_keys, cache_id
from cachelink_core.testing import handoffs

IDS = pack_ids(range(50))
MODEL = handoffs.identity()
OTHER = handoffs.identity(dtype="float32")
PARTS = {
    "tenant": "default",
    "receiver": MODEL,
    "sender": MODEL,
    "block_tokens": 16,
    "token_ids": IDS,
    "codec": INT4,
    "mapper": "none",
}


def test_keys_chain_over_the_blocks():
    keys = block_keys(MODEL, 16, IDS)
    assert len(keys) == len(set(keys)) == 4
    assert block_keys(MODEL, 16, IDS[: 4 * 32]) == keys[:2]
    changed = pack_ids([*range(20), 999, *range(21, 50)])
    assert block_keys(MODEL, 16, changed)[0] == keys[0]
    assert not set(block_keys(MODEL, 16, changed)[1:]) & set(keys)


def test_keys_depend_on_model_and_block_size():
    assert not set(block_keys(MODEL, 16, IDS)) & set(block_keys(OTHER, 16, IDS))
    assert not set(block_keys(MODEL, 16, IDS)) & set(block_keys(MODEL, 32, IDS))


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "acme"},
        {"receiver": OTHER},
        {"sender": OTHER},
        {"block_tokens": 32},
        {"token_ids": IDS[:-4]},
        {"token_ids": pack_ids(range(1, 51))},
        {"token_ids": b""},
        {"codec": INT8},
        {"codec": NATIVE},
        {"codec": CodecSpec("int4", 256, 64, 4)},
        {"mapper": "a" * 64},
    ],
)
def test_a_name_changes_with_every_part(change):
    assert cache_id(**{**PARTS, **change}) != cache_id(**PARTS)


def test_the_same_handoff_twice_is_the_same_cache():
    assert cache_id(**PARTS) == cache_id(**{**PARTS, "receiver": handoffs.identity()})
    assert len(cache_id(**PARTS)) == 64


SCRIPT = """
from cachelink_core.codec_spec import INT4
from cachelink_core.manifest import digest, encode_header
from cachelink_core.names import cache_id
from cachelink_core.testing import handoffs
header = handoffs.header(codec=INT4)
print(digest(encode_header(header)).hex(), handoffs.commit(header).seal.root.hex())
print(header.identity.digest(), cache_id(tenant="t", receiver=header.identity,
    sender=header.identity, block_tokens=16, token_ids=header.token_ids, codec=INT4, mapper="none"))
"""


def test_digests_are_equal_in_two_processes_under_two_hash_seeds():
    outputs = set()
    for seed in ("1", "20261"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 4
