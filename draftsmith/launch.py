"""Starting the processes of a run on this host with torch's elastic launcher, and saying how they ended.

Several hosts are torchrun's work: there every process finds itself already started, and nothing here is used.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from draftsmith.config import Recipe, to_toml
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.ranks import started_by_launcher
from draftsmith.roles import roles_of
from draftsmith.telemetry import Console

MARK = "DRAFTSMITH_LAUNCHED"


def started_by_us() -> bool:
    """Whether `launch` started this process, and will go on when all have ended."""
    return MARK in os.environ


def number_of_processes(recipe: Recipe, warn: Callable[[str], None] = lambda text: None) -> int:
    """How many processes this host needs; 1 means that this one does the work. Raises UserError for a misfit."""
    options = recipe.pipeline
    if started_by_launcher():
        if options.processes is not None:
            raise UserError(
                f"pipeline.processes is {options.processes}, but torchrun has started this process as one of "
                f"{os.environ['WORLD_SIZE']}; leave pipeline.processes out, or start without torchrun"
            )
        return 1
    if options.processes is not None and options.processes < 1:
        raise UserError(f"pipeline.processes is {options.processes}; it must be at least 1")
    gpus = torch.cuda.device_count() if recipe.device != "cpu" and torch.cuda.is_available() else 0
    wanted = options.processes
    if wanted is None and recipe.layout == "split" and options.targets and options.drafters:
        wanted = options.targets + options.drafters
    world = wanted or gpus or 1
    if wanted is None and recipe.layout != "split" and recipe.optim.packs_per_step < world:
        warn(
            f"this host has {world} GPUs, but optim.packs_per_step is {recipe.optim.packs_per_step}, so no more are "
            f"used; with {world} packs a step all would be (and each step would see {world} packs)"
        )
        world = recipe.optim.packs_per_step
    if 0 < gpus < world:
        raise UserError(f"{world} processes are asked for, but this host has {gpus} GPUs, one for each process")
    roles_of(recipe, world)
    return world


def launch(recipe: Recipe, world: int, console: Console) -> None:
    """Run `draftsmith train` in `world` processes to the end, started again after a death as often as allowed.

    Raises EnvironmentFault naming the rank that died; SystemExit with the code of a rank that has said itself what
    was wrong.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="draftsmith-launch-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(to_toml(recipe))
        for attempt in range(recipe.pipeline.max_restarts + 1):
            try:
                words = [
                    "--pipeline.processes",
                    "None",
                    "--target.trust_remote_code",
                    str(recipe.target.trust_remote_code),
                ]
                _run(["-m", "draftsmith", "train", str(file), *words], world, folder)
                return
            except ChildFailedError as error:
                # The launcher ends the others by SIGTERM, which is never the first of what happened.
                failures = sorted(error.failures.items(), key=lambda item: item[1].exitcode == -signal.SIGTERM)
                rank, failure = failures[0]
                if failure.exitcode > 1:  # it has said why, and the same would happen again
                    sys.exit(failure.exitcode)
                died = (
                    f"rank {rank} was killed by {failure.signal_name()}"
                    if failure.exitcode < 0
                    else f"rank {rank} failed"
                )
                resume = f"draftsmith train {Path(recipe.run) / 'recipe.toml'}"
                if attempt == recipe.pipeline.max_restarts:
                    raise EnvironmentFault(f"{died}; the last checkpoint is intact, continue with: {resume}") from error
                console.warn(
                    f"{died}; starting again from the last checkpoint ({attempt + 1} of {recipe.pipeline.max_restarts})"
                )


def _run(words: list[str], world: int, folder: str) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it would tell the same at length, before we can
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    os.environ[MARK] = "1"
    # Otherwise the ranks' connections tell of each other's end at length.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=f"draftsmith-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    before = {number: signal.signal(number, _pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        elastic_launch(config, sys.executable)(*words)
    finally:
        del os.environ[MARK]
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """A request to end goes to every process; they save, and end together."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            try:
                os.kill(int(pid), signal.SIGTERM)
            except ProcessLookupError:
                pass  # it has ended already
