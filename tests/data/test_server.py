"""Answers from a fake OpenAI server, over real HTTP on loopback, that fails in every way servers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from draftsmith.config import RegenerateOptions
from draftsmith.data import http as module
from draftsmith.data.forms import choose_form, read_row
from draftsmith.data.http import Secret, read_reply
from draftsmith.data.prompts import content_id
from draftsmith.data.server import regenerate_served
from draftsmith.errors import DataError, EnvironmentFault, UserError

CANARY = "sk-canary-7f3a"


def completion(content="fine", finish="stop", **message):
    more = message.pop("more", {})
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish, **more}
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


class FakeServer:
    """Answers on a thread of its own. `reply` gets each request's body and returns a response or a JSON value."""

    def __init__(self, reply=None):
        self.reply = reply or (lambda body: completion(echo(body)))
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.in_flight = self.most_in_flight = 0

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.ready = threading.Event()
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def _serve(self):
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self.ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        for task in (left := asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    async def _models(self, _):
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            given = self.reply(body)
            if asyncio.iscoroutine(given):
                given = await given
        finally:
            self.in_flight -= 1
        return given if isinstance(given, web.StreamResponse) else web.json_response(given)


def echo(body):
    return f"re: {body['messages'][-1]['content']}"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.01)


@pytest.fixture
def options(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}", "tags": ["t"]}) + "\n" for i in range(20)))
    return RegenerateOptions(prompts=str(tmp_path / "p.jsonl"), output=str(tmp_path / "out.jsonl"), concurrency=4)


def run(options, server, lines=None, **changes):
    urls = (server.url,) if isinstance(server, FakeServer) else tuple(one.url for one in server)
    counts = regenerate_served(replace(options, servers=urls, **changes), (lines if lines is not None else []).append)
    counts.pop("seconds", None)
    return counts


