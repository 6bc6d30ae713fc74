"""All checks of a run, in the order of the report."""

import contextlib
import functools
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from jppo import assemble
from jppo.assemble import memory, preview
from jppo.assemble.engine import published_dtype
from jppo.checkup import parity, place, reading
from jppo.checkup.finding import Check, Finding
from jppo.structs import TrainState

COMPILE_S, READ_S, PUBLISH_S, FETCH_S = 900.0, 600.0, 900.0, 3600.0


def checks(c: ConfigDict, stack: contextlib.ExitStack, *, server: bool) -> list[Check]:
    """Returns the checks for a run by `c`; the `stack` ends what they start. `server`: also start one."""
    scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jppo-doctor-")))
    run = pathlib.Path(c.trainer.run_dir).expanduser()
    elsewhere = c.copy_and_resolve_references()  # parts of a run write logs to its folder, which must stay unchanged
    elsewhere.trainer.run_dir = str(scratch)
    inputs = functools.cache(lambda: assemble.read_inputs(c))
    mesh = functools.cache(lambda: assemble.make_mesh(c))
    stored = functools.cache(lambda: memory.stored(c, inputs(), mesh()))

    def room() -> Iterator[Finding]:
        chosen, _ = preview.settled(c, inputs(), mesh())
        _, _, rooms = preview.look(chosen, inputs(), mesh())
        return place.rooms(rooms)

    def disk() -> Iterator[Finding]:
        export = memory.served(inputs().policy, c.model.param_dtype)
        return place.disk(run, checkpoint=stored(), keep=c.trainer.max_ckpt_to_keep, export=export)

    def publish_room() -> Iterator[Finding]:
        weights = memory.served(inputs().policy, published_dtype(c))
        return place.shared_memory(c.rollout.publish_dir, named=c.rollout.name == "sglang", weights=weights)

    served = c.rollout.name != "inprocess"  # servers listen at a port and read weights from a file
    return [
        Check("clock", lambda: place.clock(time.time(), newest=place.package_time())),
        Check("run folder", lambda: place.folder(c)),
        Check("permission", lambda: place.writable("permission", run)),
        *([Check("server ports", lambda: place.ports(c))] if served else []),
        Check("model files", lambda: reading.models(c), limit_s=FETCH_S),
        Check("tokenizer", lambda: reading.tokenizer(c), needs=("model files",)),
        Check("sampling", lambda: reading.sampling(c)),
        Check("data", lambda: reading.data(c, inputs()), needs=("tokenizer",), limit_s=READ_S),
        Check("reward", lambda: reading.reward(elsewhere, inputs(), mesh()), needs=("data",), limit_s=READ_S),
        Check("parity", lambda: parity.check(c), needs=("model files",), limit_s=2 * parity.LIMIT_S),
        Check("memory", room, needs=("data",), limit_s=COMPILE_S),
        *([Check("publish room", publish_room, needs=("data",))] if served else []),
        Check("disk", disk, needs=("data",)),
        *(with_server(elsewhere, inputs, mesh, scratch, stack) if server else ()),
    ]


def with_server(
    c: ConfigDict, inputs: Any, mesh: Any, scratch: pathlib.Path, stack: contextlib.ExitStack
) -> list[Check]:
    """Returns checks that start a server, publish, and compare log-probs."""

    @functools.cache
    def sampler() -> Any:
        engine = assemble.ENGINES[c.rollout.name](c, scratch)
        stack.callback(engine.close)
        read = inputs()
        if read.agent is not None:
            stack.callback(read.agent.close)
        return engine.ready(**assemble.speaking(read))

    @functools.cache
    def learner() -> tuple[assemble.Learner, TrainState]:
        return assemble.make_learner(c, inputs(), mesh())

    def start() -> Iterator[Finding]:
        begin = time.monotonic()
        sampler()
        if c.rollout.name == "inprocess":
            what = "the trainer's own"
        else:
            what = "servers of rollout.urls answer" if c.rollout.urls else f"{c.rollout.servers} started"
        yield Finding("server", "OK", f"{what}, ready after {time.monotonic() - begin:.0f} s")

    def publish() -> Iterator[Finding]:
        trainer, begin = learner()
        start = time.monotonic()
        assemble.publish_base(c, trainer, sampler(), 0)
        assemble.publish(c, trainer, sampler(), begin, inputs().adapters)
        size = memory.served(inputs().policy, c.model.param_dtype) / preview.MIB
        yield Finding("publish", "OK", f"{size:,.0f} MiB checked and loaded in {time.monotonic() - start:.1f} s")

    def agree() -> Iterator[Finding]:
        trainer, begin = learner()
        yield Finding("log-probs", "OK", assemble.agree(c, inputs(), trainer, begin, sampler(), 0))

    limit_s = c.rollout.start_timeout_s + PUBLISH_S
    return [
        Check("server", start, needs=("vLLM", "SGLang", "data", "server ports", "memory"), limit_s=limit_s),
        Check("publish", publish, needs=("server",), limit_s=PUBLISH_S),
        Check("log-probs", agree, needs=("publish",), limit_s=PUBLISH_S),
    ]
