"""Several servers as one, against fakes that fail in every way; real ones are killed in test_real_vllm.py."""

import asyncio
import ctypes
import dataclasses
import resource
import threading
import time

import numpy as np
import pytest

from jppo import process
from jppo.rollout.protocol import RolloutError, greedy, sample_seed
from jppo.rollout.servers import endpoint, repair
from jppo.rollout.servers import member as router
from jppo.rollout.vllm.client import GENERATE, start_vllm
from jppo.types import Prompt
from tests.rollout.test_vllm import choice

SAMPLING = dataclasses.replace(greedy(8), temperature=0.7, n=2, seed=5)
PROMPTS = [Prompt(f"p{i}", "", "", np.array([10 + i, 3, 4], np.int32), "", {}) for i in range(6)]
TENSORS = {"w": np.arange(4, dtype=np.float32)}
SWAP = ["jppo_check", "/pause?mode=wait", "jppo_load", "/update_weight_version", "/resume"]
REVIVED = ["jppo_check", "/pause?mode=abort", "jppo_load", "/update_weight_version", "/resume"]
LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def serve(fake, version="default"):
    """A fake that knows its weights, and answers with three tokens: the prompt's first, the seed's, and an end."""
    fake.version = version

    def named(body):
        fake.version = body["new_version"]
        return {}

    def answer(body):
        tokens = [body["token_ids"][0], body["sampling_params"]["seed"] % 1000, 2]
        return {"choices": [choice(tokens, [-0.5, -1.25, -0.25], version=fake.version)]}

    fake.answers["/update_weight_version"] = (200, named)
    fake.answers["/weight_info"] = (200, lambda _: {"weight_version": fake.version})
    fake.answers[GENERATE] = (200, answer)
    return fake


@pytest.fixture
def made(fakes, settings, monkeypatch):
    """A maker of samplers over two fakes that version 7 was published to."""
    monkeypatch.setattr(repair, "POLL_S", 0.05)
    monkeypatch.setattr(repair, "PROBE_S", 0.05)
    engines = []

    def make(
        count=2, timeout_s=600.0, health_s=60.0, start_s=60.0, restarts=3, lora_rank=0, decode=str, connections=-1
    ):
        for fake in fakes:
            serve(fake)
        if lora_rank:
            for fake in fakes:
                fake.answers |= dict.fromkeys(LORA, (200, "Success"))
                fake.answers["/openapi.json"] = (200, {"paths": {GENERATE: {}, LORA[0]: {}}})
        engines.append(
            start_vllm(
                "model",
                "run",
                settings=settings(
                    request_timeout_s=timeout_s,
                    health_timeout_s=health_s,
                    start_timeout_s=start_s,
                    max_restarts=restarts,
                    lora_rank=lora_rank,
                    max_concurrent_requests=connections,
                ),
                urls=[fake.url for fake in fakes[:count]],
            )
        )
        sampler = engines[-1].ready(eos_token_ids=[2], decode=decode)
        sampler.load(TENSORS.items(), version=7)
        for fake in fakes:
            fake.asked.clear(), fake.bodies.clear()
        return sampler

    yield make
    for engine in engines:
        engine.close()


def whole(trajectories, prompts=PROMPTS):
    """Whether every sample of every prompt is there once, drawn from its own seed."""
    found = [(t.uid, t.tokens[-3:].tolist()) for t in trajectories]
    return found == [
        (p.uid, [p.ids[0], sample_seed(5, i, j) % 1000, 2]) for i, p in enumerate(prompts) for j in range(SAMPLING.n)
    ]


def asked(fake, routes):
    return [route for route in fake.asked if route in routes]


