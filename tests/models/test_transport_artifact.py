"""A mapper on disk: what is written is what is applied, and every change is found and named."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from cachelink_core.errors import ChecksumMismatch, CorruptChunk, ManifestError, ModelUnavailable
from cachelink_core.transport.artifact import (
    CARD_FILE,
    TENSORS_FILE,
    load_mapper,
    load_state,
    read_card,
    save_mapper,
    verify_mapper,
)
from cachelink_core.transport.card import encode_card
from cachelink_core.transport.mapper import Mapper
from tests.models.mapper_states import SHAPE, mapped, random_source, random_state


@pytest.fixture
def state():
    return random_state(residual=SHAPE, bos_id=3)


def test_a_loaded_mapper_computes_the_same_bits(tmp_path, state):
    card = save_mapper(tmp_path, state)
    block = random_source(70)
    for dtype in (torch.float32, torch.bfloat16):
        ours = mapped(Mapper.place(state, dtype=dtype), block, ids=(3,))
        theirs = mapped(load_mapper(tmp_path, dtype=dtype), block, ids=(3,))
        for kind in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(ours[kind], theirs[kind], strict=True))
    assert verify_mapper(tmp_path) == card == load_state(tmp_path).card
    assert card.digest == card.compute_digest()
    assert sorted(card.tensors) == sorted(state.tensors)


def test_bf16_weights_halve_the_file_and_keep_biases(tmp_path, state):
    save_mapper(tmp_path / "a", state)
    half = msgspec.structs.replace(state.card, weights_dtype="bfloat16")
    save_mapper(tmp_path / "b", type(state)(half, state.tensors))
    sizes = [(tmp_path / name / TENSORS_FILE).stat().st_size for name in "ab"]
    assert sizes[1] < 0.75 * sizes[0]
    stored = load_file(tmp_path / "b" / TENSORS_FILE)
    assert stored["ridge.0.K.weight"].dtype == torch.bfloat16
    assert stored["ridge.0.K.bias"].dtype == torch.float32
    assert torch.equal(stored["position0.0.K"], state.tensors["position0.0.K"])


def test_one_state_has_one_digest(tmp_path, state):
    first, second = save_mapper(tmp_path / "a", state), save_mapper(tmp_path / "b", state)
    other = save_mapper(tmp_path / "c", random_state(residual=SHAPE, bos_id=3, seed=9))
    assert first.digest == second.digest != other.digest


def test_saving_leaves_other_files_alone_and_replaces_its_own(tmp_path, state):
    (tmp_path / "moments.safetensors").write_bytes(b"kept")
    save_mapper(tmp_path, state)
    save_mapper(tmp_path, random_state(residual=SHAPE, bos_id=3, seed=9))
    verify_mapper(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [CARD_FILE, TENSORS_FILE, "moments.safetensors"]


def _flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "load", [verify_mapper, load_state, lambda p: load_mapper(p, dtype=torch.float32)]
)
def test_a_changed_byte_names_its_tensor(tmp_path, state, load):
    save_mapper(tmp_path, state)
    path = tmp_path / TENSORS_FILE
    header = int.from_bytes(path.read_bytes()[:8], "little")
    offsets = msgspec.json.decode(path.read_bytes()[8 : 8 + header])
    for name in ("ridge.2.V.weight", "position0.1.K", "residual.3.fuse.bias"):
        _flip(path, 8 + header + offsets[name]["data_offsets"][0])
        with pytest.raises(ChecksumMismatch, match=f"'{name}'"):
            load(tmp_path)
        _flip(path, 8 + header + offsets[name]["data_offsets"][0])
    load(tmp_path)


def test_a_mix_of_two_artifacts_does_not_load(tmp_path, state):
    save_mapper(tmp_path / "a", state)
    save_mapper(tmp_path / "b", random_state(residual=SHAPE, bos_id=3, seed=9))
    (tmp_path / "b" / CARD_FILE).replace(tmp_path / "a" / CARD_FILE)
    with pytest.raises(ChecksumMismatch):
        verify_mapper(tmp_path / "a")


def test_a_card_that_was_edited_is_refused(tmp_path, state):
    card = save_mapper(tmp_path, state)
    lied = msgspec.structs.replace(card, weights_dtype="bfloat16")
    (tmp_path / CARD_FILE).write_bytes(encode_card(lied))
    with pytest.raises(ManifestError, match="digest"):
        read_card(tmp_path)
    unsigned = msgspec.structs.replace(card, digest="")
    (tmp_path / CARD_FILE).write_bytes(encode_card(unsigned))
    with pytest.raises(ManifestError, match="digest is empty"):
        read_card(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path, state):
    with pytest.raises(ModelUnavailable, match=r"has no card\.json"):
        verify_mapper(tmp_path / "nowhere")
    save_mapper(tmp_path, state)
    path = tmp_path / TENSORS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptChunk, match="safetensors"):
        verify_mapper(tmp_path)
    tensors = dict(state.tensors)
    tensors.pop("ridge.0.K.bias")
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    with pytest.raises(ManifestError, match=r"'ridge\.0\.K\.bias'"):
        verify_mapper(tmp_path)
    path.unlink()
    with pytest.raises(ModelUnavailable, match=r"has no mapper\.safetensors"):
        verify_mapper(tmp_path)
