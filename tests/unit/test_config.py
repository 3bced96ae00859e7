"""The configuration of both daemons: one resolution, closed names, errors that name the option."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachelink_core.config import DaemonConfig, Token, load_config, options, to_yaml
from cachelink_core.errors import ConfigError
from cachelink_receiver.config import ReceiverConfig
from cachelink_sender.config import Peer, SenderConfig

ROOT = Path(__file__).parents[2]
DAEMONS = [SenderConfig, ReceiverConfig]

COMMON = [
    "model.name",
    "model.dtype",
    "model.device",
    "model.attention",
    "model.max_positions",
    "model.threads",
    "model.cache_dir",
    "codecs.backend",
    "listen.host",
    "listen.port",
    "http.host",
    "http.port",
    "http.allow_remote",
    "tls.certificate",
    "tls.key",
    "tls.ca",
    "auth.tokens",
    "allow_insecure_bind",
    "store.budget",
    "store.ttl",
    "headroom_tokens",
    "slots.transfers",
    "slots.answers",
    "log.level",
    "log.format",
    "drain",
]
SENDER_ONLY = [
    "receivers", "codec", "stream", "block_tokens", "lease", "link_rate", "data_planes",
    "capture_dir", "capture_budget",
]  # fmt: skip
RECEIVER_ONLY = [
    "data.enabled",
    "data.port",
    "max_lease",
    "overlap",
    "mappers",
    "allow_failed_gate",
    "default_wait",
]

OTHER_VALUES = {
    "model.name": "/models/x",
    "model.dtype": "float32",
    "model.device": "cpu",
    "model.attention": "eager",
    "model.max_positions": 512,
    "model.threads": 1,
    "model.cache_dir": "/c",
    "codecs.backend": "compiled",
    "listen.host": "127.0.0.2",
    "listen.port": 0,
    "http.host": "::1",
    "http.port": 1,
    "http.allow_remote": True,
    "tls.certificate": "/cert",
    "tls.key": "/key",
    "tls.ca": "/ca",
    "auth.tokens": {"alice": {"value": None, "file": "/t"}},
    "allow_insecure_bind": True,
    "store.budget": "1MiB",
    "store.ttl": "5s",
    "headroom_tokens": 64,
    "slots.transfers": 1,
    "slots.answers": 2,
    "log.level": "debug",
    "log.format": "console",
    "drain": "250ms",
    "receivers": {"far": {"address": "10.0.0.7:7411", "tls": None, "token": None}},
    "codec": "int4+zstd",
    "stream": False,
    "block_tokens": 128,
    "lease": "5s",
    "link_rate": "1GB/s",
    "data_planes": ["grpc"],
    "capture_dir": "/captures",
    "capture_budget": "1GiB",
    "data.enabled": False,
    "data.port": 7999,
    "max_lease": "1m",
    "overlap": "copy",
    "mappers": ["/mappers/a"],
    "allow_failed_gate": True,
    "default_wait": "1s",
}
"""A valid value of each option that is not its default."""

TOGETHER = ("tls.certificate", "tls.key", "tls.ca")
"""Options that are valid together only."""


def load(cls: type[DaemonConfig], *argv: str, **environ: str) -> DaemonConfig:
    return load_config(cls, argv, environ)


def complaint(cls: type[DaemonConfig], *argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(cls, argv, environ)
    return str(caught.value)


def as_text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def as_flag(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, as_text(value)]


def as_tree(values: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree


def at(tree: Mapping[str, Any], name: str) -> object:
    value: Any = tree
    for part in name.split("."):
        value = value[part]
    return value


def test_option_names_are_pinned() -> None:
    """Renaming an option breaks deployments: it is a decision, not an accident."""
    assert [o.name for o in options(SenderConfig)] == COMMON + SENDER_ONLY
    assert [o.name for o in options(ReceiverConfig)] == COMMON + RECEIVER_ONLY


@pytest.mark.parametrize("cls", DAEMONS)
def test_every_option_says_what_it_means(cls: type[DaemonConfig]) -> None:
    assert [o.name for o in options(cls) if len(o.help) < 15] == []


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("store: {budget: 1GB, ttl: 1m}\nslots: {answers: 7}\ndrain: 1s\n")
    config = load(
        SenderConfig,
        *("--config", str(file), "--store.budget", "3GB"),
        CACHELINK_STORE__BUDGET="2GB",
        CACHELINK_STORE__TTL="2m",
    )
    assert config.store.budget == 3_000_000_000
    assert config.store.ttl == 120.0
    assert config.slots.answers == 7
    assert config.slots.transfers == 4


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("drain: 3s\n")
    assert load(ReceiverConfig, CACHELINK_CONFIG=str(file)).drain == 3.0


@pytest.mark.parametrize("cls", DAEMONS)
def test_each_option_is_set_by_file_environment_and_flag(
    cls: type[DaemonConfig], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    for option in options(cls):
        names = TOGETHER if option.name in TOGETHER else (option.name,)
        chosen = [o for o in options(cls) if o.name in names]
        values = {o.name: OTHER_VALUES[o.name] for o in chosen}
        file.write_text(yaml.safe_dump(as_tree(values)))
        argv = [part for o in chosen for part in as_flag(o.flag, values[o.name])]
        for config in (
            load(cls, "--config", str(file)),
            load(cls, **{o.env: as_text(values[o.name]) for o in chosen}),
            load(cls, *argv),
        ):
            found = at(config.model_dump(mode="json"), option.name)
            assert found == values[option.name] != option.default, option.name


@pytest.mark.parametrize(
    ("cls", "path"),
    [(SenderConfig, "sender/sender.yaml"), (ReceiverConfig, "receiver/receiver.yaml")],
)
def test_the_annotated_file_shows_every_option_with_its_default(
    cls: type[DaemonConfig], path: str
) -> None:
    config = load(cls, "--config", str(ROOT / path))
    if isinstance(config, SenderConfig):
        assert config.receivers == {"local": Peer(address="127.0.0.1:7411")}
        config = config.model_copy(update={"receivers": {}})
    assert config == cls()
    written = yaml.safe_load((ROOT / path).read_text())
    for option in options(cls):
        at(written, option.name)


@pytest.mark.parametrize("cls", DAEMONS)
def test_printed_options_read_back(
    cls: type[DaemonConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--store.budget", "123456789", "--drain", "1500ms", "--model.threads", "2"]
    with pytest.raises(SystemExit) as left:
        load(cls, *argv, "--print-config")
    assert left.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load(cls, "--config", str(file)) == load(cls, *argv)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load(SenderConfig, "--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert [o.flag for o in options(SenderConfig) if o.flag not in shown] == []
    assert "(default: 4GB)" in shown


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--store.budget", "4XB"], ["store.budget", "'4XB'", "flag", "8GB"]),
        (["--listen.port", "70000"], ["listen.port", "70000"]),
        (["--codec", "int9"], ["codec", "'int9'", "native"]),
        (["--lease", "1ms"], ["lease", "1ms"]),
        (["--model.dtype", "int8"], ["model.dtype", "int8", "bfloat16"]),
        (["--tls.key", "/k"], ["tls", "/k", "both or neither"]),
        (["--tls.ca", "/ca"], ["tls", "/ca", "certificate"]),
        (["--receivers", "far=nowhere"], ["receivers.far.address", "'nowhere'"]),
        (["--receivers", "a b=h:1"], ["receivers", "a b"]),
        (["--nope", "3"], ["--nope"]),
        (["--stor.budget", "3"], ["--stor.budget"]),
        (["--config", "/does/not/exist.yaml"], ["/does/not/exist.yaml", "No such file"]),
    ],
)
def test_a_wrong_flag_is_named_with_its_value(argv: list[str], parts: list[str]) -> None:
    text = complaint(SenderConfig, *argv)
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "store: {bugdet: 1GB}",
            ["store.bugdet", "is not an option", "did you mean store.budget?"],
        ),
        ("stor: 1", ["stor (file", "is not an option"]),
        ("store: 1GB", ["store", "1GB"]),
        ("store: {budget: [1]}", ["store.budget", "is not a size"]),
        ("- a", ["holds list"]),
        ("a: [", ["is not YAML"]),
        ("headroom_tokens: many", ["headroom_tokens", "many", "file"]),
    ],
)
def test_a_wrong_file_is_named_with_key_and_value(
    text: str, parts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    said = complaint(ReceiverConfig, "--config", str(file))
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("CACHELINK_STORE__BUDGTE", "1GB", ["CACHELINK_STORE__BUDGTE"]),
        ("CACHELINK_HTTP_PORT", "7", ["CACHELINK_HTTP_PORT"]),
        ("CACHELINK_RECEIVERS", "{", ["environment", "receivers"]),
        ("CACHELINK_SLOTS__ANSWERS", "0", ["slots.answers", '"0"', "environment"]),
    ],
)
def test_a_wrong_environment_is_named(name: str, value: str, parts: list[str]) -> None:
    said = complaint(SenderConfig, **{name: value})
    assert [part for part in parts if part not in said] == []


def test_service_links_of_kubernetes_are_no_options() -> None:
    links = {
        "CACHELINK_RECEIVER_SERVICE_HOST": "10.0.0.1",
        "CACHELINK_RECEIVER_SERVICE_PORT": "7411",
        "CACHELINK_RECEIVER_SERVICE_PORT_GRPC": "7411",
        "CACHELINK_RECEIVER_PORT": "tcp://10.0.0.1:7411",
        "CACHELINK_RECEIVER_PORT_7411_TCP": "tcp://10.0.0.1:7411",
        "CACHELINK_RECEIVER_PORT_7411_TCP_ADDR": "10.0.0.1",
    }
    assert load(ReceiverConfig, **links) == ReceiverConfig()


def test_only_what_is_given_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHELINK_DRAIN", "1s")
    assert load(SenderConfig) == SenderConfig() == SenderConfig(drain=30)
    assert load(SenderConfig, HOME="/x", PATH="/bin") == SenderConfig()


def test_receivers_of_several_places_join() -> None:
    config = load(
        SenderConfig,
        *("--receivers", "b=h:2", "--receivers", "c=h:3"),
        CACHELINK_RECEIVERS='{"a": {"address": "h:1"}, "b": {"address": "h:9"}}',
    )
    assert isinstance(config, SenderConfig)
    assert {name: peer.address for name, peer in config.receivers.items()} == {
        "a": "h:1",
        "b": "h:2",
        "c": "h:3",
    }


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node7", "localhost.example"])
def test_a_bind_beyond_loopback_needs_a_guard(host: str) -> None:
    for cls in DAEMONS:
        assert host in complaint(cls, "--listen.host", host)
        load(cls, "--listen.host", host, "--allow-insecure-bind")
        load(cls, "--listen.host", host, "--auth.tokens", "a=secret")
        load(cls, "--listen.host", host, "--tls.certificate", "/c", "--tls.key", "/k")
        assert "http.allow_remote" in complaint(cls, "--http.host", host, "--allow-insecure-bind")
        load(cls, "--http.host", host, "--http.allow-remote")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    load(SenderConfig, "--listen.host", host, "--http.host", host)


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("auth: {tokens: {alice: hunter2, bob: {value: hunter2, file: /x}}}\n")
    assert "hunter2" not in complaint(ReceiverConfig, "--config", str(file))
    assert "hunter2" not in complaint(ReceiverConfig, "--auth.tokens", '{"a b": "hunter2"}')
    config = load(ReceiverConfig, "--auth.tokens", "alice=hunter2")
    assert "hunter2" not in to_yaml(config) + repr(config)
    assert config.auth.tenants_by_token() == {"hunter2": "alice"}


def test_tokens_come_from_files(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    assert Token(file=secret).read() == "s3cret"
    config = load(ReceiverConfig, "--auth.tokens", json.dumps({"bob": {"file": str(secret)}}))
    assert config.auth.tenants_by_token() == {"s3cret": "bob"}
    secret.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        config.auth.tenants_by_token()
    secret.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        config.auth.tenants_by_token()


def test_two_tenants_cannot_share_a_token() -> None:
    config = load(ReceiverConfig, "--auth.tokens", '{"alice": "same", "bob": "same"}')
    with pytest.raises(ConfigError, match="'alice' and 'bob'"):
        config.auth.tenants_by_token()


def test_a_configuration_does_not_change() -> None:
    config = SenderConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.drain = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.store.budget = 1  # type: ignore[misc]