def until(true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def failing(fake, times, answer=(500, {"error": "engine dead"})):
    """The fake's own answer after so many others."""
    left, (_, good), lock = [times], fake.answers[GENERATE], threading.Lock()

    def reply(body):
        with lock:
            left[0] -= 1
            bad = left[0] >= 0
        if bad:
            if answer[0] != 200:
                raise ConnectionAbortedError
            return answer[1]
        return good(body)

    fake.answers[GENERATE] = (200, reply)


def test_the_order_of_a_publish(made, fakes):
    made().load(TENSORS.items(), version=8)
    for fake in fakes:
        assert asked(fake, SWAP) == SWAP
        [checked] = [b for b in fake.bodies if b and b.get("method") == "jppo_check"]
        assert checked["kwargs"]["version"] == 8 and checked["kwargs"]["entries"][0][:3] == ["w", "float32", [4]]
        assert fake.version == "8"


SLEEP = ("/sleep?level=2&mode=wait", "/wake_up?tags=weights", "/wake_up?tags=kv_cache")


def test_servers_that_sleep_wake_for_the_next_weights(made, fakes):
    sampler = made()
    for fake in fakes:
        fake.answers |= dict.fromkeys(SLEEP, (200, {}))
    sampler.weights.sleep(2)
    sampler.load(TENSORS.items(), version=8)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=8))
    for fake in fakes:
        check, pause, load, name, resume = SWAP
        order = [SLEEP[0], check, SLEEP[1], pause, load, name, SLEEP[2], resume]
        assert asked(fake, [*SLEEP, *SWAP]) == order
    sampler.load(TENSORS.items(), version=9)
    assert asked(fakes[0], SLEEP) == list(SLEEP), "one that is awake is not woken"


def test_all_sleep_once_none_is_being_restarted(made, fakes):
    sampler = made()
    for fake in fakes:
        fake.answers |= dict.fromkeys(SLEEP, (200, {}))
    member = sampler.members[1]
    member.server, member.in_repair = object(), True  # as one that was started here has it
    thread = threading.Thread(target=sampler.weights.sleep, args=(2,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not asked(fakes[0], SLEEP)
    member.server, member.in_repair = None, False
    thread.join(60)
    assert [asked(fake, SLEEP) for fake in fakes] == [[SLEEP[0]]] * 2


def test_a_server_that_breaks_in_its_sleep_is_awake_when_it_is_back(made, fakes):
    sampler = made()
    for fake in fakes:
        fake.answers |= dict.fromkeys(SLEEP, (200, {}))
    sampler.weights.sleep(2)
    fakes[0].answers["/health"] = (503, None)
    until(lambda: not sampler.members[0].up)
    serve(fakes[0])
    time.sleep(0.5)  # ten probes
    assert not sampler.members[0].up and sampler.restarts == 1, "it is not back before it is healthy"
    fakes[0].answers["/health"] = (200, None)
    until(lambda: sampler.members[0].up)
    sampler.load(TENSORS.items(), version=8)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=8))
    assert asked(fakes[0], SLEEP) == [SLEEP[0]] and asked(fakes[1], SLEEP) == list(SLEEP)


def test_a_limit_of_the_rate_of_requests_breaks_no_server(made, fakes):
    sampler = made()
    fakes[0].answers["/health"] = (429, None)
    until(lambda: len(asked(fakes[0], ["/health"])) > 3)
    assert sampler.members[0].up and sampler.restarts == 0


def test_a_refusal_by_one_worker_of_several_counts(made, fakes):
    sampler = made(1)
    results = [{"ok": True, "error": None}, {"ok": False, "error": "w missing"}]
    fakes[0].answers["jppo_check"] = (200, {"results": results})
    with pytest.raises(RolloutError, match="w missing"):
        sampler.load(TENSORS.items(), version=8)


@pytest.mark.parametrize("route", ["jppo_load", "/resume"])  # test_carriers.py breaks the others
@pytest.mark.parametrize("count", [1, 2])
def test_a_server_that_breaks_in_a_publish_gets_it_afterwards(made, fakes, route, count):
    sampler = made(count)
    good = fakes[0].answers[route]

    def once(body):
        fakes[0].answers[route] = good
        raise ConnectionAbortedError

    fakes[0].answers[route] = (200, once)
    sampler.load(TENSORS.items(), version=8)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=8))
    until(lambda: asked(fakes[0], SWAP + REVIVED)[-5:] == REVIVED and fakes[0].version == "8")
    until(lambda: all(member.up for member in sampler.members))
    assert sampler.metrics()["rollout/restarts"] == 1 and sampler.metrics()["rollout/restarts"] == 0


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (200, "garbage"),
        (200, {"choices": []}),
        (200, {"choices": [choice([5, 2], [-1.0, float("nan")])]}),
        (200, {"choices": [choice([5, 2], [-1.0, -2.0], version="6")]}),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_fails_is_asked_again_with_its_own_seed(made, fakes, answer, count):
    sampler = made(count)
    failing(fakes[0], 3, answer)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    assert sampler.metrics()["rollout/asked_again"] >= 3


def test_a_server_that_lost_its_weights_gets_them_again(made, fakes):
    sampler = made()
    serve(fakes[1])  # as a new process would be
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    until(lambda: asked(fakes[1], REVIVED) == REVIVED)
    assert fakes[1].version == "7" and asked(fakes[0], REVIVED) == []


