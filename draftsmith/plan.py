"""The verb `plan`: what a run of so many GPUs would be, and which layout would be the fastest. Starts nothing.

Stages are measured on one GPU or scaled (`figures`), and put into a schedule (`simulate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from draftsmith.commands import PlanCommand
from draftsmith.errors import UserError
from draftsmith.figures import STAGES, read_figures
from draftsmith.memory import GIB, Sizes, breakdown, describe
from draftsmith.roles import Roles, roles_of
from draftsmith.shapes import Shape
from draftsmith.simulate import Costs, Network, Outcome, simulate
from draftsmith.telemetry import Console

SPLITS = 7
"""Splits compared: those nearest to the balance."""


def plan(command: PlanCommand) -> None:
    console, world, case = Console(), number_of_gpus(command), Case(command)
    roles = roles_of(command, world)
    parts = (case.stages(), describe_roles(roles, command.gpus_per_host), case.traffic(roles), case.comparison(world))
    console.say("\n\n".join("\n".join(part) for part in parts))


def number_of_gpus(command: PlanCommand) -> int:
    """Those asked for, or else as many as `train` would use here."""
    options = command.pipeline
    wanted = command.gpus if command.gpus is not None else options.processes
    if wanted is None and command.layout == "split" and options.targets and options.drafters:
        wanted = options.targets + options.drafters
    if wanted is None:
        from draftsmith.launch import number_of_processes  # it imports torch, which takes seconds

        wanted = number_of_processes(command)
    limits = {"gpus": wanted, "gpus_per_host": command.gpus_per_host, "pipeline.queue_depth": options.queue_depth}
    for name, value in limits.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    return wanted


def describe_roles(roles: Roles, gpus_per_host: int) -> Iterator[str]:
    """Processes, roles by rank, cells, process groups. Cells are alike, so the first one is told."""
    hosts = -(-roles.world // gpus_per_host)
    yield f"processes    {roles.world} on {hosts} host{'s' * (hosts > 1)}, one for each GPU"
    drafters = [roles.drafter_rank(number) for number in range(roles.drafters)]
    if not roles.targets:
        yield f"roles        {_listed('rank', drafters)}: target and drafter"
    else:
        size, cell = roles.world // roles.cells, range(0, roles.targets, roles.cells)
        first = [number for number, rank in enumerate(drafters) if rank < size]
        yield f"roles        {_listed('rank', range(len(first)))}: {_listed('drafter', first)}"
        yield f"             {_listed('rank', range(len(first), size))}: {_listed('target', cell)}"
        alike = f", all like ranks 0 to {size - 1}" if roles.cells > 1 else ""
        yield f"cells        {roles.cells} of {size} ranks{alike}; each is a process group, for features"
        if roles.target_ranks > 1:
            copies = roles.targets // roles.target_ranks
            yield f"weights      {copies} copies of the target, each shared by {roles.target_ranks} target ranks"
    if roles.drafters > 1:
        yield f"sums         a process group of {roles.drafters} drafters: {_listed('rank', drafters)}"


class Case:
    """A recipe's sizes, and what its stages take."""

    def __init__(self, command: PlanCommand) -> None:
        figures = read_figures(command.figures)
        wide = command.target.dtype == "float32" or (command.target.dtype == "auto" and command.device == "cpu")
        self.command, self.device, self.memory_gib = command, figures.device, command.memory_gib or figures.memory_gib
        self.shape = Shape(
            config=figures.config(command.target.path, command.target.revision),
            drafter=command.drafter,
            tokens=command.pack.tokens,
            anchors=command.pack.anchors,
            layer_ids=command.target.layer_ids,
            width=4 if wide else 2,
        )
        used = _options(command)
        self.seconds = {stage: figures.seconds(stage, self.shape, used) for stage in STAGES}
        self.unknown = [name for name in used if name not in figures.options]
        if command.layout == "offline":
            self.seconds["target"] = (0.0, "features from disk, after the first epoch")
        self.network: Network = figures.network(command.gpus_per_host)
        self.gradient_bytes = 4 * (self.shape.drafter_weights + 1)
        self.outcomes: dict[Roles, Outcome] = {}

    def roles(self, world: int, layout: str, targets: int | None = None) -> Roles:
        """The same recipe in another layout."""
        options = replace(self.command.pipeline, targets=targets, drafters=None)
        if layout != self.command.layout:
            options = replace(options, target_ranks=1 if layout == "colocated" else options.target_ranks)
        return roles_of(replace(self.command, layout=layout, pipeline=options), world)

    def outcome(self, roles: Roles) -> Outcome:
        if roles not in self.outcomes:
            costs = Costs(
                target=self.seconds["target"][0],  # sharing weights costs nothing: a block's are gathered meanwhile
                drafter=self.seconds["drafter"][0],
                optimizer=self.seconds["optimizer"][0],
                feature_bytes=self.shape.feature_bytes,
                gradient_bytes=self.gradient_bytes,
                tokens=self.shape.tokens,
            )
            packs, depth = self.command.optim.packs_per_step, self.command.pipeline.queue_depth
            self.outcomes[roles] = simulate(roles, costs, self.network, packs_per_step=packs, queue_depth=depth)
        return self.outcomes[roles]

    def memory(self, roles: Roles) -> dict[str, dict[str, int]]:
        """Bytes by part, on a drafter and on a target."""
        command, shape, (query, kv, dim, ffn) = self.command, self.shape, self.shape.drafter_sizes
        both, hidden, target_ffn = not roles.targets, shape.size("hidden_size"), shape.size("intermediate_size")
        sizes = Sizes(
            hidden=hidden,
            intermediate=ffn,
            heads=query // dim,
            kv_heads=kv // dim,
            head_dim=dim,
            layers=command.drafter.num_layers,
            taps=len(shape.taps),
            vocabulary=shape.size("vocab_size"),
            block=command.drafter.block_size,
            tokens=shape.tokens,
            anchors=shape.anchors,
            chunk=command.loss.chunk,
            target_weights=shape.tables + (shape.target_block_weights if both else 0),
            target_block_weights=shape.target_block_weights if both else 0,
            target_intermediate=target_ffn if both else 0,
            width=shape.width,
            recompute=command.recompute,
            muon=command.optim.kind == "muon",
            fp8_target=command.target.fp8,
            fp8_head=command.loss.fp8,
            fp8_drafter=command.drafter.fp8,
        )
        parts = {"drafter": breakdown(sizes)}
        if roles.drafters > 1 or command.optim.packs_per_step > 1:
            parts["drafter"]["sum of gradients"] = self.gradient_bytes
        if roles.targets:
            parts["drafter"]["features"] *= 2  # landing buffers
            slots = command.pipeline.queue_depth * roles.drafters // roles.cells
            parts["target"] = {
                "target": (shape.tables + shape.target_block_weights) * shape.width // roles.target_ranks,
                "slots": slots * shape.feature_bytes,
                "capture": shape.tokens * (2 * hidden + 3 * target_ffn) * shape.width,
            }
        return parts

    @property
    def checkpoint_bytes(self) -> int:
        """Weights, fp32 masters unless the weights are that, and the optimizer's moments."""
        masters = 0 if self.shape.width == 4 else 4
        moments = 4 if self.command.optim.kind == "muon" else 8
        return self.shape.drafter_weights * (self.shape.width + masters + moments)

    def needed_gib(self, roles: Roles) -> float:
        return max(sum(parts.values()) for parts in self.memory(roles).values()) / GIB

    def stages(self) -> Iterator[str]:
        shape, packs = self.shape, self.command.optim.packs_per_step
        yield f"{self.command.target.path}, {self.device}"
        yield f"step         {packs} packs of {shape.tokens:,} tokens and {shape.anchors:,} anchors"
        for stage, (seconds, how) in self.seconds.items():
            yield f"{stage:<13}{seconds:.4f} s a {'step' if stage == 'optimizer' else 'pack'}: {how}"
        if self.unknown:
            yield f"             not in these seconds: {', '.join(self.unknown)}"

    def traffic(self, roles: Roles) -> Iterator[str]:
        """Buffers, and bytes per second where something is sent."""
        size, links, outcome = self.shape.feature_bytes, roles.links(), self.outcome(roles)
        packs = self.command.optim.packs_per_step
        if links:
            depth, peers = self.command.pipeline.queue_depth, len(links) // roles.targets
            slots = f"{depth} slots x {peers} drafter{'s' * (peers > 1)} x {_size(size)}"
            yield f"buffers      {_size(depth * peers * size)} on a target: {slots}"
            yield f"             {_size(2 * size)} on a drafter: 2 landing buffers"
        if roles.drafters > 1 or packs > 1:
            numbers = f"{self.shape.drafter_weights:,} gradients in fp32"
            yield f"sum          {_size(self.gradient_bytes)} on a drafter: {numbers}"
        if links:
            rate = outcome.tokens_per_s / self.shape.tokens * size / len(links)
            slowest = max(self.network.send_seconds(roles, link, size) for link in links)
            where = f"each of {len(links)} links" if len(links) > 1 else "the link"
            yield f"features     {_size(rate)}/s on {where}, {slowest * 1e3:.0f} ms a pack"
        if roles.drafters > 1:
            sent = 2 * (roles.drafters - 1) / roles.drafters * self.gradient_bytes / outcome.step_seconds
            seconds = self.network.sum_seconds(roles, self.gradient_bytes)
            yield f"gradients    {_size(sent)}/s from each drafter, {seconds * 1e3:.0f} ms a step, during backward"
        for where, parts in self.memory(roles).items():
            yield f"memory       on a {where} {describe(parts)}"
        yield f"expected     {outcome.tokens_per_s:,.0f} tokens/s, {outcome.step_seconds:.3f} s a step"
        kept = self.command.checkpoint.keep + 1  # one is written before the oldest is deleted
        size = _size(self.checkpoint_bytes)
        yield f"disk         {size} a checkpoint (weights, masters, moments), up to {kept} at a time and the best one"
        if packs % roles.drafters:
            used = packs / (-(-packs // roles.drafters) * roles.drafters)
            yield f"uneven       {packs} packs on {roles.drafters} drafters use {used:.0%} of them; a multiple of"
            yield f"             {roles.drafters} (optim.packs_per_step) would use all"

    def comparison(self, world: int) -> Iterator[str]:
        """The layouts of so many GPUs, and why the best of them is."""
        ranks = self.command.pipeline.target_ranks
        target, drafter = self.seconds["target"][0], self.seconds["drafter"][0]
        balance = target / (target + drafter)
        alone = "offline" if self.command.layout == "offline" else "colocated"
        layouts: dict[str, tuple] = {f"{world} {alone}": (alone,)}
        for targets in splits(world, self.command.gpus_per_host, ranks, balance) if alone == "colocated" else ():
            layouts[f"{targets} + {world - targets}"] = ("split", targets)
        found: dict[str, Outcome] = {}
        yield "targets +                targets    drafters wait for      share of the"
        yield "drafters        tokens/s    wait   features  each other    slower stage"
        for name, arguments in layouts.items():
            try:
                roles = self.roles(world, *arguments)
            except UserError as error:
                yield f"{name:<13}  {error}"
                continue
            one, needed = self.outcome(roles), self.needed_gib(roles)
            if fits := needed <= self.memory_gib:
                found[name] = one
            stage = "both" if one.slower == "both" else f"the {one.slower}s"
            yield (
                f"{name:<13}{one.tokens_per_s:>11,.0f}{one.target_wait:>8.1%}{one.drafter_wait:>11.1%}{one.sum_wait:>12.1%}"
                f"    {one.share_of_slower_stage:.3f} of {stage}"
                + ("" if fits else f"; needs {needed:.0f} GiB of {self.memory_gib:.0f}")
            )
        if len(layouts) > 1:
            yield from self._best(found, world, balance)

    def _best(self, found: dict[str, Outcome], world: int, balance: float) -> Iterator[str]:
        """The fastest layout, and why it is."""
        if not found:
            yield "none of them is possible; smaller packs (pack.tokens, pack.anchors) need less memory"
            return
        best = max(found, key=lambda name: found[name].tokens_per_s)
        target, drafter = (self.seconds[stage][0] for stage in STAGES[:2])
        yield f"best: {best}. A pack takes {target:.2f} s of target and {drafter:.2f} s of drafter, so"
        yield f"{world * balance:.1f} + {world * (1 - balance):.1f} GPUs would balance."
        colocated = f"{world} colocated"
        if best == colocated:
            yield "Colocated has nothing to round and sends no features."
        elif colocated not in found:
            yield "Colocated is not possible, see above; smaller packs (pack.tokens, pack.anchors) need less memory."
        if split := max((name for name in found if "+" in name), key=lambda name: found[name].tokens_per_s, default=""):
            one, share = found[split], found[split].tokens_per_s / found[best].tokens_per_s
            if split != best:
                yield f"The best split, {split}, comes to {share:.0%}."
            idle = one.drafter_wait + one.sum_wait
            yield f"Of {split}, targets have no work for {one.target_wait:.0%} of their time, drafters for {idle:.0%}."


def _options(command: PlanCommand) -> list[str]:
    """Those in use that change what a stage takes."""
    chosen = {
        "target.fp8": command.target.fp8,
        "loss.fp8": command.loss.fp8,
        "drafter.fp8": command.drafter.fp8,
        f"recompute {command.recompute}": command.recompute != "none",
        f"optim.kind {command.optim.kind}": command.optim.kind != "adamw",
    }
    return [name for name, used in chosen.items() if used]


def splits(world: int, gpus_per_host: int, ranks: int, balance: float) -> list[int]:
    """Numbers of targets to compare. On several whole hosts every host is split alike, so features stay inside."""
    hosts = world // gpus_per_host if world % gpus_per_host == 0 else 1
    size = world // hosts
    near = sorted(range(ranks, size, ranks), key=lambda targets: abs(targets - balance * size))
    return sorted(hosts * targets for targets in near[:SPLITS])


def _size(number: float | int) -> str:
    """Bytes in words."""
    power = min(4, max(0, (len(str(int(number))) - 1) // 3))
    return f"{number / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def _listed(noun: str, numbers: Iterable[int]) -> str:
    """ranks 0 to 7; or drafters 0, 8, 16; of many of them the first and the last."""
    given = list(numbers)
    if len(given) == 1:
        return f"{noun} {given[0]}"
    if given == list(range(given[0], given[-1] + 1)):
        return f"{noun}s {given[0]} to {given[-1]}"
    return f"{noun}s " + ", ".join(map(str, given if len(given) <= 8 else [*given[:6], "...", given[-1]]))