def rows_of(options):
    with open(options.output, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def failures(options):
    return [json.loads(line) for line in Path(options.output + ".failed.jsonl").read_text().splitlines()]


def first_times(count, bad):
    """Every question is answered only at the `count`th repetition."""
    asked: dict[str, int] = {}

    def reply(body):
        question = body["messages"][-1]["content"]
        asked[question] = asked.get(question, 0) + 1
        return bad(body) if asked[question] <= count else completion(echo(body))

    return reply


def test_rows_and_counts(options):
    lines = []
    with FakeServer() as server:
        counts = run(options, server, lines)
    assert counts == {
        "answered": 20, "skipped": 0, "duplicates": 0, "requests": 20, "retries": 0, "stop": 20, "tokens": 60
    }  # fmt: skip
    asked = [{"role": "user", "content": "q7"}]
    assert rows_of(options)[content_id(asked)] == {
        "id": content_id(asked),
        "messages": [*asked, {"role": "assistant", "content": "re: q7"}],
        "tags": ["t"],
        "finish": "stop",
        "asked": content_id(asked),
    }
    assert server.most_in_flight <= 4 and lines[0].endswith("for 20 answers of tiny")
    assert lines[-1].startswith("20/20 answers, 60 tokens, ")
    assert all("Authorization" not in headers for headers in server.headers)
    for row in rows_of(options).values():
        assert not read_row(row, 1, choose_form("auto", (), row)).ignored


def test_concurrency_is_used_and_bounded(options):
    async def slow(body):
        await asyncio.sleep(0.05)
        return completion()

    with FakeServer(slow) as server:
        run(options, server, concurrency=7)
    assert server.most_in_flight == 7


def cut_short(body):
    async def send():
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        response.content_type = "application/json"
        return response

    return send()


FAULTS = {
    "429": lambda body: web.Response(status=429),
    "500": lambda body: web.Response(status=500, text="oh no"),
    "503 with HTML": lambda body: web.Response(status=503, text="<html>", content_type="text/html"),
    "HTML with 200": lambda body: web.Response(text="<html>hello</html>", content_type="text/html"),
    "half of a JSON": lambda body: web.Response(text='{"choices": [', content_type="application/json"),
    "deep JSON": lambda body: web.Response(text="[" * 100_000, content_type="application/json"),
    "no choices": lambda body: {"choices": []},
    "no finish": lambda body: {"choices": [{"message": {"content": "x"}}]},
    "a list as content": lambda body: completion([1]),
    "ids that are text": lambda body: completion(more={"token_ids": "12"}),
    "an empty answer": lambda body: completion(""),
    "a body cut short": cut_short,
    "a hang": lambda body: asyncio.sleep(30),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_pass_is_tried_again(options, fault):
    with FakeServer(first_times(1, FAULTS[fault])) as server:
        counts = run(options, server, limit=4, timeout=0.5 if fault in ("a hang", "a body cut short") else 10.0)
    assert (counts["answered"], counts["retries"], counts["requests"]) == (4, 4, 8)
    assert "failed" not in counts and len(rows_of(options)) == 4


def test_after_too_many_tries_the_row_fails_and_the_run_goes_on(options):
    def reply(body):
        return web.Response(status=500) if body["messages"][-1]["content"] == "q3" else completion()

    lines = []
    with FakeServer(reply) as server:
        counts = run(options, server, lines, retries=2)
        assert (counts["answered"], counts["failed"], counts["retries"]) == (19, 1, 2)
        (failed,) = failures(options)
        assert failed["id"] == content_id([{"role": "user", "content": "q3"}])
        assert failed["reason"].endswith("HTTP 500 (3 tries)")
        assert any("1 rows failed" in line for line in lines) and any("tries them again" in line for line in lines)
        server.reply = lambda body: completion()
        counts = run(options, server)
        assert (counts["answered"], counts["skipped"], counts["requests"]) == (1, 19, 1)
    assert not os.path.exists(options.output + ".failed.jsonl") and len(rows_of(options)) == 20


def test_what_is_the_rows_own_fault_is_not_tried_again(options):
    error = {"message": "too long\x1b[31m" + "x" * 500, "code": 400}

    def reply(body):
        return web.json_response(error, status=400) if body["messages"][-1]["content"] == "q3" else completion()

    with FakeServer(reply) as server:
        counts = run(options, server)
    assert (counts["answered"], counts["failed"], counts["retries"]) == (19, 1, 0)
    reason = failures(options)[0]["reason"]
    assert "HTTP 400 (too long [31mxxx" in reason and len(reason) < 250


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "asks for another key"), (403, "forbids"), (404, "has no such address or model")]
)
def test_what_every_row_would_meet_stops_the_run(options, status, reason):
    with FakeServer(lambda body: web.Response(status=status)) as server:
        with pytest.raises(EnvironmentFault, match=f"HTTP {status}: the server {reason}"):
            run(options, server)
    assert len(server.bodies) <= 4 and not os.path.exists(options.output)


def test_a_run_without_hope_stops(options, monkeypatch):
    monkeypatch.setattr("draftsmith.data.server.HOPELESS", 5)
    with FakeServer(FAULTS["500"]) as server:
        with pytest.raises(EnvironmentFault, match="the first 5 rows failed, the last: .*HTTP 500"):
            run(options, server, retries=0)
    with pytest.raises(EnvironmentFault, match="does not say what it serves"):
        run(options, server)  # it is gone


def test_retry_after_is_obeyed(options):
    times = []

    def busy(body):
        times.append(time.monotonic())
        return web.Response(status=429, headers={"Retry-After": "1"})

    with FakeServer(first_times(1, busy)) as server:
        run(options, server, limit=1)
    assert time.monotonic() - times[0] >= 1.0
    assert module._retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert module._retry_after("soon") == module._retry_after("") == module._retry_after("-5") == 0.0
    assert module._retry_after("9999999") == module.LONGEST_REQUESTED