def test_a_hung_server_is_found_by_its_health_and_others_do_its_work(made, fakes):
    sampler = made(health_s=2.0, start_s=5.0)
    for route in (GENERATE, "/health", "/v1/models"):
        del fakes[1].answers[route]
    assert whole(sampler.start(PROMPTS, SAMPLING).result(60))


def test_the_last_server_that_is_gone_ends_the_run(made, fakes):
    sampler = made(1, timeout_s=1.0, start_s=0.5)
    fakes[0]._server.shutdown()
    fakes[0]._server.server_close()
    with pytest.raises(RolloutError, match=rf"{fakes[0].url} did not come back within rollout\.start_timeout_s=0\.5"):
        sampler.generate(PROMPTS, SAMPLING, version=7)
    with pytest.raises(RolloutError, match="did not come back"):
        sampler.load(TENSORS.items(), version=8)


def test_a_server_that_comes_back_after_the_end_gets_nothing(made, fakes):
    """Another run may use it by then."""
    sampler = made(1)
    fakes[0].answers["/health"] = (503, None)
    until(lambda: not sampler.members[0].up)
    sampler.close()
    fakes[0].answers["/health"] = (200, None)
    time.sleep(4 * repair.POLL_S)
    assert not asked(fakes[0], REVIVED)


def test_no_restart_is_allowed(made, fakes):
    sampler = made(1, restarts=0)
    failing(fakes[0], 10**6)
    with pytest.raises(RolloutError, match=r"broke off.*not restarted: rollout\.max_restarts=0"):
        sampler.generate(PROMPTS, SAMPLING, version=7)


def test_what_begins_alike_goes_to_one_server_unless_it_is_busy(made, fakes, monkeypatch):
    sampler = made()
    sampler.generate(PROMPTS, SAMPLING, version=7)
    firsts = [sorted(b["token_ids"][0] for b in fake.bodies if b and "token_ids" in b) for fake in fakes]
    assert firsts == [[10, 10, 12, 12, 14, 14], [11, 11, 13, 13, 15, 15]]
    monkeypatch.setattr(router, "SLACK", 1)
    held, (_, good) = threading.Event(), fakes[0].answers[GENERATE]
    fakes[0].answers[GENERATE] = (200, lambda body: held.wait() and good(body))
    future = sampler.start([PROMPTS[0]] * 12, SAMPLING)
    until(lambda: len(asked(fakes[1], [GENERATE])) > 12)
    held.set()
    assert len(future.result()) == 24


def test_a_request_does_not_wait_for_one_server_while_another_has_room(made, fakes):
    sampler, held = made(2, connections=2), threading.Event()
    for fake in fakes:
        _, good = fake.answers[GENERATE]
        fake.answers[GENERATE] = (200, lambda body, good=good: held.wait() and good(body))
    future = sampler.start(PROMPTS[:1], dataclasses.replace(SAMPLING, n=6))
    until(lambda: [len(asked(fake, [GENERATE])) for fake in fakes] == [2, 2])
    held.set()
    assert len(future.result(60)) == 6


