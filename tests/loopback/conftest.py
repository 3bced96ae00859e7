from __future__ import annotations

import pytest

from tests.loopback.nodes import pair_of, tiny_engine


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Engines by (family, dtype, side), made on first use."""
    folder = tmp_path_factory.mktemp("engines")
    made = {}

    def get(family: str, dtype: str = "float32", side: str = "sender"):
        if (family, dtype, side) not in made:
            bias = {"key_bias": 300.0} if family == "qwen2" else {}
            made[family, dtype, side] = tiny_engine(folder, family, dtype, **bias)
        return made[family, dtype, side]

    return get


@pytest.fixture(scope="module")
def llama_pair(engines):
    with pair_of(engines("llama"), engines("llama", side="receiver")) as pair:
        yield pair


@pytest.fixture
def pair(llama_pair):
    """A pair with empty stores, and no memory of a data plane that failed in another test."""
    llama_pair.clear()
    llama_pair.sender_node._peers.client("local").tcp_retry_at_s = 0.0
    yield llama_pair
    llama_pair.clear()
