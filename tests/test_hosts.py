"""One run on two hosts, as torchrun starts it: two network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.config import Recipe, to_toml
from tests.ranks import assert_equal, assert_same_bits, outcome, short

pytestmark = pytest.mark.slow
NAMES = tuple(f"smith{os.getpid()}{letter}" for letter in "ab")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, ...]]:
    """The names of two network namespaces. Each has one interface, of its own name, and is known as a host by it."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("two hosts need the commands ip and unshare (packages iproute2 and util-linux)")
    tried = ip("netns", "add", NAMES[0])
    if tried.returncode:
        pytest.skip(f"two hosts need root's right to make network namespaces; ip netns add: {tried.stderr.strip()}")
    try:
        commands = [
            f"netns add {NAMES[1]}",
            f"link add {NAMES[0]} netns {NAMES[0]} type veth peer name {NAMES[1]} netns {NAMES[1]}",
        ]
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            commands += [f"-n {name} addr add {address}/24 dev {name}", f"-n {name} link set {name} up"]
            commands += [f"-n {name} link set lo up"]
        for command in commands:
            done = ip(*command.split())
            assert done.returncode == 0, f"ip {command}: {done.stderr}"
        yield NAMES
    finally:
        for name in NAMES:
            ip("netns", "del", name)


def torchrun(hosts: tuple[str, ...], recipe: Recipe, *flags_of_second: str) -> list[tuple[int, str]]:
    """Exit code and output of `torchrun ... -m draftsmith train` on each host, one process each."""
    file = Path(recipe.run).with_name("recipe.toml")
    file.write_text(to_toml(recipe))
    started = []
    for number, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
        words = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
        words += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", "test"]
        words += ["--rdzv-conf", f"is_host={1 - number}", "--local-addr", address]
        words += ["-m", "draftsmith", "train", str(file), *(flags_of_second if number else ())]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": host, "OMP_NUM_THREADS": "1"}
        log = file.with_name(f"{host}.log")
        with open(log, "w") as output:
            started.append((subprocess.Popen(words, stdout=output, stderr=output, env=environment), log))
    try:
        return [(process.wait(120), log.read_text()) for process, log in started]
    except subprocess.TimeoutExpired as error:
        raise AssertionError("".join(log.read_text() for _, log in started)) from error
    finally:
        for process, _ in started:
            process.kill()


@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_two_hosts_train_the_same_drafter(world, tmp_path, alone, hosts, layout):
    given = {"targets": 1, "drafters": 1} if layout == "split" else {}
    recipe = short(world, tmp_path, layout, **given)
    ended = torchrun(hosts, recipe)
    assert [code for code, _ in ended] == [0, 0], ended
    (assert_same_bits if given else assert_equal)(outcome(recipe), alone)


def test_hosts_with_different_recipes_are_told_apart(world, tmp_path, hosts):
    recipe = short(world, tmp_path)
    ended = torchrun(hosts, recipe, "--optim.lr", "0.5")
    assert 0 not in {code for code, _ in ended}, ended
    said = "".join(output for _, output in ended)
    assert "does not fit rank 0 (optim.lr: 0." in said, said
    assert any(f"on host {host} does not fit" in said for host in hosts), said
    assert not Path(recipe.run).exists()