def test_no_more_are_under_way_than_a_server_has_room_for(made, fakes):
    sampler = made(1, connections=3)
    now, most, lock, (_, good) = [0], [0], threading.Lock(), fakes[0].answers[GENERATE]

    def slow(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return good(body)

    fakes[0].answers[GENERATE] = (200, slow)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    assert most[0] <= 3


def test_a_probe_does_not_wait_for_the_samples_of_later_steps(made, fakes):
    sampler = made(1, connections=3)
    held, (_, good) = threading.Event(), fakes[0].answers[GENERATE]
    fakes[0].answers[GENERATE] = (200, lambda body: (body["token_ids"][0] >= 15 or held.wait()) and good(body))
    samples = sampler.start(PROMPTS[:5], SAMPLING)
    until(lambda: len(asked(fakes[0], [GENERATE])) == 3)  # seven others wait for a place
    probes = threading.Thread(target=sampler.probe, args=(PROMPTS[5:], SAMPLING), daemon=True)
    probes.start()
    probes.join(60)
    assert not probes.is_alive() and not samples.done()
    held.set()
    assert len(samples.result(60)) == 10


def test_a_probe_reaches_a_server_that_has_far_more_to_do(made, fakes, monkeypatch):
    monkeypatch.setattr(router, "SLACK", 1)
    sampler = made()
    for member, busy in zip(sampler.members, (10, 0), strict=True):
        member.in_flight += busy
    probes = sampler.probe(PROMPTS[:2], dataclasses.replace(SAMPLING, n=1))
    assert {t.server for t in probes} == {fake.url for fake in fakes}


def test_more_files_are_allowed_than_a_shell_usually_does(made):
    """Of 1,024 connections, those of four servers, the last would fail, and its server would count as broken."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = before[1] if 0 <= before[1] < process.FILES else process.FILES
    try:
        for soft, later in ((256, wanted), (wanted, wanted)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            made(1)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (later, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_that_is_given_up_in_a_load_is_not_asked_before_it_is_repaired(made, fakes):
    sampler = made()
    member = sampler.members[1]

    def load(_):
        fakes[1].answers["/health"] = (500, {})
        until(lambda: not member.up)
        return {"results": [{"ok": True, "error": None}]}

    fakes[1].answers["jppo_load"] = (200, load)
    sampler.load(TENSORS.items(), version=8)
    assert not member.up and sampler.members[0].up
    fakes[1].answers |= {"/health": (200, None), "jppo_load": fakes[0].answers["jppo_load"]}
    until(lambda: member.up)


def test_a_response_that_an_update_cuts_goes_on_by_the_new_weights(made, fakes):
    sampler = made(1)
    cut, (_, good) = threading.Event(), fakes[0].answers[GENERATE]

    def aborted(body):
        assert cut.wait(60)
        return {"choices": [choice([77], [-3.0], finish="abort", version="7")]}

    fakes[0].answers[GENERATE] = (200, aborted)
    future = sampler.start(PROMPTS[:1], SAMPLING)
    until(lambda: len(asked(fakes[0], [GENERATE])) == 2)

    def pause(_):
        fakes[0].answers[GENERATE] = (200, good)
        cut.set()
        time.sleep(0.1)
        return {}

    fakes[0].answers["/pause?mode=abort"] = (200, pause)
    sampler.load(TENSORS.items(), version=8, mode="abort")
    for j, t in enumerate(future.result()):
        seed = sample_seed(sample_seed(5, 0, j), 0, 1)
        assert t.tokens.tolist() == [10, 3, 4, 77, 10, seed % 1000, 2]
        assert t.version.tolist() == [-1, -1, -1, 7, 8, 8, 8] and t.finish == "stop"
        assert t.logprob.tolist() == [0, 0, 0, -3.0, -0.5, -1.25, -0.25]
    rest = [b for b in fakes[0].bodies if b and b.get("token_ids") == [10, 3, 4, 77]]
    assert [b["sampling_params"]["max_tokens"] for b in rest] == [7, 7]


def letters(ids):
    """A token a letter; with a space in the first place left out, as some tokenizers do."""
    return "".join(map(chr, ids)).removeprefix(" ")


@pytest.mark.parametrize(
    "before, behind, expected",
    [("x</", "a> y", "x</a>"), ("x<", "/a>b", "x</a>"), ("x</", "b</a>", "x</b</a>"), ("x", "y z", "xy z")],
)
def test_a_stop_text_ends_a_response_that_an_update_cut_within_it(made, fakes, before, behind, expected):
    """The server sees only what it is asked for: the rest of the stop text is none for it."""
    sampler, sampling = made(1, decode=letters), dataclasses.replace(SAMPLING, n=1, stop=("</a>",))
    cut, asked_for = threading.Event(), []

    def reply(body):
        done, most = len(body["token_ids"]) - 3, body["sampling_params"]["max_tokens"]
        if not done:
            assert cut.wait(60)
            tokens, finish, version = before, "abort", "7"
        else:
            tokens, finish, version = (before + behind)[done : done + most], "length", "8"
            asked_for.append(most)
            if "</a>" in tokens:
                tokens, finish = tokens[: tokens.index("</a>") + 4], "stop"
            elif done + len(tokens) == len(before + behind):
                finish = "stop"  # by an end token
        ids = [ord(letter) for letter in tokens]
        return {"choices": [choice(ids, [-1.0] * len(ids), finish=finish, version=version)]}

    fakes[0].answers[GENERATE] = (200, reply)
    future = sampler.start(PROMPTS[:1], sampling)
    until(lambda: len(asked(fakes[0], [GENERATE])) == 1)
    fakes[0].answers["/pause?mode=abort"] = (200, lambda _: cut.set() or time.sleep(0.1) or {})
    sampler.load(TENSORS.items(), version=8, mode="abort")
    [t] = future.result()
    assert letters(t.tokens[3:]) == expected and t.finish == "stop" and len(t.logprob) == len(t.tokens)
    assert "<" not in before or asked_for[0] == 4, "no more than may end the stop text"


def one_at_a_time(fake, seconds):
    """The fake's own answer, each after so long, to one request after the other, as they come."""
    (_, good), turn, queue = fake.answers[GENERATE], threading.Condition(), []

    def reply(body):
        with turn:
            queue.append(body)
            turn.wait_for(lambda: queue[0] is body)
        time.sleep(seconds)
        with turn:
            queue.pop(0)
            turn.notify_all()
        return good(body)

    fake.answers[GENERATE] = (200, reply)


def test_a_server_that_works_its_queue_off_is_not_late(made, fakes):
    """Twelve requests of 0.3 s, one at a time: the last waits longer than any may take."""
    sampler = made(1, timeout_s=3.0)
    one_at_a_time(fakes[0], 0.3)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    assert sampler.metrics() == {"rollout/servers": 1.0, "rollout/restarts": 0.0, "rollout/asked_again": 0.0}


def test_a_request_that_a_server_forgot_is_asked_again_while_others_are_answered(made, fakes):
    sampler = made(1, timeout_s=2.4)
    one_at_a_time(fakes[0], 0.4)
    (_, good), first = fakes[0].answers[GENERATE], []
    fakes[0].answers[GENERATE] = (200, lambda b: good(b) if first else first.append(1) or fakes[0].hang.wait())
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    assert sampler.metrics() == {"rollout/servers": 1.0, "rollout/restarts": 0.0, "rollout/asked_again": 1.0}


def test_a_request_whose_turn_has_passed_is_asked_again_though_others_keep_coming(made, fakes):
    sampler = made(1, timeout_s=0.5, connections=6)
    one_at_a_time(fakes[0], 0.2)
    (_, good), first = fakes[0].answers[GENERATE], []
    fakes[0].answers[GENERATE] = (200, lambda b: good(b) if first else first.append(1) or fakes[0].hang.wait())
    future = sampler.start(PROMPTS * 2, SAMPLING)  # for almost five seconds
    until(lambda: sampler.repeated_requests >= 1)
    assert not future.done() and len(asked(fakes[0], [GENERATE])) < 24
    future.result()
    assert sampler.restarts == 0


def test_a_server_that_answers_nothing_is_late_with_all_at_once(made, fakes):
    sampler = made(1, timeout_s=2.0)
    (_, good), held, times = fakes[0].answers[GENERATE], threading.Event(), []

    def reply(body):
        times.append(time.monotonic())
        return good(body) if held.is_set() else fakes[0].hang.wait()

    fakes[0].answers[GENERATE] = (200, reply)
    fakes[0].answers["jppo_check"] = (200, lambda _: held.set() or {"results": [{"ok": True, "error": None}]})
    assert whole(sampler.start(PROMPTS, SAMPLING).result(60))
    assert times[23] - times[12] < times[12] - times[0], "all are late when the first is"
    assert asked(fakes[0], [GENERATE, "jppo_check"]) == [GENERATE] * 24 + ["jppo_check"] + [GENERATE] * 12
    assert sampler.metrics()["rollout/restarts"] == 1.0


def test_one_response_that_is_slow_alone_is_waited_for_while_the_server_samples_it(made, fakes):
    sampler = made(1, timeout_s=1.2)
    (_, good), begun = fakes[0].answers[GENERATE], []
    fakes[0].answers[GENERATE] = (200, lambda body: begun.append(1) or time.sleep(4) or good(body))
    fakes[0].answers["jppo_working"] = (200, {"results": [{"requests": 1, "most": 8}]})
    [one] = [dataclasses.replace(SAMPLING, n=1)]
    [t] = sampler.generate(PROMPTS[:1], one, version=7)
    assert t.uid == "p0" and len(begun) == 1 and "jppo_working" in fakes[0].asked
    assert sampler.metrics() == {"rollout/servers": 1.0, "rollout/restarts": 0.0, "rollout/asked_again": 0.0}


def test_workers_have_the_health_timeout_to_say_that_they_sample_a_late_response(made, fakes):
    sampler, said = made(1, health_s=60.0), threading.Event()
    sampler.members[0].endpoint.timeout_s = 0.05
    (_, good), begun = fakes[0].answers[GENERATE], []
    fakes[0].answers[GENERATE] = (200, lambda body: begun.append(1) or (said.wait(60) and good(body)))

    def between_steps(_):
        time.sleep(0.5)
        said.set()
        return {"results": [{"requests": 1, "most": 8}]}

    fakes[0].answers["jppo_working"] = (200, between_steps)
    assert len(sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1), version=7)) == 1 and len(begun) == 1
    assert sampler.metrics() == {"rollout/servers": 1.0, "rollout/restarts": 0.0, "rollout/asked_again": 0.0}


