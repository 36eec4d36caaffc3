"""Decoding with a causal LM of the transformers package, static cache, on an executor's thread.

Twenty batch sizes, two prompt buckets and the decode step: sixty shapes of one ``forward``. Without
the policy the first eight compile and the rest runs eager; with it all of them compile.

    python docs/examples/transformers_decode.py

Needs transformers. The model is small and randomly initialised; nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import dynapolicy as dp

BATCH_SIZES = tuple(range(1, 21))
PROMPTS = (8, 16)
LONGEST = 24


class Decoder:
    """A randomly initialised causal LM whose forward is compiled with static shapes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LONGEST,
        )
        self.model = LlamaForCausalLM(self.config).eval()
        # The argument was called past_key_values before transformers 5.
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def capture_buckets(self) -> dict[Any, list[dp.ShapeBuckets]]:
        """Prompts fill the cache, then one token a row is decoded."""
        prefill = dp.ShapeBuckets(batch=BATCH_SIZES, tokens=PROMPTS)
        decode = dp.ShapeBuckets(batch=BATCH_SIZES, tokens=(1,))
        return {self.model.forward: [prefill, decode]}

    @torch.no_grad()
    def generate(self, forward: Callable[..., Any], prompt: torch.Tensor) -> torch.Tensor:
        """Two steps: the prompt ``(batch, tokens)``, then one token. Gives both steps' last logits.

        Shape ``(2, batch, vocabulary)``.
        """
        cache = StaticCache(config=self.config, max_cache_len=LONGEST)
        first = forward(input_ids=prompt, use_cache=True, **{self.cache_name: cache}).logits[:, -1]
        token = first.argmax(-1, keepdim=True)
        second = forward(input_ids=token, use_cache=True, **{self.cache_name: cache}).logits[:, -1]
        return torch.stack([first, second])


def prompts() -> list[torch.Tensor]:
    """One prompt of every declared shape, int64 ``(batch, tokens)``."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (batch, tokens), generator=generator) for tokens in PROMPTS for batch in BATCH_SIZES]


def decode_all(decoder: Decoder, forward: Callable[..., Any]) -> list[torch.Tensor]:
    """Every declared shape once, on a worker thread as an engine does."""
    with ThreadPoolExecutor(1) as executor:
        return list(executor.map(lambda prompt: decoder.generate(forward, prompt), prompts()))


def main() -> None:
    """Decode with and without the policy, and count what compiled."""
    decoder = Decoder()
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    policy = dp.CompilePolicy.from_env(buckets=decoder)
    declared = len(BATCH_SIZES) * (len(PROMPTS) + 1)
    decode_all(decoder, torch.compile(decoder.model.forward, backend=backend, dynamic=False))
    print(f"without the policy: {compiled} of {declared} declared shapes compiled, the rest ran eager")
    torch._dynamo.reset()
    compiled = 0
    with dp.apply_policy(policy):
        decode_all(decoder, dp.compile(decoder.model.forward, backend=backend))
        print(f"with the policy:    {compiled} of {declared} declared shapes compiled")
        print(dp.audit())


if __name__ == "__main__":
    main()
