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
from jppo.plugins.tinker import requests
from jppo.plugins.tinker.futures import Future, SampleRequest, Session, SessionModel, answer_samples
from jppo.plugins.tinker.requests import Body, field
from jppo.run.api.engine import Snapshot
from jppo.run.api.model import Model

POLL_S = 20.0  # longest wait of one retrieve_future
_MOST_EARLY = 4096  # requests of a model that wait for an earlier number
UNNAMED, NAMED = 4, 32  # copies of a model's weights for sampling: the last used ones, and at most
Reply = dict[str, Any]  # fields of a JSON reply
_MOST_MODELS = 32  # of a session
_MOST_JSON = 2**22  # bytes


class Service:
    """The server without its connections.

    Methods named as the API's paths take a request's fields; `answer` calls them with the lock `_changed`.
    """

    def __init__(self, model: Model, name: str, rank: int, *, folder: pathlib.Path, expiry_s: float, max_sessions: int):
        """Serves `model` as the base `name`; `rank` is its adapters', 0 trains whole weights."""
        self._base, self._name, self._rank = model, name, rank
        self._folder, self._expiry_s, self._max_sessions = folder, expiry_s, max_sessions
        self._base_weights = model.keep()
        self._sessions: dict[str, Session] = {}
        self._queue: collections.deque[Future] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False

    async def answer(self, owner: str, method: str, path: str, body: bytes) -> HttpReply:
        """Answers a request of the key `owner`; raises BadRequest."""
        if method not in ("GET", "POST"):
            raise BadRequest(f"{method[:16]} is not supported; send GET or POST", status=405)
        if (method, path) == ("POST", "retrieve_future"):
            return await self._retrieve_future(owner, _read_fields(body))
        with self._changed:
            self._size = len(body)
            return json_reply(self._answer_get(owner, path) if method == "GET" else self._post(owner, path, body))

    def _post(self, owner: str, path: str, body: bytes) -> Reply:
        """Returns the reply to a POST: of the method with the name of the path, or a fixed one."""
        if path == "forward_backward":
            return self.forward_backward(owner, requests.read_message(body))
        if path.startswith("sessions/") and path.endswith("/finish"):
            return self._finish_session(owner, path.split("/")[1])
        if path not in (*_POSTS, *_FIXED):
            raise BadRequest(f"there is no POST /api/v1/{path[:80]}; see docs/tinker.md", status=404)
        fields = _read_fields(body)
        reply: Reply = _FIXED[path] if path in _FIXED else getattr(self, path)(owner, fields)
        return reply

    def _answer_get(self, owner: str, path: str) -> Reply:
        """Returns the reply to a GET: health, the server's capabilities, or a sampler."""
        if path == "healthz":
            return {"status": "ok"}
        if path == "get_server_capabilities":
            d = self._base.settings.data
            length = d.max_prompt_length + d.max_response_length
            model = {"model_name": self._name, "max_context_length": length, "trainable": True, "sampleable": True}
            return {"supported_models": [model]}
        kind, _, name = path.partition("/")
        if kind == "samplers":
            self._find_sampler(owner, name)
            return {"sampler_id": name, "base_model": self._name, "model_path": None}
        raise BadRequest(f"there is no GET /api/v1/{path[:80]}; see docs/tinker.md", status=404)

    def create_session(self, owner: str, body: Body) -> Reply:
        """Starts a session."""
        session = Session(secrets.token_hex(8), owner, time.monotonic())
        if len(self._sessions) >= self._max_sessions:
            raise BadRequest(
                f"{len(self._sessions)} sessions are open, and at most --sessions={self._max_sessions} may be; wait"
                f" {self._expiry_s:g} s after a client has gone, or start the server with more"
            )
        self._sessions[session.id] = session
        warning = "saved states stay beyond ttl_seconds, since jppo deletes none"
        if self._rank:
            warning += (
                "; adapters are on the layers' attention and MLP: train_unembed=True adds none to the output layer"
            )
        return {"type": "create_session", "session_id": session.id, "warning_message": warning}

    def session_heartbeat(self, owner: str, body: Body) -> Reply:
        self._find_session(owner, field(body, "session_id", str))
        return {"type": "session_heartbeat"}

    def _finish_session(self, owner: str, id: str) -> Reply:
        """Queues the end of a session, after its requests."""
        session = self._find_session(owner, id)

        def end_session() -> Reply:
            with self._changed:
                self._end_session(session)
            return {}

        self._queue_at_once(session, f"{id}:finish", end_session)
        return {"type": "finish_session"}

    def create_model(self, owner: str, body: Body) -> Reply:
        """Queues the making of a new set of trained weights."""
        seed = requests.require_model(body, self._name, self._rank)
        return self._queue_new_model(owner, body, seed, None)

    def _queue_new_model(
        self, owner: str, body: Body, seed: int | None, checkpoint: tuple[pathlib.Path, bool] | None
    ) -> Reply:
        """Queues the making of a model, from a `checkpoint` if given: its folder, and whether its optimizer is read."""
        session = self._find_session(owner, field(body, "session_id", str))
        model = SessionModel(f"{session.id}:train:{field(body, 'model_seq_id', int)}")
        if model.id in session.models:
            return self._future_reply(session.futures.get(f"{model.id}:0"), model.id)
        if len(session.models) >= _MOST_MODELS:
            raise BadRequest(f"the session has {_MOST_MODELS} models, the most; start another session")

        def make_model() -> Reply:
            model.model = self._base.another(seed=secrets.randbelow(2**31) if seed is None else seed)
            if checkpoint is not None:
                model.model.load(checkpoint[0], optimizer=checkpoint[1])
            kind = "create_model" if checkpoint is None else "load_weights"
            return {"model_id": model.id, "type": kind, "path": None}

        future = self._queue_at_once(session, f"{model.id}:0", make_model)
        session.models[model.id] = model
        return self._future_reply(future, model.id)

    def get_info(self, owner: str, body: Body) -> Reply:
        _, model = self._find_model(owner, field(body, "model_id", str))
        data = {"arch": "transformer", "model_name": self._name, "tokenizer_id": self._name}
        description = {"type": "get_info", "model_id": model.id, "model_name": self._name, "model_data": data}
        return description | {"is_lora": bool(self._rank), "lora_rank": self._rank or None}

    def forward_backward(self, owner: str, message: requests.Message) -> Reply:
        """Queues a gradient, or with forward_only log-probs."""

        def compute(model: Model) -> bytes:
            """Adds the gradient of the request's loss, or computes log-probs; returns the binary reply."""
            request = requests.read_gradient(message)
            name, options = requests.loss_options(request)
            inputs, targets, arrays = requests.loss_inputs(request.data, name)
            batch = model.examples(inputs, targets, **arrays)
            if not request.forward_only:
                gradient = model.forward_backward(batch, name, **options)
                assert gradient.logprob is not None
                logprob = gradient.logprob
                loss_sum = gradient.metrics.get("actor/loss", gradient.metrics.get("actor/pg_loss"))
            elif name == "cross_entropy":
                logprob = model.logprobs(batch)
                loss_sum = -float((logprob * np.asarray(batch.data["weight"])).sum())
            else:
                raise BadRequest(f"forward with loss_fn={name!r} is not supported; take 'cross_entropy'")
            rows = [logprob[i, : len(x)] for i, x in enumerate(targets)]
            return requests.gradient_message(rows, {} if loss_sum is None else {"loss:sum": loss_sum})

        return self._queue_in_order(owner, message.model_id, message.seq_id, compute)

    def optim_step(self, owner: str, body: Body) -> Reply:
        """Queues a step of AdamW with the accumulated gradient and the request's hyperparameters."""

        def apply_gradient(model: Model) -> Reply:
            metrics = model.optim_step(**requests.adam_options(body))
            finite = {name: x for name, x in metrics.items() if math.isfinite(x)}  # JSON has no others
            return {"metrics": {name.replace(":", "_") + ":mean": x for name, x in finite.items()}}

        return self._queue_from_body(owner, body, apply_gradient)

    def save_weights(self, owner: str, body: Body) -> Reply:
        """Queues the writing of a checkpoint with the optimizer's state."""

        def write_checkpoint(model: Model) -> Reply:
            requests.require_known(
                "", body, ("model_id", "path", "seq_id", "overwrite", "user_metadata", "ttl_seconds", "type")
            )
            name = requests.name_of(body)
            path = requests.checkpoint_folder(self._folder, owner, f"{field(body, 'model_id', str)}/weights/{name}")
            if path.exists() and not field(body, "overwrite", bool, False):
                raise BadRequest(f"path={name!r} exists; take another name, or overwrite=True")
            unfinished, former = path.with_name(f".{name}"), path.with_name(f".{name}.former")
            for folder in (unfinished, former):
                shutil.rmtree(folder, ignore_errors=True)
            model.save(unfinished)
            if path.exists():
                path.rename(former)  # whole until the new one has its name
            unfinished.rename(path)
            shutil.rmtree(former, ignore_errors=True)
            return {"path": f"{requests.SCHEME}{body['model_id']}/weights/{name}", "type": "save_weights"}

        return self._queue_from_body(owner, body, write_checkpoint)

    def load_weights(self, owner: str, body: Body) -> Reply:
        """Queues the reading of a checkpoint into a model, or into a new one where the request names a session."""

        def find_checkpoint() -> tuple[pathlib.Path, bool]:
            """Returns the checkpoint's folder, and whether to read its optimizer."""
            known = ("model_id", "seq_id", "session_id", "model_seq_id", "user_metadata", "path", "optimizer", "type")
            requests.require_known("", body, (*known, "optimizer_config", "base_model"))
            address, optimizer = field(body, "path", str), field(body, "optimizer", bool)
            path = requests.checkpoint_folder(self._folder, owner, address.removeprefix(requests.SCHEME))
            if not address.startswith(requests.SCHEME) or not path.is_dir():
                raise BadRequest(f"path={address[:160]!r} is no checkpoint of this key", status=404)
            return path, optimizer

        if "session_id" in body:
            # The checkpoint decides the rank; `Model.load` refuses one of another model.
            wanted = {"base_model": body.get("base_model") or self._name, "lora_config": {"rank": self._rank}}
            requests.require_model(wanted | {"optimizer_config": body.get("optimizer_config")}, self._name, self._rank)
            return self._queue_new_model(owner, body, None, find_checkpoint())

        def read_weights(model: Model) -> Reply:
            path, optimizer = find_checkpoint()
            model.load(path, optimizer=optimizer)
            return {"path": body["path"], "type": "load_weights"}

        return self._queue_from_body(owner, body, read_weights)

    def save_weights_for_sampler(self, owner: str, body: Body) -> Reply:
        """Queues a copy of the weights to sample from, by a name or for one sampler."""
        known = ("model_id", "path", "sampling_session_seq_id", "seq_id", "user_metadata", "ttl_seconds", "type")

        def copy_weights(model: Model) -> Reply:
            """Copies the model's weights for a name, or for one sampler that has none."""
            options = {key: value for key, value in body.items() if (key, value) != ("kind", "snapshot")}
            requests.require_known("", options, known)
            reply = Reply(type="save_weights_for_sampler")
            with self._changed:
                session, session_model = self._find_model(owner, field(body, "model_id", str))
            if "sampling_session_seq_id" in body:
                sampler = f"{session.id}:sample:{field(body, 'sampling_session_seq_id', int)}"
                weights = model.keep()
                with self._changed:
                    session.name_sampler(sampler, weights)
                    session_model.unnamed_samplers.append(sampler)
                    if len(session_model.unnamed_samplers) > UNNAMED:
                        session.samplers[session_model.unnamed_samplers.popleft()] = None
                return reply | {"sampling_session_id": sampler}
            name = requests.name_of(body)
            if name not in session_model.named_weights and len(session_model.named_weights) >= NAMED:
                raise BadRequest(f"path={name!r}: {NAMED} sets of weights are kept for sampling; reuse a name")
            weights = model.keep()
            with self._changed:
                former, session_model.named_weights[name] = session_model.named_weights.get(name), weights
                for sampler in [key for key, one in session.samplers.items() if one is not None and one is former]:
                    session.samplers[sampler] = None
            return reply | {"path": f"{requests.SCHEME}{session_model.id}/sampler_weights/{name}"}

        return self._queue_from_body(owner, body, copy_weights)

    def create_sampling_session(self, owner: str, body: Body) -> Reply:
        """Names a sampler of kept weights or of the base model."""
        session = self._find_session(owner, field(body, "session_id", str))
        path, weights = body.get("model_path"), None
        if path is not None:
            parts = field(body, "model_path", str).removeprefix(requests.SCHEME).split("/")
            if len(parts) == 3 and parts[1] == "sampler_weights":
                weights = self._find_model(owner, parts[0])[1].named_weights.get(parts[2])
        elif field(body, "base_model", str) == self._name:
            weights = self._base_weights
        if weights is None:
            requested = path if path is not None else body.get("base_model")
            raise BadRequest(
                f"{str(requested)[:160]!r} is no model to sample from; save_weights_for_sampler", status=404
            )
        sampler = f"{session.id}:sample:{field(body, 'sampling_session_seq_id', int)}"
        session.name_sampler(sampler, session.samplers.get(sampler, weights))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def asample(self, owner: str, body: Body) -> Reply:
        """Queues samples for a prompt and, if requested, its log-probs; of an over-long prompt log-probs only."""
        d, seq_id = self._base.settings.data, field(body, "seq_id", int)
        options = requests.sampling_options(body, d.max_response_length, self._base.vocab_size)
        # the request that a client's compute_logprobs sends
        wants_scores = bool(body.get("prompt_logprobs")) and options["n"] == options["max_tokens"] == 1
        max_prompt = d.longest_row if wants_scores else d.max_prompt_length
        prompt = requests.prompt_tokens(body, max_prompt, self._base.vocab_size)
        score_only = len(prompt) > d.max_prompt_length
        scored = requests.scored_count(body, prompt)
        sampler = field(body, "sampling_session_id", str)
        session, weights = self._find_sampler(owner, sampler)
        id = f"{sampler}:{seq_id}"
        if id not in session.futures:
            # requests of one group are sampled in one call
            group = (sampler, id if "seed" in options else "", scored is None, score_only, *sorted(options.items()))
            self._queue_at_once(session, id, None, SampleRequest(weights, prompt, options, scored), group)
        reply = self._future_reply(session.futures[id], None)
        return reply | {"sample_sequence_ids": [] if score_only else [f"{id}:{i}" for i in range(options["n"])]}

    async def _retrieve_future(self, owner: str, body: Body) -> HttpReply:
        """Returns the result of a request, or 408 after a while."""
        id = field(body, "request_id", str)
        with self._changed:
            future = self._find_session(owner, id.partition(":")[0]).futures.get(id)
        if future is None:
            raise BadRequest("the request is of no future that is kept", status=410)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.done.wait(), POLL_S)
        return future.reply or json_reply({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)

    def work(self) -> None:
        """Runs requests until `close`; called by the thread that opened the model."""
        while (futures := self._take_requests()) is not None:
            try:
                if futures and futures[0].sample is not None:
                    answer_samples(self._base, futures)
                elif futures and futures[0].run is not None and not futures[0].session.ended:
                    futures[0].finish(futures[0].run())
            except Exception as e:
                for future in futures:
                    if future.reply is None:
                        future.fail(e)

    def stop(self) -> None:
        """Ends `work` after the request that runs; a signal handler may call it."""
        self._closing = True

    def _take_requests(self) -> list[Future] | None:
        """Waits for the next request, or all samples of its group; ends sessions that expired."""
        with self._changed:
            if not self._queue and not self._closing:
                self._changed.wait(1.0)
            now = time.monotonic()
            for session in [s for s in self._sessions.values() if now - s.last_seen > self._expiry_s]:
                self._end_session(session)
            if self._closing:
                return None
            if not self._queue:
                return []
            first = self._queue.popleft()
            if first.sample is None:
                return [first]
            same_group = [queued for queued in self._queue if queued.sample is not None and queued.group == first.group]
            for future in same_group:
                self._queue.remove(future)
            return [first, *same_group]

    def _end_session(self, session: Session) -> None:
        """Frees everything of a session, its accumulated gradients included."""
        session.ended = True
        del self._sessions[session.id]
        for model in session.models.values():
            if model.model is not None:
                model.model.close()
        for future in list(session.futures.values()):
            if future.reply is None:
                future.fail(BadRequest("the session expired; start another"))
        self._queue = collections.deque(queued for queued in self._queue if queued.session is not session)

    def _queue_from_body(self, owner: str, body: Body, call: Callable[[Model], Any]) -> Reply:
        """Queues a call of the model that the request's fields name."""
        return self._queue_in_order(owner, field(body, "model_id", str), field(body, "seq_id", int), call)

    def _queue_in_order(self, owner: str, model_id: str, number: int, call: Callable[[Model], Any]) -> Reply:
        """Queues request `number` of a model, to `call` it after those with lower numbers; returns the reply."""
        session, session_model = self._find_model(owner, model_id)
        id = f"{session_model.id}:{number}"
        if number < session_model.next_number:
            return self._future_reply(session.futures.get(id), session_model.id)
        if number - session_model.next_number > _MOST_EARLY:
            problem = f"the next is {session_model.next_number}, and at most {_MOST_EARLY} later ones wait"
            raise BadRequest(f"seq_id={number}: {problem}; send it after a result", status=429)

        def call_model() -> Any:
            if session_model.model is None:
                raise BadRequest("the model could not be made; see the result of its creation")
            return call(session_model.model)

        if number not in session_model.early_futures:
            # Beyond the bounds, too, where all unfinished ones are early: they would wait for this one for ever.
            all_early = session.unfinished == sum(len(other.early_futures) for other in session.models.values())
            needed = all_early and number == session_model.next_number
            new = Future(id, session, call_model, size=self._size)
            session_model.early_futures[number] = session.accept(new, needed=needed)
        future = session_model.early_futures[number]
        while (ready := session_model.early_futures.pop(session_model.next_number, None)) is not None:
            session_model.next_number += 1
            self._queue.append(ready)
        self._changed.notify_all()
        return self._future_reply(future, session_model.id)

    def _queue_at_once(
        self, session: Session, id: str, call: Callable[[], Reply] | None, sample: SampleRequest | None = None,
        group: Hashable = None,
    ) -> Future:  # fmt: skip
        """Queues a request that waits for no other: a call, or a `sample` of a group; returns its future."""
        future = session.accept(Future(id, session, call, sample, group, self._size))
        self._queue.append(future)
        self._changed.notify_all()
        return future

    def _future_reply(self, future: Future | None, model_id: str | None) -> Reply:
        """Returns the reply to an accepted request: the id of its future, to retrieve the result by."""
        if future is None:
            raise BadRequest("the request was answered before, and its result is no longer kept", status=410)
        return {"request_id": future.id, "model_id": model_id}

    def _find_session(self, owner: str, id: str) -> Session:
        """Returns a session of this key, which counts as in use; raises BadRequest for another."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise BadRequest("the session is of another key, or it expired; start another", status=404)
        session.last_seen = time.monotonic()
        return session

    def _find_model(self, owner: str, model_id: str) -> tuple[Session, SessionModel]:
        """Returns a model of this key with its session; raises BadRequest for another."""
        session = self._find_session(owner, model_id.partition(":")[0])
        if model_id not in session.models:
            raise BadRequest(f"model_id={model_id[:80]!r} is no model of the session", status=404)
        return session, session.models[model_id]

    def _find_sampler(self, owner: str, id: str) -> tuple[Session, Snapshot]:
        """Returns a sampler's session and weights, and marks it as the last used; raises BadRequest if it expired."""
        session = self._find_session(owner, id.partition(":")[0])
        weights = session.samplers.get(id)
        if weights is None:
            expiry = f"expired: the last used {UNNAMED} without a name are kept, and one of each name"
            problem = expiry if id in session.samplers else "is not known"
            raise BadRequest(f"the sampler {id[:80]!r} {problem}; make another", status=404)
        session.name_sampler(id, weights)
        for model in session.models.values():
            if id in model.unnamed_samplers:  # moves to the end: the least recently used one expires first
                model.unnamed_samplers.remove(id)
                model.unnamed_samplers.append(id)
        return session, weights


def _read_fields(body: bytes) -> Body:
    """Parses the JSON of a request."""
    if len(body) > _MOST_JSON:
        raise BadRequest(f"the body has {len(body)} bytes; it must have at most {_MOST_JSON}", status=413)
    return json_object(body or b"{}")


_POSTS = (
    "create_session", "session_heartbeat", "create_model", "get_info", "optim_step", "save_weights", "load_weights",
    "save_weights_for_sampler", "create_sampling_session", "asample",
)  # fmt: skip
_FIXED: dict[str, Reply] = {  # replies that do not depend on the request
    "client_config": {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "fwdbwd_max_chunk_len": 1024},
    "client_dynamic_config": {},
    "telemetry": {"status": "accepted"},  # and dropped
}