def test_a_response_that_others_overtake_is_waited_for_while_the_server_samples_as_many_as_are_here(made, fakes):
    sampler = made(1, timeout_s=1.0, connections=3)
    (_, good), begun, lock = fakes[0].answers[GENERATE], [], threading.Lock()

    def reply(body):
        with lock:
            begun.append(1)
            first = len(begun) == 1
        time.sleep(4.0 if first else 0.2)
        return good(body)

    fakes[0].answers[GENERATE] = (200, reply)
    fakes[0].answers["jppo_working"] = (200, {"results": [{"requests": 3, "most": 8}]})
    assert whole(sampler.generate(PROMPTS * 2, SAMPLING, version=7), PROMPTS * 2) and len(begun) == 24
    assert sampler.metrics()["rollout/asked_again"] == 0


def test_a_request_that_the_server_does_not_sample_is_asked_again(made, fakes):
    sampler = made(1, timeout_s=0.4)
    (_, good), begun = fakes[0].answers[GENERATE], []
    fakes[0].answers[GENERATE] = (200, lambda b: good(b) if begun else begun.append(1) or fakes[0].hang.wait())
    fakes[0].answers["jppo_working"] = (200, {"results": [{"requests": 0, "most": 8}]})
    assert len(sampler.generate(PROMPTS[:1], SAMPLING, version=7)) == 2
    assert sampler.metrics()["rollout/asked_again"] >= 1.0


