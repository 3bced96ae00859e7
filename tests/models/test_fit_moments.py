"""Streaming moments equal those of all data at once, however they were read."""

import pytest
import torch
from safetensors import safe_open

from cachelink_core.errors import ConfigError, CorruptChunk, InvalidRequest, ModelUnavailable
from cachelink_core.fit.measure import measure
from cachelink_core.fit.measurement import load_measurement
from cachelink_core.fit.panels import depth_panels, full_panel
from cachelink_core.fit.ridge import centred, r_squared, solve
from cachelink_core.fit.shards import Shards
from tests.models.fit_pairs import calibration, planted_engines
from tests.models.synthetic_moments import RECEIVER, SENDER, accumulate, linear_data


def exact(data, sources, target):
    """Centred Gram and cross moments in float64, in two passes over all data."""
    columns = [slice(8 * j, 8 * j + 8) for j in sources]
    x = torch.cat([data[0][:, c] for c in columns], dim=1).double()
    y = data[1][:, 8 * target : 8 * target + 8].double()
    x, y = x - x.mean(0), y - y.mean(0)
    return x.t() @ x, x.t() @ y


@pytest.mark.parametrize("mean", [0.0, 50.0, 5_000.0])
@pytest.mark.parametrize("chunk", [1_000, 37])
def test_streamed_moments_equal_two_passes_in_float64(mean, chunk):
    data = linear_data(1_000, seed=1, mean=mean)
    moments = accumulate(data, chunk=chunk)
    for kind in ("K", "V"):
        gram, cross = centred(moments.system("train", kind, (0, 2), (1,)))
        expected = exact(data[kind], (0, 2), 1)
        assert (gram - expected[0]).norm() < 1e-7 * expected[0].norm()
        assert (cross - expected[1]).norm() < 1e-7 * expected[1].norm()
        assert torch.equal(gram, gram.t())


def test_the_order_and_size_of_chunks_do_not_matter():
    data = linear_data(600, seed=2)
    backwards = {kind: (x.flip(0), y.flip(0)) for kind, (x, y) in data.items()}
    first = accumulate(data, chunk=600)
    for other in (accumulate(data, chunk=7), accumulate(backwards, chunk=100)):
        for kind in ("K", "V"):
            ours, theirs = (
                solve(m.system("train", kind, (1, 3), (2,)), 0.01, "sum") for m in (first, other)
            )
            assert (ours.weight - theirs.weight).abs().max() < 1e-10
            assert (ours.bias - theirs.bias).abs().max() < 1e-9


def test_a_panel_of_one_layer_set_holds_the_same_as_the_whole():
    data = linear_data(400, seed=3)
    whole = accumulate(data)
    panels = depth_panels(SENDER, RECEIVER, 2)
    assert [panel.targets for panel in panels] == [(0,), (1,), (2,)]
    parts = accumulate(data, panels=panels)
    assert parts.nbytes < whole.nbytes
    for panel in panels:
        for name in ("xx", "xy", "x", "y", "yy"):
            ours = getattr(parts.system("train", "K", panel.sources, panel.targets), name)
            theirs = getattr(whole.system("train", "K", panel.sources, panel.targets), name)
            assert torch.allclose(ours, theirs, rtol=1e-12)
    with pytest.raises(InvalidRequest, match=r"source layers \[0, 1, 2\] with target layers \[0\]"):
        parts.system("train", "K", (0, 1, 2), (0,))
    with pytest.raises(InvalidRequest, match="no held_out observations"):
        whole.system("held_out", "K", (0,), (0,))


def _measured(tmp_path, **kwargs):
    sender, receiver, _ = planted_engines("llama")
    panel = full_panel(sender.identity.layers, receiver.identity.layers)
    arguments = {
        "checkpoint": tmp_path / "checkpoint",
        "shards": Shards(),
        "calibration": calibration(sender.tokens, sequences=10, length=48),
    } | kwargs
    text = arguments.pop("calibration")
    return measure(sender, receiver, text, (panel,), **arguments)


