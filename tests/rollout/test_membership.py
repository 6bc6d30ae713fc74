"""Servers that join and leave a run, against fakes; test_real_vllm.py has real ones."""

import io
import socket
import threading
from types import SimpleNamespace

import pytest

from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import Repeatable
from jppo.rollout.servers import fleet, repair
from jppo.rollout.servers.make import attached_urls
from jppo.rollout.servers.repair import address_lookup
from jppo.rollout.vllm.client import GENERATE, start_vllm
from jppo.settings import texts
from tests.plugins.carriers import test_buckets
from tests.rollout.conftest import INFO, FakeServer
from tests.rollout.test_fleet import PROMPTS, REVIVED, SAMPLING, SWAP, TENSORS, asked, serve, until, whole


@pytest.fixture
def servers():
    made = [serve(FakeServer()) for _ in range(4)]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def run(tmp_path, settings, monkeypatch):
    """A maker of samplers whose servers are looked up in a file; returns the sampler and the file's writer."""
    for module, name in ((repair, "POLL_S"), (repair, "PROBE_S"), (repair, "LOOKUP_S"), (fleet, "LOOKUP_S")):
        monkeypatch.setattr(module, name, 0.05)
    file, engines = tmp_path / "servers.txt", []

    def write(servers):
        fresh = file.with_suffix(".new")
        fresh.write_text("# servers\n" + "".join(f"{server.url}/\n" for server in servers))
        fresh.rename(file)

    def make(servers, start_s=60.0, health_s=60.0, tensors=TENSORS, **changes):
        write(servers)
        engines.append(
            start_vllm(
                "model", "run",
                settings=settings(health_timeout_s=health_s, max_restarts=0, start_timeout_s=start_s, **changes),
                urls=attached_urls(f"file:{file}", ALONE),
            )
        )  # fmt: skip
        sampler = engines[-1].ready(eos_token_ids=[2], decode=str)
        sampler.load(tensors.items(), version=7)
        return sampler, write

    make.file = file
    yield make
    for started in engines:
        started.close()


@pytest.fixture
def said(monkeypatch):
    """What the events on stderr were so far. `capfd` loses what a thread writes while it is read."""
    stderr = io.StringIO()
    monkeypatch.setattr(repair, "sys", SimpleNamespace(stderr=stderr))
    return stderr.getvalue


def urls(sampler):
    return [member.endpoint.url for member in sampler.members if member.up]


def test_a_server_that_joins_gets_the_weights_before_it_is_asked(run, servers, said):
    sampler, write = run(servers[:1])
    write(servers[:3])
    until(lambda: len(urls(sampler)) == 3)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    for server in servers[1:3]:
        assert asked(server, [*REVIVED, GENERATE])[:5] == REVIVED and GENERATE in server.asked
    assert not servers[3].asked and sampler.metrics()["rollout/servers"] == 3.0
    sampler.load(TENSORS.items(), version=8)
    assert [server.version for server in servers] == ["8", "8", "8", "default"]
    assert f"the server at {servers[1].url} joins after" in said()


def test_requests_at_a_server_that_leaves_are_asked_elsewhere(run, servers):
    sampler, write = run(servers[:2])
    held, (_, good) = threading.Event(), servers[1].answers[GENERATE]
    servers[1].answers[GENERATE] = (200, lambda body: held.set() or servers[1].hang.wait() or good(body))
    pending = sampler.start(PROMPTS, SAMPLING)
    assert held.wait(60)
    write(servers[:1])
    assert whole(pending.result(60))
    assert urls(sampler) == [servers[0].url] and sampler.metrics()["rollout/asked_again"] >= 1.0
    before = asked(servers[1], SWAP)  # a check of its health may still be under way
    sampler.load(TENSORS.items(), version=8)
    assert asked(servers[1], SWAP) == before and servers[1].version == "7"


def test_a_broken_server_leaves_and_joins_when_it_answers_again(run, servers):
    sampler, _ = run(servers[:2])
    servers[1].answers["/health"] = (500, {})
    servers[1].answers["/is_paused"] = (500, {})
    until(lambda: urls(sampler) == [servers[0].url])
    serve(servers[1])  # a new process: it has forgotten the weights
    servers[1].answers |= {"/health": (200, None), "/is_paused": (200, {"is_paused": False})}
    until(lambda: len(urls(sampler)) == 2)
    assert servers[1].version == "7" and whole(sampler.generate(PROMPTS, SAMPLING, version=7))