PAUSED = {"error": {"message": "paused", "type": "ServiceUnavailableError", "param": None, "code": 503}}  # vLLM 0.33's


def status(fake, codes, headers=(), said=None):
    """The fake refuses so many requests with these codes, then answers; returns the times of all."""
    (_, good), left, times = fake.answers[GENERATE], list(codes), []

    def reply(body):
        times.append(time.monotonic())
        return (left.pop(0), dict(headers), said or {"error": "refused"}) if left else good(body)

    fake.answers[GENERATE] = (200, reply)
    return times


@pytest.mark.parametrize("code", [404, 429])
def test_a_refused_request_is_asked_again_when_the_server_says(made, fakes, code):
    sampler = made(1)
    times = status(fakes[0], [code], {"Retry-After": "1"})
    [t] = sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1), version=7)
    assert t.uid == "p0" and len(times) == 2 and times[1] - times[0] >= 0.99
    assert sampler.metrics() == {"rollout/servers": 1.0, "rollout/restarts": 0.0, "rollout/asked_again": 1.0}


@pytest.mark.parametrize("code, said", [(429, None), (503, PAUSED)])
def test_a_limited_rate_is_no_fault_of_the_server_and_ends_the_run_at_the_last_try(
    made, fakes, monkeypatch, code, said
):
    monkeypatch.setattr(endpoint, "AGAIN_S", 0.02)
    sampler = made(1)
    times = status(fakes[0], [code] * 4, said=said)
    assert len(sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1), version=7)) == 1
    pauses = np.diff(times)
    assert (pauses > [0.02, 0.04, 0.08, 0.16]).all() and sampler.restarts == 0
    status(fakes[0], [code] * 100, said=said)
    with pytest.raises(RolloutError, match=rf"a request failed 5 times; the last time: .* with {code}"):
        sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1), version=7)
    assert sampler.restarts == 0


def test_a_publish_that_is_limited_is_tried_again(made, fakes, monkeypatch):
    monkeypatch.setattr(endpoint, "AGAIN_S", 0.02)
    sampler, (_, load), refused = made(1), fakes[0].answers["jppo_load"], []
    fakes[0].answers["jppo_load"] = (200, lambda _: load if refused else refused.append(1) or (429, {}))
    sampler.load(TENSORS.items(), version=8)
    assert fakes[0].version == "8" and sampler.restarts == 0