def _equal(first, second):
    return all(
        torch.equal(a, b)
        for key, sums in first.moments.sums.items()
        for (_, a), (_, b) in zip(sums.named(), second.moments.sums[key].named(), strict=True)
    )


def test_a_file_keeps_everything(tmp_path):
    measured = _measured(tmp_path)
    path = tmp_path / "moments.safetensors"
    measured.save(path)
    again = load_measurement(path)
    assert _equal(measured, again)
    assert again.moments.counts == measured.moments.counts
    assert again.same_run(measured)
    assert again.position0.keys() == measured.position0.keys()
    for kind in ("K", "V"):
        assert torch.equal(again.moments.shifts[kind].x, measured.moments.shifts[kind].x)


def test_position_0_is_observed_by_nobody_and_kept_apart(tmp_path):
    measured = _measured(tmp_path)
    assert measured.moments.counts == {"train": 10 * 47, "held_out": 47}
    assert measured.bos_id == 0
    assert sorted(measured.position0) == sorted(
        f"position0.{layer}.{kind}" for layer in range(3) for kind in ("K", "V")
    )


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    whole = _measured(tmp_path)
    calls = iter([False, False, True])
    assert _measured(tmp_path, stop=lambda: next(calls)) is None
    assert load_measurement(tmp_path / "checkpoint").chunks_done == 2
    told = []
    again = _measured(tmp_path, resume=True, progress=lambda *args: told.append(args))
    assert _equal(whole, again)
    assert again.moments.counts == whole.moments.counts
    assert told[0] == ("reading", 3, 4)
    assert again.position0.keys() == whole.position0.keys()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    assert _measured(tmp_path, stop=lambda: True) is None
    sender, _, _ = planted_engines("llama")
    other = calibration(sender.tokens, sequences=8, length=48)
    with pytest.raises(ConfigError, match="another run"):
        _measured(tmp_path, resume=True, calibration=other)
    with pytest.raises(ConfigError, match=r"shard \(0, 1\), this is \(1, 2\)"):
        _measured(tmp_path, resume=True, shards=Shards(1, 2))


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ModelUnavailable, match="no such file"):
        load_measurement(tmp_path / "nothing")
    path = tmp_path / "moments.safetensors"
    _measured(tmp_path).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CorruptChunk):
        load_measurement(path)
    path.write_bytes(whole.replace(b"cachelink-moments-1", b"cachelink-moments-9"))
    with pytest.raises(CorruptChunk, match="format is"):
        load_measurement(path)
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as reader:
        assert "about" in reader.metadata()


def test_float32_products_agree_to_float32(tmp_path):
    fine, coarse = _measured(tmp_path), _measured(tmp_path, products=torch.float32)
    ours, theirs = (m.moments.system("train", "V", (0, 1), (1,)).xx for m in (fine, coarse))
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() < 1e-6 * ours.norm()


def test_r_squared_from_moments_equals_that_of_the_data():
    train, other = linear_data(500, seed=4), linear_data(300, seed=8)
    moments = accumulate(train, other)
    for split, data in (("train", train), ("held_out", other)):
        ridge = solve(moments.system("train", "V", (0, 1, 3), (2,)), 0.5, "mean")
        x = torch.cat([data["V"][0][:, 8 * j : 8 * j + 8] for j in (0, 1, 3)], 1).double()
        y = data["V"][1][:, 16:24].double()
        errors = (x @ ridge.weight + ridge.bias - y).square().view(-1, 2, 4).sum((0, 2))
        total = (y - y.mean(0)).square().view(-1, 2, 4).sum((0, 2))
        found = r_squared(moments.system(split, "V", (0, 1, 3), (2,)), ridge, 4)
        assert found == pytest.approx(float((1 - errors / total).mean()), abs=1e-6)
