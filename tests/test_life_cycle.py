"""The life-cycle examples of the documentation, run as their readers would run them."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dynapolicy as dp

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def example(name: str) -> ModuleType:
    """The example's module, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Counting:
    """A backend that compiles nothing and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.calls += 1
        return graph.forward


@pytest.mark.usefixtures("torch_ready")
def test_a_server_compiles_every_bucket_before_its_first_request_and_none_after() -> None:
    """Real sockets: twelve batch sizes are compiled in the lifespan, requests of all sizes add none."""
    aiohttp = pytest.importorskip("aiohttp")
    web = pytest.importorskip("aiohttp.web")
    server = example("server")
    backend = Counting()
    engine = server.Engine(backend)

    async def serve_and_ask() -> tuple[list[list[int]], str]:
        runner = web.AppRunner(server.make_app(engine))
        await runner.setup()
        assert backend.calls == len(server.BATCH_SIZES)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:

            async def ask(rows: int) -> list[int]:
                tokens = [[row, row + 1] for row in range(rows)]
                async with client.post("/step", json={"tokens": tokens}) as response:
                    return list((await response.json())["next"])

            answers = await asyncio.gather(*(ask(rows) for rows in server.BATCH_SIZES))
            async with client.get("/audit") as response:
                audit = await response.text()
        await runner.cleanup()
        return answers, audit

    answers, audit = asyncio.run(serve_and_ask())
    assert backend.calls == len(server.BATCH_SIZES)
    assert "Model.forward" in audit
    for rows, answer in zip(server.BATCH_SIZES, answers, strict=True):
        batch = engine.inputs(rows)
        for index in range(rows):
            batch[index, :2] = torch.tensor([index, index + 1])
        with torch.no_grad():
            assert answer == engine.model(batch).argmax(dim=1).tolist()
    assert dp.current_policy() is None


@pytest.mark.usefixtures("torch_ready")
def test_checkpointed_blocks_compile_on_autograd_threads_under_the_policy() -> None:
    """Every length compiles in both grad modes, on more than one thread, and gradients equal eager's."""
    trainer = example("trainer")
    backend = Counting()
    under = trainer.Trainer(backend)
    eager = trainer.Trainer(backend)
    eager.block = under.block
    eager.step = under.block.forward
    with dp.apply_policy(under.policy):
        gradients = [under.train_one(length) for length in trainer.LENGTHS]
    assert len(under.threads) > 1
    assert threading.get_ident() in under.threads
    assert backend.calls == 2 * len(trainer.LENGTHS)
    expected = [eager.train_one(length) for length in trainer.LENGTHS]
    assert gradients == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("torch_ready")
def test_a_compiled_optimizer_steps_over_all_parameter_shapes() -> None:
    """Twenty-six shapes under fullgraph, which raises at the ninth without the policy."""
    optimizer = example("optimizer")
    torch.manual_seed(0)
    model, same = optimizer.make_model(), optimizer.make_model()
    same.load_state_dict(model.state_dict())
    backend = Counting()
    compiled, plain = optimizer.Signum(model, backend=backend), optimizer.Signum(same)
    plain.update = optimizer.update
    with dp.apply_policy(compiled.policy):
        for one in (compiled, plain):
            (model if one is compiled else same)(torch.ones(1, 4)).sum().backward()
            one.step()
    assert backend.calls == len(list(model.parameters()))
    for mine, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("torch_ready")
def test_a_transformers_model_decodes_all_declared_shapes_compiled() -> None:
    """Twenty batch sizes, two prompt buckets and the decode step on a worker thread, equal to eager."""
    pytest.importorskip("transformers")
    decode = example("transformers_decode")
    decoder, backend = decode.Decoder(), Counting()
    policy = dp.CompilePolicy(buckets=decoder)
    declared = sum(one.entries for one in policy.declarations)
    assert declared == 3 * len(decode.BATCH_SIZES)
    expected = decode.decode_all(decoder, decoder.model.forward)

    decode.decode_all(decoder, torch.compile(decoder.model.forward, backend=backend, dynamic=False))
    assert backend.calls == 8
    torch._dynamo.reset()
    backend.calls = 0
    with dp.apply_policy(policy):
        results = decode.decode_all(decoder, dp.compile(decoder.model.forward, backend=backend))
        assert backend.calls == declared
        assert [row.entries for row in dp.audit() if row.code.endswith("LlamaForCausalLM.forward")] == [declared]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