@pytest.mark.parametrize("to", ["http://elsewhere.example/v1", "/v1/other"])
def test_redirects_are_refused(options, to):
    with FakeServer() as other:
        target = to if to.startswith("/") else other.url + "/chat/completions"
        headers = {"Location": target}
        with FakeServer(lambda body: web.Response(status=307, headers=headers)) as server:
            with pytest.raises(UserError, match="redirects to .*, which is not followed"):
                run(options, server)
    assert other.bodies == []


def test_a_response_without_end_is_refused(options, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    big = completion("x" * (3 << 20))

    def reply(body):
        return big if body["messages"][-1]["content"] == "q3" else completion()

    with FakeServer(reply) as server:
        counts = run(options, server)
    assert (counts["answered"], counts["failed"]) == (19, 1)
    assert "longer than 1 MiB" in failures(options)[0]["reason"]


def test_several_servers_share_the_work_and_one_may_be_down(options):
    async def slow(body):
        await asyncio.sleep(0.02)
        return completion()

    with FakeServer(slow) as one, FakeServer(slow) as two:
        run(options, [one, two])
        assert min(len(one.bodies), len(two.bodies)) >= 5
        with FakeServer() as gone:
            pass
        other = replace(options, output=options.output + "2")
        assert run(other, [one, gone], retries=2)["answered"] == 20  # a row's next try goes elsewhere


def test_a_server_that_was_down_for_very_long_is_asked_again(options, monkeypatch):
    inner = module.Servers.__init__

    def weary(self, urls, *given, **named):
        inner(self, urls, *given, **named)
        self._failed = [5_000] * len(urls)

    monkeypatch.setattr(module.Servers, "__init__", weary)
    with FakeServer(first_times(1, FAULTS["500"])) as server:
        assert run(options, server)["answered"] == 20


def test_finish_reasons_are_counted_as_they_are(options):
    finishes = {f"q{i}": finish for i, finish in enumerate(["stop", "length", "length", "content_filter"])}
    with FakeServer(lambda body: completion("x", finishes.get(body["messages"][-1]["content"], "stop"))) as server:
        counts = run(options, server)
        assert (counts["stop"], counts["length"], counts["other"]) == (17, 2, 1)
        assert (counts["answered"], counts["dropped"]) == (19, 1)
        assert [row["finish"] for row in rows_of(options).values()].count("length") == 2
        other = replace(options, output=options.output + "2", unfinished="drop")
        counts = run(other, server)
    assert (counts["answered"], counts["dropped"]) == (17, 3)


def test_options_and_a_rows_own(options, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "sampling": {"temperature": 0.3, "max_tokens": 9}}]
    rows.append({"prompt": "c", "tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": True}})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7}
    with FakeServer() as server:
        run(options, server, **changes, template_kwargs='{"enable_thinking": false}', model="mine")
    a, b, c = sorted(server.bodies, key=lambda body: body["messages"][0]["content"])
    seed = a.pop("seed")
    assert a == {
        "model": "mine", "messages": [{"role": "user", "content": "a"}], "max_tokens": 7, "temperature": 0.8,
        "top_p": 0.9, "top_k": 20, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert (b["temperature"], b["max_tokens"], b["top_p"]) == (0.3, 9, 0.9) and b["seed"] != seed
    assert c["tools"] == [{"type": "function"}] and c["chat_template_kwargs"] == {"enable_thinking": True}
    row = rows_of(options)[content_id(c["messages"])]
    assert row["tools"] == c["tools"] and row["chat_template_kwargs"] == {"enable_thinking": True}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_every_turn_with_the_targets_own_history(options, tmp_path):
    called = [assistant("", tool_calls=[CALL]), {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    talk = [{"role": "system", "content": "s"}, user("one"), assistant("old"), user("two"), *called, assistant("old")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "t", "messages": [*talk, user("three")]}))
    with FakeServer() as server:
        run(options, server, turns="all")
        first, second, third = server.bodies
        assert [message["content"] for message in first["messages"]] == ["s", "one"]
        assert second["messages"] == [*talk[:2], assistant("re: one"), user("two"), *called]
        assert [m["content"] for m in third["messages"]] == ["s", "one", "re: one", "two", "", "2", "re: 2", "three"]
        row = rows_of(options)["t"]
        assert row["messages"][4] == {**called[0], "train": False}  # not written by the target
        assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == [
            "re: one",
            "",
            "re: 2",
            "re: three",
        ]
        assert run(options, server, turns="all")["skipped"] == 1
        other = replace(options, output=options.output + "2")
        run(other, server, turns="last")
        assert [m.get("train", True) for m in rows_of(other)["t"]["messages"] if m["role"] == "assistant"] == [
            False, False, False, True
        ]  # fmt: skip


def test_a_cut_answer_ends_the_conversation(options, tmp_path):
    talk = [user("one"), assistant("old"), user("two")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "t", "messages": talk}))
    with FakeServer(lambda body: completion("cu", "length")) as server:
        run(options, server, turns="all")
    assert rows_of(options)["t"]["messages"] == [user("one"), assistant("cu")]
    assert rows_of(options)["t"]["finish"] == "length"


