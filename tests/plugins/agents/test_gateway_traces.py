"""Spans of agent programs."""

import asyncio
import dataclasses
import sys

import pytest

from jppo import traces
from jppo.plugins.agents.gateway.gateway import Gateway
from jppo.rollout import protocol
from jppo.rollout.protocol import greedy
from tests.plugins.agents.test_gateway import RULES, SAY, answer_of, language

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
from tests.rollout import test_traces

recorded = test_traces.recorded


def test_the_requests_of_an_agent_are_in_the_span_of_its_sample(hermes, recorded, tmp_path):
    async def ask(ids, *, sampling, seed, near):
        with traces.span("generate", seed=seed):
            await asyncio.sleep(0.01)
            return answer_of([*hermes.encode("yes"), hermes.tokenizer.eos_token_id])

    (tmp_path / "agent.py").write_text(SAY)
    gateway = Gateway(f"{sys.executable} {tmp_path / 'agent.py'}", language(hermes), RULES, concurrency=8)
    sampling = dataclasses.replace(greedy(200), n=3)
    try:
        asyncio.run(protocol.converse(ask, gateway.talk, [hermes.prompt()], sampling, None))
    finally:
        gateway.close()
    samples = test_traces.named(recorded(), "sample")
    requests = [test_traces.children(recorded(), sample) for sample in samples]
    assert [len(inner) for inner in requests] == [1, 1, 1]
    assert len({inner.attributes["jppo.seed"] for (inner,) in requests}) == 3
