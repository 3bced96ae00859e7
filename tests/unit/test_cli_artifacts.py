"""``inspect`` and ``verify`` on manifests: both forms, whole and damaged."""

import json

import pytest

from cachelink_core.cli import main
from cachelink_core.manifest import decode_header, digest, encode_header, header_to_json
from cachelink_core.testing import handoffs

HEADER = handoffs.header()
DIGEST = digest(encode_header(HEADER)).hex()


@pytest.fixture(params=["msgpack", "json"])
def manifest(request, tmp_path):
    path = tmp_path / f"header.{request.param}"
    written = header_to_json(HEADER).encode() if request.param == "json" else encode_header(HEADER)
    path.write_bytes(written)
    return path


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return run


def test_a_manifest_is_shown(run, manifest):
    code, out, err = run("inspect", manifest)
    assert (code, err) == (0, "")
    assert DIGEST in out
    assert f"{HEADER.layout.chunk_count} chunks" in out
    assert HEADER.identity.digest() in out


def test_a_manifest_is_one_json_document(run, manifest):
    code, out, _ = run("inspect", "--json", manifest)
    found = json.loads(out)
    assert code == 0
    assert found["form"] == manifest.suffix[1:]
    assert (found["digest"], found["tokens"]) == (DIGEST, HEADER.tokens)
    assert found["encoded_bytes"] == HEADER.layout.encoded_bytes
    assert found["manifest"] == json.loads(header_to_json(HEADER))


def test_a_whole_manifest_is_verified(run, manifest):
    code, out, _ = run("verify", "--digest", DIGEST.upper(), "--json", manifest)
    found = json.loads(out)
    assert (code, found["ok"], found["digest"]) == (0, True, DIGEST)
    assert ("canonical bytes" in found["checked"]) == (manifest.suffix == ".msgpack")


def test_another_digest_is_data_loss(run, manifest):
    code, out, err = run("verify", "--digest", "0" * 64, manifest)
    assert (code, out) == (7, "")
    assert err.startswith("cachelink: checksum_mismatch: ")
    assert err.count("\n") == 1
    assert DIGEST in err


def test_every_cut_of_a_manifest_is_data_loss(run, tmp_path):
    whole = encode_header(HEADER)
    path = tmp_path / "cut.msgpack"
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        for command in ("inspect", "verify"):
            code, out, err = run(command, path)
            assert (code, out) == (7, ""), size
            assert err.startswith("cachelink: data_loss: ")


def test_bytes_that_are_not_canonical_are_data_loss(run, tmp_path):
    path = tmp_path / "odd.msgpack"
    name = b"\xaahandoff_id"
    whole = encode_header(HEADER)
    at = whole.index(name)
    path.write_bytes(whole[:at] + b"\xd9\x0ahandoff_id" + whole[at + len(name) :])
    code, _, err = run("verify", path)
    assert code == 7
    assert "not canonical" in err


def test_a_manifest_of_the_future_is_refused_by_its_version(run, tmp_path):
    path = tmp_path / "future.msgpack"
    path.write_bytes(
        encode_header(HEADER).replace(b"min_reader_version\x01", b"min_reader_version\x02")
    )
    with pytest.raises(Exception, match="min_reader_version is 2"):
        decode_header(path.read_bytes())
    code, _, err = run("inspect", path)
    assert code == 3
    assert "unsupported_version" in err


def test_nothing_there_is_not_found(run, tmp_path):
    code, out, _ = run("inspect", "--json", tmp_path / "nowhere")
    assert code == 4
    assert json.loads(out)["error"]["reason"] == "unknown_cache"


def test_a_folder_without_a_cache_is_refused(run, tmp_path):
    code, _, err = run("verify", tmp_path)
    assert code == 2
    assert "it has none" in err


def test_another_file_is_refused(run, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * (2**23 + 1))
    code, _, err = run("inspect", path)
    assert code == 2
    assert "no manifest" in err
