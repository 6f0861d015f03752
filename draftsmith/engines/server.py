"""A running vLLM server that serves target and drafter: its output, and its counters before and after.

The counters are the server's own, so nobody else may use it meanwhile.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

from draftsmith.errors import EnvironmentFault, UserError

TIMEOUT = 600
LARGEST = 64 << 20  # bytes of a reply
_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)(?:_total)?(\{[^}]*\})? ([0-9.eE+]+)$", re.M
)
_POSITION = re.compile(r'position="([0-9]+)"')


def find_model(url: str) -> tuple[str, str]:
    """The server's address without /v1, and the name of the only model it serves. UserError, EnvironmentFault."""
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"url {url!r} is no http address; give the server's, for example http://localhost:8000")
    base = url.rstrip("/").removesuffix("/v1")
    models = _get(base + "/v1/models").get("data") or []
    if len(models) != 1:
        raise EnvironmentFault(f"{base} serves {len(models)} models; one, the target with its drafter, is expected")
    return base, models[0]["id"]


def ask_server(url: str, request: dict) -> dict:
    """The request of `launch.ask`, answered by the server. Raises EnvironmentFault when it cannot be."""
    base, model = find_model(url)
    before, answers = _counters(base), []
    for prompt in request["prompts"]:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": request["max_new_tokens"],
            "temperature": 0,
            "stop_token_ids": request["eos_ids"],
            "return_token_ids": True,
        }
        (choice,) = _get(base + "/v1/completions", body).get("choices") or [{}]
        if not isinstance(choice.get("token_ids"), list):
            raise EnvironmentFault(f"{base} returns no token_ids; vLLM 0.11 or newer does")
        answers.append({"tokens": choice["token_ids"]})
    after = _counters(base)
    spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {
        "answers": answers,
        "num_cycles": spent["drafts"],
        "num_accepted": spent["accepted_tokens"],
        "by_slot": [spent[name] for name in sorted(name for name in spent if isinstance(name, int))],
        "versions": {"vllm": _get(base + "/version").get("version")},
    }


def _counters(base: str) -> dict[str | int, float]:
    """By name, and accepted tokens by position in the draft as well."""
    found: dict[str | int, float] = {"drafts": 0.0, "accepted_tokens": 0.0}
    matches = _COUNTER.findall(_fetch(base + "/metrics", None))
    if not matches:
        raise EnvironmentFault(f"{base}/metrics has no counters of speculative decoding; is the server run with it?")
    for name, labels, value in matches:
        position = _POSITION.search(labels)
        key = name if position is None else int(position[1])
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _get(url: str, body: dict | None = None) -> dict:
    try:
        value = json.loads(_fetch(url, body))
    except ValueError as error:
        raise EnvironmentFault(f"{url} answers with no JSON: {error}") from error
    if not isinstance(value, dict):
        raise EnvironmentFault(f"{url} answers with no JSON object")
    return value


def _fetch(url: str, body: dict | None) -> str:
    data = None if body is None else json.dumps(body).encode()
    wanted = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(wanted, timeout=TIMEOUT) as reply:
            raw = reply.read(LARGEST + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EnvironmentFault(f"{url} cannot be reached: {error}") from error
    if len(raw) > LARGEST:
        raise EnvironmentFault(f"{url} answers with more than {LARGEST >> 20} MiB")
    return raw.decode("utf-8", errors="replace")
