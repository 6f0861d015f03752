"""Requests to OpenAI-compatible servers: which server, how often, how long, and what of an answer is believed."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import random
import socket
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from draftsmith.errors import EnvironmentFault, UserError

MAX_BYTES = 32 << 20
"""Of a response; more is refused."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first and at most before any retry, less a random part."""
LONGEST_REQUESTED = 600.0
"""Seconds of a Retry-After that are waited for."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses that may be better later."""
STOP = {
    401: "asks for another key",
    403: "forbids this",
    404: "has no such address or model",
    405: "takes no questions",
}
"""Statuses that every row would meet."""


class Failure(Exception):
    """A row that got no answer, and why."""


class _Later(Exception):
    """A request that may succeed when tried again, after at least `wait` seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Secret:
    """A key that no log, recipe, pickle or traceback can show."""

    def __init__(self, value: str) -> None:
        self._reveal = lambda: value

    @classmethod
    def from_environment(cls, name: str) -> Secret:
        """The key in the environment variable `name`; no key without a name."""
        value = os.environ.get(name, "").strip() if name else ""
        if name and not value:
            raise UserError(
                f"regenerate.api_key_env names {name}, which is not set; export it, or leave the option out"
            )
        if not value.isascii() or not value.isprintable():
            raise UserError(f"the key in {name} holds characters that no key has")
        return cls(value)

    def headers(self) -> dict[str, str]:
        value = self._reveal()
        return {"Authorization": f"Bearer {value}"} if value else {}

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> tuple:
        return Secret, ("",)


class Reply(NamedTuple):
    """One answer."""

    message: dict
    finish: str
    tokens: int
    prompt_ids: list[int] | None
    answer_ids: list[int] | None


class Servers:
    """An open session to every server; the next request goes to the one with the fewest in flight."""

    def __init__(self, urls: Sequence[str], key: Secret, *, timeout: float, connections: int) -> None:
        self.urls = [_checked(url) for url in urls]
        self.names = [urlsplit(url).netloc for url in self.urls]
        self._key, self._timeout, self._connections = key, timeout, connections
        self._busy = [0] * len(self.urls)
        self._rested = [0.0] * len(self.urls)
        """When a server that failed may be asked again before others."""
        self._failed = [0] * len(self.urls)
        """How often each has failed in a row."""

    async def __aenter__(self) -> Servers:
        try:
            import aiohttp
        except ImportError as error:
            raise EnvironmentFault("this needs aiohttp; install it with: pip install 'draftsmith[server]'") from error
        self._aiohttp = aiohttp
        connector = aiohttp.TCPConnector(limit=self._connections, resolver=_resolver())
        limits = aiohttp.ClientTimeout(total=self._timeout)
        # No trust_env: neither proxies nor netrc of the environment. The key is a header of each request, not of the
        # session, so that nothing that prints the session prints it.
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits, auto_decompress=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def only_model(self) -> str:
        """The name of the model that the first server serves."""
        try:
            given = await self._send("GET", 0, "/models", None)
            names = [one["id"] for one in given["data"]]
        except (_Later, Failure, KeyError, TypeError) as error:
            raise EnvironmentFault(
                f"{self.names[0]} does not say what it serves ({error}); give --regenerate.model"
            ) from error
        if len(names) != 1:
            raise UserError(f"{self.names[0]} serves {len(names)} models; choose one with --regenerate.model")
        return _plain(str(names[0]))

    async def post(self, body: dict[str, Any]) -> Any:
        """The JSON of one chat completion. `_Later` if it may succeed another time, `Failure` if not."""
        now = time.monotonic()
        number = min(range(len(self.urls)), key=lambda n: (self._rested[n] > now, self._busy[n], random.random()))
        self._busy[number] += 1
        try:
            answer = await self._send("POST", number, "/chat/completions", body)
        except _Later:
            # At least as long as the row that failed waits, so that the row's next try goes elsewhere: a server that is
            # down is never busy, and would be everybody's choice.
            self._rested[number] = time.monotonic() + min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failed[number], 20))
            self._failed[number] += 1
            raise
        else:
            self._failed[number] = 0
            return answer
        finally:
            self._busy[number] -= 1

    async def _send(self, method: str, number: int, path: str, body: dict[str, Any] | None) -> Any:
        name = self.names[number]
        headers = {"Accept": "application/json", **self._key.headers()}
        try:
            async with self._session.request(
                method, self.urls[number] + path, json=body, headers=headers, allow_redirects=False
            ) as response:
                raw = await _read(response, name)
                return _value(response.status, dict(response.headers), raw, name)
        except TimeoutError as error:
            raise _Later(f"{name}: no answer in {self._timeout:g} s") from error
        except self._aiohttp.ClientError as error:  # refused, reset, cut short
            raise _Later(f"{name}: {_plain(type(error).__name__)}") from error


class Client:
    """Asks until there is an answer, or there were too many tries."""

    def __init__(self, servers: Servers, model: str, retries: int) -> None:
        self.servers, self.model, self.tries = servers, model, retries + 1
        self.requests = self.retried = 0

    async def ask(self, body: dict[str, Any]) -> Reply:
        """The answer to a request. Failure with the last reason after `retries` further tries."""
        for number in range(self.tries):
            self.requests += 1
            self.retried += number > 0
            try:
                return read_reply(await self.servers.post(body))
            except _Later as later:
                if number + 1 == self.tries:
                    raise Failure(f"{later} ({self.tries} tries)") from later
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**number) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(wait, later.wait))
        raise AssertionError("unreachable")


def read_reply(given: Any) -> Reply:
    """The answer in a chat completion. `_Later` if it has none: a server that falters may do better next time."""
    try:
        choice = given["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        content, calls = message.get("content"), message.get("tool_calls") or []
        thought = message.get("reasoning_content") or message.get("reasoning")
        called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        usage = given.get("usage") or {}
        tokens = usage.get("completion_tokens") or 0
        prompt_ids, answer_ids = given.get("prompt_token_ids"), choice.get("token_ids")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Later(f"its answer is no chat completion ({type(error).__name__})") from error
    texts = [part for part in (content, thought) if part is not None] + [text for call in called for text in call]
    numbers = [
        n for ids in (prompt_ids, answer_ids) if ids is not None for n in (ids if isinstance(ids, list) else [""])
    ]
    if not all(isinstance(text, str) for text in [*texts, finish]) or not all(isinstance(n, int) for n in numbers):
        raise _Later("its answer is no chat completion (a value has the wrong type)")
    if not (content or thought or calls) and finish == "stop" and answer_ids is None:
        raise _Later("its answer is empty")
    kept: dict[str, Any] = {"role": "assistant", "content": content or ""}
    kept |= {"reasoning_content": thought} if thought else {}
    kept |= {"tool_calls": [_call(call, *pair) for call, pair in zip(calls, called, strict=True)]} if calls else {}
    return Reply(kept, finish, tokens if isinstance(tokens, int) else 0, prompt_ids, answer_ids)


def _call(call: dict, name: str, arguments: str) -> dict:
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments}}


async def _read(response: Any, name: str) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        raw += chunk
        if len(raw) > MAX_BYTES:
            response.close()
            raise Failure(f"{name}: its answer is longer than {MAX_BYTES >> 20} MiB")
    return bytes(raw)


def _value(status: int, headers: dict[str, str], raw: bytes, name: str) -> Any:
    """The JSON of a response."""
    if 300 <= status < 400:
        to = urlsplit(headers.get("Location", "")).netloc or "another address"
        raise UserError(
            f"{name} redirects to {_plain(to)}, which is not followed; give the address itself if you trust it"
        )
    said = f"{name}: HTTP {status}"
    if status in STOP:
        raise EnvironmentFault(f"{said}: the server {STOP[status]} ({_plain(_message(raw))})")
    if status in AGAIN:
        raise _Later(said, _retry_after(headers.get("Retry-After", "")))
    if status != 200:
        raise Failure(f"{said} ({_plain(_message(raw))})")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _Later(f"{name}: its answer is not JSON") from error


def _message(raw: bytes) -> str:
    """What an error response says."""
    try:
        given = json.loads(raw)
        return str(given.get("message") or given["error"]["message"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return "no reason given"


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which may also be a date."""
    try:
        wait = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError):
        return 0.0
    return min(max(wait, 0.0), LONGEST_REQUESTED)