def test_a_token_that_is_refused_in_mid_run_names_the_remedy(made, fakes):
    sampler = made(1)
    status(fakes[0], [401] * 10)
    with pytest.raises(
        RolloutError, match=r"with 401.*; set JPPO_SERVER_TOKEN to the value that the server was started"
    ):
        sampler.generate(PROMPTS[:1], SAMPLING, version=7)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_attached_servers_are_resumed_after_a_refused_load(made, fakes, mode):
    sampler = made()
    fakes[1].answers["jppo_load"] = (200, {"results": [{"ok": False, "error": "no room"}]})
    with pytest.raises(RolloutError, match="no room"):
        sampler.load(TENSORS.items(), version=8, mode=mode)
    sampler.close()
    for fake in fakes:
        order = asked(fake, [f"/pause?mode={mode}", "jppo_load", "/resume"])
        assert order == [f"/pause?mode={mode}", "jppo_load", "/resume"]


def test_attached_servers_are_resumed_after_a_stop_in_a_publish_once_they_have_loaded(made, fakes):
    sampler, loading = made(), threading.Event()
    _, load = fakes[1].answers["jppo_load"]
    fakes[1].answers["jppo_load"] = (200, lambda _: loading.set() or time.sleep(1.0) or load)

    def publish():
        with pytest.raises(Stop):
            sampler.load(TENSORS.items(), version=8)

    thread = threading.Thread(target=publish)
    thread.start()
    assert loading.wait(60)
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
    assert raised == 1
    thread.join(60)
    sampler.close()
    for fake in fakes:
        assert asked(fake, SWAP)[-1] == "/resume" and asked(fake, SWAP).count("/resume") == 1


class Stop(BaseException):
    """As a signal raises it in the thread that publishes."""


def test_a_server_that_is_another_process_by_the_time_of_the_load_does_not_end_the_run(made, fakes):
    """It was not asked to check the new weights, and says so; it gets them when it is mended."""
    sampler = made()
    member, checked = sampler.members[1], []

    def check(_):
        checked.append(1)
        return {"results": [{"ok": True, "error": None}]}

    def load(_):
        return {"results": [{"ok": bool(checked), "error": None if checked else "version 8 was not checked"}]}

    def pause(_):
        fakes[1].answers["/health"] = (500, {})
        until(lambda: not member.up)
        fakes[1].answers["/health"] = (200, None)
        checked.clear()
        return {}

    fakes[1].answers |= {"/pause?mode=wait": (200, pause), "jppo_check": (200, check), "jppo_load": (200, load)}
    sampler.load(TENSORS.items(), version=8)
    until(lambda: member.up and fakes[1].version == "8")
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=8))


def test_a_server_that_breaks_as_soon_as_it_is_back_is_repaired_again(made, fakes, monkeypatch):
    """The publish that waited for it reports the fault before its repair has ended."""
    sampler = made()
    repairs, member, revived = sampler._repairs, sampler.members[1], []
    real = repairs._revive

    def revive(of):
        real(of)
        revived.append(of)
        if len(revived) == 1:
            of.state = router.State.BROKEN

    monkeypatch.setattr(repairs, "_revive", revive)
    fakes[1].answers["/health"] = (503, None)
    until(lambda: not member.up)
    fakes[1].answers["/health"] = (200, None)
    until(lambda: len(revived) == 2 and member.up)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))


def test_a_server_whose_answer_to_resume_is_lost_while_it_is_looked_at_comes_back(made, fakes):
    sampler = made()
    member, let_go = sampler.members[1], threading.Event()

    def late(_):
        assert let_go.wait(60)
        raise ConnectionAbortedError

    def pause(_):
        let_go.set()
        until(lambda: member.in_repair)  # which waits for the end of the update
        return {}

    def lost(_):
        fakes[1].answers["/resume"] = (200, {})
        raise ConnectionAbortedError

    _, good = fakes[1].answers[GENERATE]
    fakes[1].answers |= {GENERATE: (200, late), "/pause?mode=abort": (200, pause), "/resume": (200, lost)}
    future = sampler.start([PROMPTS[1], PROMPTS[1]], dataclasses.replace(SAMPLING, n=1))
    until(lambda: asked(fakes[1], [GENERATE]))
    sampler.load(TENSORS.items(), version=8, mode="abort")
    fakes[1].answers[GENERATE] = (200, good)
    future.result()
    until(lambda: member.up and not member.in_repair)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=8))


