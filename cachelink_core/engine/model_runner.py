"""One forward at a time: ids in, keys and values into a prefix cache, last logits out.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cachelink_core.engine.decoding import Forward
from cachelink_core.engine.executor import DeviceExecutor
from cachelink_core.kv.prefix_cache import PrefixCache


class ModelRunner:
    """Runs a causal language model over prefix caches, in turns at its device.

    Attributes:
        device: of the model.
        vocabulary: rows of the input embedding; ids below it can be read.
        eos_ids: end-of-sequence ids of the model's configurations.
        executor: orders the turns.
    """

    def __init__(self, model: PreTrainedModel, executor: DeviceExecutor) -> None:
        """Puts the model in eval mode and a counter on its input embedding.

        Args:
            model: on its device.
            executor: orders the turns at that device.
        """
        self._model = model.eval()
        self._cache_argument = cache_argument(model)
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(self._count)
        self._model_tokens = 0
        self.device: torch.device = embedding.weight.device
        self.vocabulary: int = embedding.weight.shape[0]
        self.eos_ids = _eos_ids(model)
        self.executor = executor

    @property
    def model(self) -> PreTrainedModel:
        """The model, in eval mode."""
        return self._model

    @property
    def model_tokens(self) -> int:
        """Tokens that went through the input embedding so far."""
        return self._model_tokens

    def forward(
        self, cache: PrefixCache, ids: Sequence[int], *, urgent: bool, every_logit: bool = False
    ) -> Forward:
        """Reads ``ids`` behind ``cache.length`` in one forward, in one turn at the device.

        Args:
            cache: with room for ``ids``; its length grows by theirs, or stays if this raises.
            ids: at least one.
            urgent: an answer, not a prefill.
            every_logit: logits ``[T, V]`` after each id, not only ``[V]`` after the last.
        """
        begin = cache.length
        with self.executor.turn(urgent=urgent) as turn, torch.inference_mode():
            counted = self._model_tokens
            cache.activate()
            try:
                logits = self._run(cache, ids, every_logit=every_logit)
            except BaseException:
                # The last layer may have raised the length already.
                cache.set_length(begin)
                raise
            assert cache.length == begin + len(ids), "the model did not write to its cache"
            wait_for_stream(self.device, spinning=urgent)
            return Forward(logits, self._model_tokens - counted, turn.waited_s)

    def _run(self, cache: PrefixCache, ids: Sequence[int], *, every_logit: bool) -> Tensor:
        begin = cache.length
        input_ids = torch.tensor([ids], dtype=torch.long, device=self.device)
        positions = torch.arange(begin, begin + len(ids), device=self.device)
        output = self._model(
            input_ids=input_ids,
            position_ids=positions.unsqueeze(0),
            use_cache=True,
            logits_to_keep=0 if every_logit else 1,
            **{self._cache_argument: cache.for_model()},
        )
        logits: Tensor = output.logits[0].float()
        return logits if every_logit else logits[-1]

    def _count(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # Inside a turn at the device: no two threads add at once.
        self._model_tokens += args[0].numel()


def wait_for_stream(device: torch.device, *, spinning: bool) -> None:
    """Waits for what this thread's stream was given, and for no other stream's copies.

    Args:
        device: nothing to wait for unless it is CUDA.
        spinning: burn the processor rather than wake up some microseconds late.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=not spinning)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the forward's cache argument: it changed between transformers 5.17 and 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids of the generation configuration and of the model's."""
    found: set[int] = set()
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(ids)
    return frozenset(found)
