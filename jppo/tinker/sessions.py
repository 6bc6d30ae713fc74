"""Sessions of the Tinker API: their models, samplers and futures, and the queue that one thread works through.

Requests are answered at once, on the server's loop, with a future. `work` runs them one after another on a thread of
its own, since a model is not thread-safe.
Requests of a model run in the order of their numbers, from 1; a repeated number returns the same future.
"""

import asyncio
import collections
import contextlib
import math
import pathlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from jppo.errors import BadRequest
from jppo.http_server import HttpReply, json_object, json_reply
from jppo.run.api.engine import Kept
from jppo.run.api.model import Model
from jppo.tinker import requests
from jppo.tinker.futures import Future, SampleRequest, Session, SessionModel, answer_samples
from jppo.tinker.requests import Body, field

POLL_S = 20.0  # longest wait of one retrieve_future
_MOST_HELD = 4096  # requests of a model that wait for an earlier number
UNNAMED, NAMED = 4, 32  # copies of a model's weights for sampling: the last used ones, and at most
_MOST_MODELS = 32  # of a session
_MOST_JSON = 2**22  # bytes


class Service:
    """The server without its connections. Methods named as the API's paths take a request's fields."""

    def __init__(self, model: Model, name: str, rank: int, *, folder: pathlib.Path, expiry_s: float, most: int):
        """`model` is the base; `rank` 0 trains whole weights; `most` sessions at once."""
        self._base, self._name, self._rank = model, name, rank
        self._folder, self._expiry_s, self._most = folder, expiry_s, most
        self._start = model.keep()
        self._sessions: dict[str, Session] = {}
        self._queue: collections.deque[Future] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False

    async def answer(self, owner: str, method: str, path: str, body: bytes) -> HttpReply:
        """Answers a request of a key; raises BadRequest."""
        self._size = len(body)
        if method == "GET":
            return json_reply(self._get(owner, path))
        if method != "POST":
            raise BadRequest(f"{method[:16]} is not supported; send GET or POST", status=405)
        if path == "forward_backward":
            return json_reply(self.forward_backward(owner, requests.read_message(body)))
        if path.startswith("sessions/") and path.endswith("/finish"):
            return json_reply(self._finish(owner, path.split("/")[1]))
        if path not in (*_POSTS, "retrieve_future"):
            raise BadRequest(f"there is no POST /api/v1/{path[:80]}; see docs/tinker.md", status=404)
        if len(body) > _MOST_JSON:
            raise BadRequest(f"the body has {len(body)} bytes; it must have at most {_MOST_JSON}", status=413)
        fields = json_object(body or b"{}")
        if path == "retrieve_future":
            return await self.retrieve_future(owner, fields)
        return json_reply(getattr(self, path)(owner, fields))

    def _get(self, owner: str, path: str) -> dict[str, Any]:
        if path == "healthz":
            return {"status": "ok"}
        if path == "get_server_capabilities":
            d = self._base.settings.data
            length = d.max_prompt_length + d.max_response_length
            model = {"model_name": self._name, "max_context_length": length, "trainable": True, "sampleable": True}
            return {"supported_models": [model]}
        kind, _, name = path.partition("/")
        if kind == "samplers":
            with self._changed:
                self._sampler(owner, name)
            return {"sampler_id": name, "base_model": self._name, "model_path": None}
        raise BadRequest(f"there is no GET /api/v1/{path[:80]}; see docs/tinker.md", status=404)

    def client_config(self, owner: str, body: Body) -> dict[str, Any]:
        """Returns the client's features: its defaults without those of a larger service."""
        return {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "fwdbwd_max_chunk_len": 1024}

    def client_dynamic_config(self, owner: str, body: Body) -> dict[str, Any]:
        """Returns the client's features that may change: none."""
        return {}

    def telemetry(self, owner: str, body: Body) -> dict[str, Any]:
        """Drops what the client reports."""
        return {"status": "accepted"}

    def create_session(self, owner: str, body: Body) -> dict[str, Any]:
        """Starts a session."""
        session = Session(secrets.token_hex(8), owner, time.monotonic())
        with self._changed:
            if len(self._sessions) >= self._most:
                raise BadRequest(
                    f"{len(self._sessions)} sessions are open, and at most --sessions={self._most} may be; wait"
                    f" {self._expiry_s:g} s after a client has gone, or start the server with more"
                )
            self._sessions[session.id] = session
        warning = "saved states stay beyond ttl_seconds, since jppo deletes none"
        if self._rank:
            warning += (
                "; adapters are on the layers' attention and MLP: train_unembed=True adds none to the output layer"
            )
        return {"type": "create_session", "session_id": session.id, "warning_message": warning}

    def session_heartbeat(self, owner: str, body: Body) -> dict[str, Any]:
        """Keeps a session from expiring."""
        with self._changed:
            self._session(owner, field(body, "session_id", str))
        return {"type": "session_heartbeat"}

    def _finish(self, owner: str, id: str) -> dict[str, Any]:
        """Ends a session after its requests."""
        with self._changed:
            session = self._session(owner, id)

            def end() -> dict[str, Any]:
                with self._changed:
                    self._end(session)
                return {}

            self._add(session, f"{id}:finish", end)
        return {"type": "finish_session"}

    def create_model(self, owner: str, body: Body) -> dict[str, Any]:
        """Makes a new set of trained weights."""
        seed = requests.require_model(body, self._name, self._rank)
        return self._begin(owner, body, seed, None)

    def _begin(
        self, owner: str, body: Body, seed: int | None, source: tuple[pathlib.Path, bool] | None
    ) -> dict[str, Any]:
        """Makes the model `model_seq_id`, from a checkpoint if `source` has one and whether its optimizer."""
        with self._changed:
            session = self._session(owner, field(body, "session_id", str))
            run = SessionModel(f"{session.id}:train:{field(body, 'model_seq_id', int)}")
            if run.id in session.runs:
                return self._told(session.futures.get(f"{run.id}:0"), run.id)
            if len(session.runs) >= _MOST_MODELS:
                raise BadRequest(f"the session has {_MOST_MODELS} models, the most; start another session")

            def make() -> dict[str, Any]:
                run.model = self._base.another(seed=secrets.randbelow(2**31) if seed is None else seed)
                if source is not None:
                    run.model.load(source[0], optimizer=source[1])
                kind = "create_model" if source is None else "load_weights"
                return {"model_id": run.id, "type": kind, "path": None}

            future = self._add(session, f"{run.id}:0", make)
            session.runs[run.id] = run
            return self._told(future, run.id)

    def get_info(self, owner: str, body: Body) -> dict[str, Any]:
        """Describes a model."""
        with self._changed:
            _, run = self._run(owner, field(body, "model_id", str))
        data = {"arch": "transformer", "model_name": self._name, "tokenizer_id": self._name}
        description = {"type": "get_info", "model_id": run.id, "model_name": self._name, "model_data": data}
        return description | {"is_lora": bool(self._rank), "lora_rank": self._rank or None}

    def forward_backward(self, owner: str, message: requests.Message) -> dict[str, Any]:
        """Adds a gradient, or with forward_only computes log-probs; refuses too many parts by a result."""
        excess = requests.excess_parts(message)

        def refuse(_: Model) -> bytes:
            raise BadRequest(excess)

        def make(model: Model) -> bytes:
            asked = requests.read_gradient(message)
            name, options = requests.loss_options(asked)
            inputs, targets, arrays = requests.loss_inputs(asked.data, name)
            batch = model.examples(inputs, targets, **arrays)
            if not asked.forward_only:
                gradient = model.forward_backward(batch, name, **options)
                assert gradient.logprob is not None
                logprob, total = (
                    gradient.logprob,
                    gradient.metrics.get("actor/loss", gradient.metrics.get("actor/pg_loss")),
                )
            elif name == "cross_entropy":
                logprob = model.logprobs(batch)
                total = -float((logprob * np.asarray(batch.data["weight"])).sum())
            else:
                raise BadRequest(f"forward with loss_fn={name!r} is not supported; take 'cross_entropy'")
            rows = [logprob[i, : len(x)] for i, x in enumerate(targets)]
            return requests.gradient_message(rows, {} if total is None else {"loss:sum": total})

        return self._ordered(owner, message.model_id, message.seq_id, refuse if excess else make)

    def optim_step(self, owner: str, body: Body) -> dict[str, Any]:
        """Applies the accumulated gradient by AdamW with the request's hyperparameters."""

        def make(model: Model) -> dict[str, Any]:
            metrics = model.optim_step(**requests.adam_options(body))
            finite = {name: x for name, x in metrics.items() if math.isfinite(x)}  # JSON has no others
            return {"metrics": {name.replace(":", "_") + ":mean": x for name, x in finite.items()}}

        return self._of_model(owner, body, make)

    def save_weights(self, owner: str, body: Body) -> dict[str, Any]:
        """Writes a checkpoint with the optimizer's state."""

        def make(model: Model) -> dict[str, Any]:
            requests.require_known(
                "", body, ("model_id", "path", "seq_id", "overwrite", "user_metadata", "ttl_seconds", "type")
            )
            name = requests.name_of(body, f"{field(body, 'seq_id', int):06d}")
            path = requests.checkpoint_folder(self._folder, owner, f"{field(body, 'model_id', str)}/weights/{name}")
            if path.exists() and not field(body, "overwrite", bool, False):
                raise BadRequest(f"path={name!r} exists; take another name, or overwrite=True")
            part, former = path.with_name(f".{name}"), path.with_name(f".{name}.former")
            for folder in (part, former):
                shutil.rmtree(folder, ignore_errors=True)
            model.save(part)
            if path.exists():
                path.rename(former)  # whole until the new one has its name
            part.rename(path)
            shutil.rmtree(former, ignore_errors=True)
            return {"path": f"{requests.SCHEME}{body['model_id']}/weights/{name}", "type": "save_weights"}

        return self._of_model(owner, body, make)

    def load_weights(self, owner: str, body: Body) -> dict[str, Any]:
        """Reads a checkpoint into a model, or into a new one where the request names a session."""

        def source() -> tuple[pathlib.Path, bool]:
            known = ("model_id", "seq_id", "session_id", "model_seq_id", "user_metadata", "path", "optimizer", "type")
            requests.require_known("", body, (*known, "optimizer_config", "base_model"))
            given, optimizer = field(body, "path", str), field(body, "optimizer", bool)
            path = requests.checkpoint_folder(self._folder, owner, given.removeprefix(requests.SCHEME))
            if not given.startswith(requests.SCHEME) or not path.is_dir():
                raise BadRequest(f"path={given[:160]!r} is no checkpoint of this key", status=404)
            return path, optimizer

        if "session_id" in body:
            # The checkpoint decides the rank; `Model.load` refuses one of another model.
            asked = {"base_model": body.get("base_model") or self._name, "lora_config": {"rank": self._rank}}
            requests.require_model(asked | {"optimizer_config": body.get("optimizer_config")}, self._name, self._rank)
            return self._begin(owner, body, None, source())

        def make(model: Model) -> dict[str, Any]:
            path, optimizer = source()
            model.load(path, optimizer=optimizer)
            return {"path": body["path"], "type": "load_weights"}

        return self._of_model(owner, body, make)

    def save_weights_for_sampler(self, owner: str, body: Body) -> dict[str, Any]:
        """Keeps a copy of the weights to sample from, by a name or for one sampler."""
        known = ("model_id", "path", "sampling_session_seq_id", "seq_id", "user_metadata", "ttl_seconds", "type")

        def make(model: Model) -> dict[str, Any]:
            options = {key: value for key, value in body.items() if (key, value) != ("kind", "snapshot")}
            requests.require_known("", options, known)
            reply = dict[str, Any](type="save_weights_for_sampler")
            with self._changed:
                session, run = self._run(owner, field(body, "model_id", str))
            if "sampling_session_seq_id" in body:
                sampler = f"{session.id}:sample:{field(body, 'sampling_session_seq_id', int)}"
                kept = model.keep()
                with self._changed:
                    session.name_sampler(sampler, kept)
                    run.unnamed.append(sampler)
                    if len(run.unnamed) > UNNAMED:
                        session.samplers[run.unnamed.popleft()] = None
                return reply | {"sampling_session_id": sampler}
            name = requests.name_of(body, f"{field(body, 'seq_id', int):06d}")
            if name not in run.kept and len(run.kept) >= NAMED:
                raise BadRequest(f"path={name!r}: {NAMED} sets of weights are kept for sampling; reuse a name")
            kept = model.keep()
            with self._changed:
                former, run.kept[name] = run.kept.get(name), kept
                for sampler in [key for key, one in session.samplers.items() if one is not None and one is former]:
                    session.samplers[sampler] = None
            return reply | {"path": f"{requests.SCHEME}{run.id}/sampler_weights/{name}"}

        return self._of_model(owner, body, make)

    def create_sampling_session(self, owner: str, body: Body) -> dict[str, Any]:
        """Names a sampler of kept weights or of the base model."""
        with self._changed:
            session = self._session(owner, field(body, "session_id", str))
            path, kept = body.get("model_path"), None
            if path is not None:
                parts = field(body, "model_path", str).removeprefix(requests.SCHEME).split("/")
                if len(parts) == 3 and parts[1] == "sampler_weights":
                    kept = self._run(owner, parts[0])[1].kept.get(parts[2])
            elif field(body, "base_model", str) == self._name:
                kept = self._start
            if kept is None:
                asked = path if path is not None else body.get("base_model")
                raise BadRequest(
                    f"{str(asked)[:160]!r} is no model to sample from; save_weights_for_sampler", status=404
                )
            sampler = f"{session.id}:sample:{field(body, 'sampling_session_seq_id', int)}"
            session.name_sampler(sampler, session.samplers.get(sampler, kept))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def asample(self, owner: str, body: Body) -> dict[str, Any]:
        """Samples responses to a prompt and scores it, if asked; an over-long prompt can be scored alone."""
        d, seq_id = self._base.settings.data, field(body, "seq_id", int)
        options = requests.sampling_options(body, d.max_response_length, self._base.vocab_size)
        # the request that a client's compute_logprobs sends
        scores = bool(body.get("prompt_logprobs")) and options["n"] == options["max_tokens"] == 1
        longest = d.longest_row if scores else d.max_prompt_length
        prompt = requests.prompt_tokens(body, longest, self._base.vocab_size)
        score_only = len(prompt) > d.max_prompt_length
        scored = requests.scored_count(body, prompt)
        sampler = field(body, "sampling_session_id", str)
        with self._changed:
            session, weights = self._sampler(owner, sampler)
            id = f"{sampler}:{seq_id}"
            if id not in session.futures:
                # requests of one group are sampled in one call
                group = (sampler, id if "seed" in options else "", scored is None, score_only, *sorted(options.items()))
                self._add(session, id, None, SampleRequest(weights, prompt, options, scored), group)
            told = self._told(session.futures[id], None)
        return told | {"sample_sequence_ids": [] if score_only else [f"{id}:{i}" for i in range(options["n"])]}

    async def retrieve_future(self, owner: str, body: Body) -> HttpReply:
        """Returns the result of a request, or 408 after a while."""
        id = field(body, "request_id", str)
        with self._changed:
            future = self._session(owner, id.partition(":")[0]).futures.get(id)
        if future is None:
            raise BadRequest("the request is of no future that is kept", status=410)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.done.wait(), POLL_S)
        return future.reply or json_reply({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)

    def work(self) -> None:
        """Runs requests until `close`; called by the thread that opened the model."""
        while (jobs := self._next()) is not None:
            try:
                if jobs and jobs[0].sample is not None:
                    answer_samples(self._base, jobs)
                elif jobs and jobs[0].run is not None and not jobs[0].session.ended:
                    jobs[0].finish(jobs[0].run())
            except Exception as e:
                for job in jobs:
                    if job.reply is None:
                        job.fail(e)

    def stop(self) -> None:
        """Ends `work` after the request that runs; a signal handler may call it."""
        self._closing = True

    def _next(self) -> list[Future] | None:
        """Waits for the next request, or all samples of its group; ends sessions that expired."""
        with self._changed:
            if not self._queue and not self._closing:
                self._changed.wait(1.0)
            now = time.monotonic()
            for session in [s for s in self._sessions.values() if now - s.seen > self._expiry_s]:
                self._end(session)
            if self._closing:
                return None
            if not self._queue:
                return []
            first = self._queue.popleft()
            if first.sample is None:
                return [first]
            same = [queued for queued in self._queue if queued.sample is not None and queued.group == first.group]
            for further in same:
                self._queue.remove(further)
            return [first, *same]

    def _end(self, session: Session) -> None:
        """Frees everything of a session, its accumulated gradients included."""
        session.ended = True
        del self._sessions[session.id]
        for run in session.runs.values():
            if run.model is not None:
                run.model.close()
        for future in list(session.futures.values()):
            if future.reply is None:
                future.fail(BadRequest("the session expired; start another"))
        self._queue = collections.deque(queued for queued in self._queue if queued.session is not session)

    def _of_model(self, owner: str, body: Body, make: Callable[[Model], Any]) -> dict[str, Any]:
        return self._ordered(owner, field(body, "model_id", str), field(body, "seq_id", int), make)

    def _ordered(self, owner: str, model_id: str, number: int, make: Callable[[Model], Any]) -> dict[str, Any]:
        """Accepts request `number` of a model; it runs after those with lower numbers."""
        with self._changed:
            session, run = self._run(owner, model_id)
            id = f"{run.id}:{number}"
            if number < run.next:
                return self._told(session.futures.get(id), run.id)
            if number - run.next >= _MOST_HELD:
                why = f"seq_id={number}: the next is {run.next}, and at most {_MOST_HELD} later ones wait"
                raise BadRequest(f"{why}; send it after a result", status=429)

            def on_model() -> Any:
                if run.model is None:
                    raise BadRequest("the model could not be made; see the result of its creation")
                return make(run.model)

            if number not in run.held:
                # Beyond the bounds, too, where all that wait are held: they would wait for this one for ever.
                held_all = session.unfinished == sum(len(other.held) for other in session.runs.values())
                future = Future(id, session, on_model, size=self._size)
                run.held[number] = session.accept(future, needed=held_all and number == run.next)
            held = run.held[number]
            while (ready := run.held.pop(run.next, None)) is not None:
                run.next += 1
                self._queue.append(ready)
            self._changed.notify_all()
            return self._told(held, run.id)

    def _add(self, session: Session, id: str, run: Any, sample: Any = None, group: Hashable = None) -> Future:
        """Queues a request that waits for no other."""
        future = session.accept(Future(id, session, run, sample, group, self._size))
        self._queue.append(future)
        self._changed.notify_all()
        return future

    def _told(self, future: Future | None, model_id: str | None) -> dict[str, Any]:
        if future is None:
            raise BadRequest("the request was answered before, and its result is no longer kept", status=410)
        return {"request_id": future.id, "model_id": model_id}

    def _session(self, owner: str, id: str) -> Session:
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise BadRequest("the session is of another key, or it expired; start another", status=404)
        session.seen = time.monotonic()
        return session

    def _run(self, owner: str, model_id: str) -> tuple[Session, SessionModel]:
        session = self._session(owner, model_id.partition(":")[0])
        if model_id not in session.runs:
            raise BadRequest(f"model_id={model_id[:80]!r} is no model of the session", status=404)
        return session, session.runs[model_id]

    def _sampler(self, owner: str, id: str) -> tuple[Session, Kept]:
        session = self._session(owner, id.partition(":")[0])
        kept = session.samplers.get(id)
        if kept is None:
            expired = f"expired: the last used {UNNAMED} without a name are kept, and one of each name"
            why = expired if id in session.samplers else "is not known"
            raise BadRequest(f"the sampler {id[:80]!r} {why}; make another", status=404)
        session.name_sampler(id, kept)
        for run in session.runs.values():
            if id in run.unnamed:  # moves to the end: the least recently used one expires first
                run.unnamed.remove(id)
                run.unnamed.append(id)
        return session, kept


_POSTS = (
    "client_config", "client_dynamic_config", "telemetry", "create_session", "session_heartbeat", "create_model",
    "get_info", "optim_step", "save_weights", "load_weights", "save_weights_for_sampler", "create_sampling_session",
    "asample",
)  # fmt: skip