def test_spans_of_two_versions_are_told_apart(made, fakes):
    sampler = made(1)
    spans = [{"start": 0, "end": 1, "version": "7"}, {"start": 1, "end": 3, "version": "8"}]
    answer = choice([5, 6, 2], [-1.0, -1.0, -1.0]) | {"weight_versions": spans}
    loaded = threading.Event()
    fakes[0].answers[GENERATE] = (200, lambda _: loaded.wait() and {"choices": [answer]})
    future = sampler.start(PROMPTS[:1], SAMPLING)
    until(lambda: len(asked(fakes[0], [GENERATE])) == 2)
    fakes[0].answers["/pause?mode=keep"] = (200, {})
    sampler.load(TENSORS.items(), version=8, mode="keep")
    loaded.set()
    assert [t.version.tolist()[3:] for t in future.result()] == [[7, 8, 8]] * 2


def write_adapter(path):
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


def test_adapters_are_delivered_under_their_own_names_and_again_to_one_that_broke(made, fakes):
    sampler = made(lora_rank=2)
    sampler.load_adapter(write_adapter, version=8)
    sampler.load_adapter(write_adapter, version=9)
    routes = [*LORA, "/update_weight_version", "/pause?mode=wait", "/resume"]
    once = [LORA[0], "/pause?mode=wait", "/update_weight_version"]
    first, second = [b["lora_name"] for b in fakes[0].bodies if b and "lora_path" in b]
    assert first != second
    for fake in fakes:
        assert asked(fake, routes) == [*once, "/resume", *once, "/resume"]
        fake.answers["/v1/models"] = (200, {"data": [{"id": "policy"}, {"id": second}]})
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=9))
    assert {b["model"] for fake in fakes for b in fake.bodies if b and "token_ids" in b} == {second}
    sampler.load_adapter(write_adapter, version=10)
    assert [b for b in fakes[0].bodies if b and b.get("lora_name") == second][-1] == {"lora_name": second}
    fakes[1].asked.clear()
    serve(fakes[1])
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=10))
    until(lambda: fakes[1].version == "10")
    assert asked(fakes[1], ["jppo_load", LORA[0]]) == ["jppo_load", LORA[0]]
    # a whole policy replaces both
    sampler.load(TENSORS.items(), version=11)
    sampler.generate(PROMPTS[:1], SAMPLING, version=11)
    assert [b["model"] for b in fakes[0].bodies if b and "token_ids" in b][-1] == "policy"


def test_adapters_that_a_server_still_has_are_replaced(made, fakes):
    """An attached server that was only slow is no new process; vLLM refuses a name that it has."""
    sampler = made(1, lora_rank=2)
    names = []

    def load(body):
        assert body["lora_name"] not in names
        names.append(body["lora_name"])
        return {}

    fakes[0].answers |= {
        "/v1/models": (200, lambda _: {"data": [{"id": name} for name in ["policy", *names]]}),
        LORA[0]: (200, load),
        LORA[1]: (200, lambda body: names.remove(body["lora_name"])),
    }
    sampler.load_adapter(write_adapter, version=8)
    fakes[0].answers["/health"] = (503, None)
    until(lambda: not sampler.members[0].up)
    fakes[0].answers["/health"] = (200, None)
    until(lambda: sampler.members[0].up)
    assert len(names) == 1 and whole(sampler.generate(PROMPTS, SAMPLING, version=8))


def test_adapters_that_a_server_refuses_are_not_asked_for(made, fakes):
    sampler = made(lora_rank=2)
    fakes[1].answers[LORA[0]] = (400, {"error": "rank 99 is too large"})
    with pytest.raises(RolloutError, match="rank 99"):
        sampler.load_adapter(write_adapter, version=8)
    sampler.generate(PROMPTS, SAMPLING, version=7)
    assert {b["model"] for fake in fakes for b in fake.bodies if b and "token_ids" in b} == {"policy"}


def test_a_call_that_is_interrupted_leaves_nothing_under_way(made, fakes):
    sampler = made()
    for fake in fakes:
        del fake.answers[GENERATE]
    future = sampler.start(PROMPTS, SAMPLING)
    until(lambda: sum(member.in_flight for member in sampler.members) == 12)
    assert future.cancel()
    until(lambda: sum(member.in_flight for member in sampler.members) == 0)


def test_a_closed_fleet_leaves_no_thread(made):
    sampler = made()
    sampler.close()
    sampler.close()
    assert not [t for t in threading.enumerate() if t.name == "jppo-fleet"]
    assert not asyncio.all_tasks(asyncio.new_event_loop())