@pytest.mark.parametrize("route", ["jppo_load", "/resume"])
def test_a_server_that_breaks_while_a_publish_pauses_it_joins_again(run, servers, route):
    sampler, _ = run(servers[:2])
    good, paused = servers[1].answers[route], []

    def once(body):
        servers[1].answers |= {route: good, "/is_paused": (200, lambda _: {"is_paused": "/resume" not in paused})}
        servers[1].answers["/resume"] = (200, lambda _: paused.append("/resume") or {})
        raise ConnectionAbortedError

    servers[1].answers[route] = (200, once)
    sampler.load(TENSORS.items(), version=8)
    until(lambda: servers[1].asked.count("jppo_info") == 2 and len(urls(sampler)) == 2)
    assert servers[1].version == "8" and paused and whole(sampler.generate(PROMPTS, SAMPLING, version=8))


def test_all_servers_are_replaced_during_a_generation(run, servers):
    sampler, write = run(servers[:2])
    for server in servers[:2]:
        server.answers[GENERATE] = (200, lambda _, s=server: s.hang.wait())
    pending = sampler.start(PROMPTS, SAMPLING)
    write(servers[2:])
    assert whole(pending.result(60))
    until(lambda: sorted(urls(sampler)) == sorted(server.url for server in servers[2:]))


def test_a_file_that_cannot_be_read_changes_nothing(run, servers, said):
    sampler, write = run(servers[:1])
    for times, bad in enumerate(("http://127.0.0.1\nftp://elsewhere\n", "http://me:secret@127.0.0.1:1\n"), 1):
        run.file.write_text(bad)
        until(lambda times=times: said().count("is no address") == times)
    assert "secret" not in said()
    run.file.unlink()
    until(lambda: "No such file" in said())
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    write(servers[:2])
    until(lambda: len(urls(sampler)) == 2)


def test_a_file_that_is_read_while_it_is_written_sends_nobody_away(run, servers, said):
    sampler, _ = run(servers[:2])
    (_, good), held = servers[1].answers[GENERATE], threading.Event()
    servers[1].answers[GENERATE] = (200, lambda body: held.wait() and good(body))
    pending = sampler.start(PROMPTS, SAMPLING)
    whole_file = run.file.read_text()
    run.file.write_text("")
    until(lambda: "names no server" in said())
    before = sampler.members
    run.file.write_text(whole_file)
    held.set()
    assert whole(pending.result(60)) and sampler.members == before
    assert sampler.metrics()["rollout/asked_again"] == 0


def test_a_publish_does_not_wait_for_a_server_that_loads_to_join(run, servers):
    sampler, write = run(servers[:1])
    loading, go, load = threading.Event(), threading.Event(), servers[1].answers["jppo_load"]
    servers[1].answers["jppo_load"] = (200, lambda _: loading.set() or (go.wait() and load[1]))
    write(servers[:2])
    assert loading.wait(60)
    sampler.load(TENSORS.items(), version=8)
    assert not go.is_set() and servers[0].version == "8" and urls(sampler) == [servers[0].url]
    go.set()
    until(lambda: len(urls(sampler)) == 2)
    assert servers[1].version == "8", "the weights that came meanwhile"
    assert asked(servers[1], [*REVIVED, GENERATE]) == REVIVED * 2
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=8))


def test_a_server_that_is_unsuitable_does_not_join_and_is_named_once(run, servers, said):
    sampler, write = run(servers[:1])
    servers[1].answers["/is_paused"] = (200, {"is_paused": True})
    write(servers[:2])
    until(lambda: servers[1].asked.count("/is_paused") > 3)
    assert urls(sampler) == [servers[0].url]
    assert said().count(f"the server at {servers[1].url} is paused") == 1
    servers[1].answers["/is_paused"] = (200, {"is_paused": False})
    until(lambda: len(urls(sampler)) == 2)


def test_an_address_that_no_server_can_have_is_told_and_the_others_continue(run, servers, said):
    sampler, _ = run(servers[:1])
    strange = ("http://[::1", "http://h:x", "http://127.0.0.1:80000", "http://a..b:80", "http://xn--:80")
    run.file.write_text("\n".join([servers[0].url, *strange]))
    until(lambda: said().count("it joins when it answers") == 5)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))


def test_a_second_address_of_a_server_does_not_join(run, servers, said):
    servers[0].answers["jppo_info"] = (200, {"results": [INFO | {"process": "a"}]})
    sampler, write = run(servers[:1])
    other = SimpleNamespace(url=servers[0].url.replace("127.0.0.1", "localhost"))
    write([servers[0], other, servers[1]])
    until(lambda: len(urls(sampler)) == 2 and "are addresses of one server" in said())
    assert other.url not in urls(sampler)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    sampler.load(TENSORS.items(), version=8)
    assert servers[0].asked.count("jppo_load") == 2