def _plain(text: str) -> str:
    """A server's words, short and printable."""
    return "".join(character if character.isprintable() else " " for character in text[:160])


def _checked(url: str) -> str:
    """The address of a server without its last slash. UserError unless it is one that may be asked."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"regenerate.servers {url!r} is no address ({error})") from error
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"regenerate.servers {url!r}: give an address such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError("regenerate.servers: an address has no user, password or query; a key goes into api_key_env")
    _refuse_link_local(host, host)
    return url.rstrip("/")


def _refuse_link_local(host: str, address: str) -> None:
    """Clouds answer with credentials at these addresses; no model is served there."""
    try:
        refused = ipaddress.ip_address(address.split("%")[0]).is_link_local
    except ValueError:
        return  # a name
    if refused:
        raise UserError(f"regenerate.servers: {host} is a link-local address, which is not asked")


def _resolver() -> Any:
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.resolver import ThreadedResolver

    class Resolver(AbstractResolver):
        """Refuses names that lead to a link-local address, whenever they are looked up."""

        def __init__(self) -> None:
            self._inner = ThreadedResolver()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            found = await self._inner.resolve(host, port, family)
            for one in found:
                _refuse_link_local(host, one["host"])
            return found

        async def close(self) -> None:
            await self._inner.close()

    return Resolver()