def test_reasoning_calls_and_token_ids_are_kept(options):
    def reply(body):
        given = completion(
            None, "tool_calls", reasoning="hm", tool_calls=[{**CALL, "index": 0}], more={"token_ids": [7, 8]}
        )
        return given | {"prompt_token_ids": [1, 2]}

    with FakeServer(reply) as server:
        counts = run(options, server, limit=1, token_ids=True)
    assert server.bodies[0]["return_token_ids"] is True and counts["tool_calls"] == 1
    (row,) = rows_of(options).values()
    assert row["messages"][1] == assistant("", reasoning_content="hm", tool_calls=[CALL])
    assert row["served"] == [{"message": 1, "prompt_ids": [1, 2], "answer_ids": [7, 8]}]
    conversation = read_row(row, 1, choose_form("auto", (), row))
    assert conversation.served == {1: ([1, 2], [7, 8])} and conversation.finish == "tool_calls"


def test_resume_with_shuffled_input_another_limit_and_a_torn_line(options):
    with FakeServer() as server:
        assert run(options, server, limit=5)["answered"] == 5
        with open(options.output, "ab") as file:
            file.write('{"id": "torn", "messages": [{"role": "user", "content": "é'.encode()[:-1])
        lines = Path(options.prompts).read_text().splitlines(keepends=True)
        random.Random(0).shuffle(lines)
        with open(options.prompts, "w") as file:
            file.writelines([*lines, *lines[:3]])
        counts = run(options, server)
        assert (counts["answered"], counts["skipped"], counts["duplicates"]) == (15, 5, 3)
        assert len(server.bodies) == 20 and len(rows_of(options)) == 20
        assert run(options, server) == {"answered": 0, "skipped": 20, "duplicates": 3}
        with open(options.prompts, "w") as file:
            file.write(json.dumps({"id": rows_of(options).popitem()[0], "prompt": "another"}))
        with pytest.raises(DataError, match="answers another prompt"):
            run(options, server)


CHILD = """
    import sys
    from draftsmith.config import RegenerateOptions
    from draftsmith.data.server import regenerate_served
    prompts, output, url = sys.argv[1:]
    regenerate_served(RegenerateOptions(prompts=prompts, output=output, servers=(url,), concurrency=4), print)
"""


def test_a_kill_in_mid_run_and_a_resume_give_each_row_once(options):
    async def slow(body):
        await asyncio.sleep(random.random() * 0.1)
        return completion(echo(body))

    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    with FakeServer(slow) as server:
        for least in (3, 9):
            command = [sys.executable, "-c", textwrap.dedent(CHILD), options.prompts, options.output, server.url]
            child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            while size_in_lines(options.output) < least:
                time.sleep(0.005)
                assert child.poll() is None
            child.send_signal(signal.SIGKILL)
            child.wait()
        kept = size_in_lines(options.output)
        assert 9 <= kept < 20
        counts = run(options, server)
    assert counts["answered"] + counts["skipped"] == 20 == len(rows_of(options))