def test_a_server_that_takes_shorter_requests_does_not_join(run, servers, said):
    sampler, write = run(servers[:1])
    servers[1].answers["jppo_info"] = (200, {"results": [INFO | {"max_model_len": 8}]})
    write(servers[:2])
    until(lambda: "has max_model_len=8, and the others 64 or more; it joins" in said())
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    servers[1].answers["jppo_info"] = (200, {"results": [INFO]})
    until(lambda: len(urls(sampler)) == 2)


def test_a_server_that_hangs_does_not_delay_the_others(run, servers, said):
    sampler, write = run(servers[:1], health_s=0.5)
    fine = servers[1].answers.pop("/is_paused")  # it hangs from now on
    write(servers[:2])
    until(lambda: "/is_paused" in servers[1].asked)
    write(servers)
    until(lambda: len(urls(sampler)) == 3, 2.0)
    write(servers[1:])
    until(lambda: servers[0].url not in urls(sampler), 2.0)
    until(lambda: f"the server at {servers[1].url} did not answer /is_paused within 0.5 s" in said())
    servers[1].answers["/is_paused"] = fine
    until(lambda: len(urls(sampler)) == 3)
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))


def test_a_server_that_joins_during_the_update_is_asked_after_the_next_publish(run, servers):
    for server in servers[:2]:
        test_buckets.stages(server)
        server.answers["jppo_info"] = (200, {"results": [INFO | {"buckets": True}]})
    tensors = test_buckets.TENSORS
    sampler, write = run(servers[:1], tensors=tensors, publish_via="tcp")
    source = [lambda: iter(tensors.items())]
    sampler.load(Repeatable(lambda: source[0]()), version=8)
    source[0] = test_buckets.overwritten
    write(servers[:2])
    until(lambda: len(sampler.members) == 2)
    assert urls(sampler) == [servers[0].url] and whole(sampler.generate(PROMPTS, SAMPLING, version=8))
    assert GENERATE not in servers[1].asked
    sampler.load(tensors.items(), version=9)
    assert len(urls(sampler)) == 2 and servers[1].version == "9"


def test_a_run_without_servers_waits_and_then_ends(run, servers):
    sampler, write = run(servers[:1], start_s=1.0)
    servers[0].answers["/health"] = (500, {})
    until(lambda: not urls(sampler))
    write([])
    with pytest.raises(RolloutError, match=r"works since rollout.start_timeout_s=1; rollout.urls cannot be looked up"):
        sampler.generate(PROMPTS, SAMPLING, version=7)


def test_a_start_waits_for_the_first_server(run, servers, settings):
    def broken(_):
        raise ConnectionAbortedError

    servers[0].answers |= {"/is_paused": (500, {}), "/health": (200, broken)}
    threading.Timer(0.2, lambda: servers[0].answers.update({"/is_paused": (200, {"is_paused": False})})).start()
    threading.Timer(0.4, lambda: servers[0].answers.update({"/health": (200, None)})).start()
    sampler, _ = run(servers[:1])
    assert whole(sampler.generate(PROMPTS, SAMPLING, version=7))
    with pytest.raises(UserError, match=r"no server of rollout.urls answered within .*=0.1; .* names no server"):
        run([], start_s=0.1)


def test_a_name_is_looked_up_in_dns(monkeypatch):
    answers = [(socket.AF_INET, 1, 6, "", ("10.0.0.2", 8000)), (socket.AF_INET6, 1, 6, "", ("fd00::1", 8000, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, **_: answers if name == "vllm.svc" else 1 / 0)
    find = address_lookup(texts.lookup_place("dns://vllm.svc:8000"))
    assert find() == ["http://10.0.0.2:8000", "http://[fd00::1]:8000"]


def test_where_the_addresses_are():
    assert texts.lookup_place("http://a:1, http://b:2") is None and texts.lookup_place("") is None
    assert str(texts.lookup_place("file:/mnt/servers.txt")) == "/mnt/servers.txt"
    for bad in (
        "dns://name",
        "dns://name:8000/path",
        "dns://:8000",
        "dns://name:x",
        "file:",
        "file://host/x",
        "dns:a:1",
    ):
        with pytest.raises(UserError, match=r"must be file:PATH.* or dns://NAME:PORT"):
            texts.lookup_place(bad)
    with pytest.raises(UserError, match=r"looked up by one host, and this run has 2"):
        attached_urls("dns://name:8000", Hosts(0, 2))