def size_in_lines(path):
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read().count(b"\n")
    return 0


def test_two_writers_are_refused(options):
    async def slow(body):
        await asyncio.sleep(0.5)
        return completion()

    with FakeServer(slow) as server:
        thread = threading.Thread(target=run, args=(options, server), kwargs={"limit": 1})
        thread.start()
        while not server.bodies:
            time.sleep(0.01)
        with pytest.raises(UserError, match="is being written by another process"):
            run(options, server)
        thread.join()


def test_the_key_goes_to_the_server_and_nowhere_else(options, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("MY_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    lines = []
    with FakeServer(first_times(1, FAULTS["500"])) as server:
        run(options, server, lines, api_key_env="MY_KEY")
        server.reply = lambda body: web.Response(status=401)
        with pytest.raises(EnvironmentFault) as caught:
            run(replace(options, output=options.output + "2"), server, lines, api_key_env="MY_KEY")
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {CANARY}"}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode()
    out, err = capfd.readouterr()
    everything = [written, out, err, caplog.text, *lines, str(caught.value), repr(caught.value)]
    assert not any(CANARY in text for text in everything)
    secret = Secret(CANARY)
    assert CANARY not in repr(secret) + str(secret) + str(vars(secret)) + str(pickle.dumps(secret))


def test_keys_that_are_refused(options, monkeypatch):
    with pytest.raises(UserError, match="names NO_SUCH_KEY, which is not set"):
        regenerate_served(replace(options, servers=("http://localhost/v1",), api_key_env="NO_SUCH_KEY"), print)
    monkeypatch.setenv("MY_KEY", "two\nlines")
    with pytest.raises(UserError, match="MY_KEY holds characters that no key has") as caught:
        Secret.from_environment("MY_KEY")
    assert "lines" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:8000", "give an address such as"),
        ("ftp://host/v1", "give an address such as"),
        ("http://user:pw@host/v1", "no user, password or query"),
        ("http://host/v1?key=1", "no user, password or query"),
        ("http://169.254.169.254/v1", "link-local"),
        ("http://[fe80::1]/v1", "link-local"),
        ("http://host:no/v1", "is no address"),
    ],
)
def test_addresses_that_are_refused(options, url, reason):
    with pytest.raises(UserError, match=reason) as caught:
        regenerate_served(replace(options, servers=(url,)), print)
    assert "pw" not in str(caught.value)


def test_a_name_that_leads_to_a_link_local_address(options, monkeypatch):
    async def resolve(self, host, port=0, family=0):
        return [{"hostname": host, "host": "169.254.169.254", "port": port, "family": 2, "proto": 0, "flags": 0}]

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", resolve)
    with pytest.raises(UserError, match="sneaky.example is a link-local address"):
        regenerate_served(replace(options, servers=("http://sneaky.example/v1",)), print)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"concurrency": 0}, "concurrency 0"),
        ({"retries": -1}, "retries -1"),
        ({"timeout": 0.0}, "timeout 0.0"),
        ({"temperature": -1.0}, "not negative"),
        ({"drafter": "runs/mine"}, "drafter and cuda_graph are for answers on this machine"),
        ({"template_kwargs": "{"}, "template_kwargs is not JSON"),
        ({"output": ""}, "needs both"),
    ],
)
def test_options_that_are_refused(options, change, reason):
    with pytest.raises(UserError, match=reason):
        regenerate_served(replace(options, servers=("http://localhost/v1",), **change), print)


def test_a_missing_package_is_named(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(EnvironmentFault, match=r"needs aiohttp; install it with: pip install 'draftsmith\[server\]'"):
        regenerate_served(replace(options, servers=("http://localhost/v1",)), print)


def test_a_reply_is_read_as_text_only():
    with pytest.raises(module._Later):
        read_reply(completion({"a": 1}))
    assert read_reply(completion("x")).message == assistant("x")
