"""Who does what: ranks, roles, and which rank computes which pack of a step. Numbers only; nothing here communicates.

In the `split` layout the ranks form *cells*, as many as the greatest common divisor of targets and drafters, so that
4 + 4 is four independent pairs, and 3 + 5 on each of 64 hosts is 64 cells of one host each. Targets that share one copy
of the weights are in one cell. A cell's ranks follow each
other, drafters first, so a cell stays on a host and rank 0, which writes the run's files, is a drafter:

    2 targets, 2 drafters          cell 0: drafter 0, target 0     cell 1: drafter 1, target 1
    2 targets, 1 drafter           cell 0: drafter 0, target 0, target 1

Pack k of a step goes to drafter k mod D; a cell's targets take its packs in turn. Neither changes a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from draftsmith.config import Recipe
from draftsmith.errors import UserError
from draftsmith.packing import Schedule


class Lane(NamedTuple):
    """A pack's place in its optimizer step, and how the sum over lanes goes on after it (see `summation`)."""

    number: int
    merges: int


class Delivery(NamedTuple):
    """One pack of the run: where it stands, who captures its features and who trains on them."""

    step: int
    lane: Lane
    epoch: int
    index: int
    drafter: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The layout of a run: which ranks are drafters, which are targets."""

    drafters: int = 1
    targets: int = 0
    """Target ranks; 0: every drafter rank runs the target itself (or reads features from disk)."""
    target_ranks: int = 1
    """Target ranks that share one copy of the weights."""
    canonical: bool = False

    @property
    def world(self) -> int:
        return self.drafters + self.targets

    @property
    def cells(self) -> int:
        return gcd(self.drafters, self.targets // self.target_ranks) if self.targets else 1

    @property
    def _cell_shape(self) -> tuple[int, int]:
        """Drafters and targets of one cell."""
        return self.drafters // self.cells, self.targets // self.cells

    def drafter_rank(self, drafter: int) -> int:
        inside, cell = divmod(drafter, self.cells)
        return cell * (self.world // self.cells) + inside

    def target_rank(self, target: int) -> int:
        inside, cell = divmod(target, self.cells)
        return cell * (self.world // self.cells) + self._cell_shape[0] + inside

    def sharers(self, target: int) -> list[int]:
        """The target ranks that share the weights of this one, itself included."""
        inside = (self.target_rank(target) % (self.world // self.cells) - self._cell_shape[0]) % self.target_ranks
        first = self.target_rank(target) - inside
        return list(range(first, first + self.target_ranks))

    def drafter_of(self, rank: int) -> int | None:
        """The drafter number of a rank, or None if it is a target's."""
        cell, inside = divmod(rank, self.world // self.cells)
        return inside * self.cells + cell if inside < self._cell_shape[0] else None

    def target_of(self, rank: int) -> int | None:
        """The target number of a rank, or None if it is a drafter."""
        cell, inside = divmod(rank, self.world // self.cells)
        inside -= self._cell_shape[0]
        return inside * self.cells + cell if inside >= 0 else None

    def name(self, rank: int) -> str:
        """How messages call a rank."""
        target = self.target_of(rank)
        if target is None:
            return f"rank {rank} (drafter {self.drafter_of(rank)})" if self.targets else f"rank {rank}"
        return f"rank {rank} (target {target})"

    def links(self) -> list[tuple[int, int]]:
        """(target, drafter) pairs between which features travel."""
        return [(t, d) for t in range(self.targets) for d in range(self.drafters) if t % self.cells == d % self.cells]

    def lanes(self, drafter: int | None, num: int) -> list[Lane]:
        """The lanes of a step of `num` packs that a drafter computes, in its order."""
        assert drafter is not None, "a target rank has no lanes"
        if self.canonical:
            return summation(drafter, self.drafters, num)
        return [Lane(k, int(k > drafter)) for k in range(drafter, num, self.drafters)]

    def deliveries(self, schedule: Schedule, first_step: int) -> Iterator[Delivery]:
        """Every pack from a step on. Each drafter and each target finds its own packs here in its own order."""
        turns = [0] * self.cells
        for step in range(first_step, schedule.num_steps):
            packs = schedule.step_packs(step)
            mine = [self.lanes(drafter, len(packs)) for drafter in range(self.drafters)]
            for turn in range(max(map(len, mine))):
                for drafter in range(self.drafters):
                    if turn < len(mine[drafter]):
                        lane, cell = mine[drafter][turn], drafter % self.cells
                        per_cell = self._cell_shape[1]
                        target = turns[cell] % per_cell * self.cells + cell if self.targets else drafter
                        turns[cell] += 1
                        yield Delivery(step, lane, *packs[lane.number], drafter, target)


def summation(first: int, stride: int, num: int) -> list[Lane]:
    """Lanes first, first + stride, ... below `num` as the leaves of a fixed pairwise tree, depth first.

    The sum of a class (first mod stride) is the sum of its two classes mod 2 * stride. So the part of a rank, of 2^n
    ranks, is a subtree whatever n is, and the sum over ranks completes the same tree. After a leaf's gradient is
    pushed on a stack, its two topmost entries are added `merges` times.
    """
    if first + stride >= num:
        return [Lane(first, 0)] if first < num else []
    left, right = summation(first, 2 * stride, num), summation(first + stride, 2 * stride, num)
    last = right[-1]
    return [*left, *right[:-1], Lane(last.number, last.merges + 1)]


def roles_of(recipe: Recipe, world: int) -> Roles:
    """The roles that the recipe gives `world` processes. Raises UserError where they do not fit."""
    options, packs_per_step = recipe.pipeline, recipe.optim.packs_per_step
    targets, drafters, target_ranks = options.targets, options.drafters, options.target_ranks
    if recipe.layout != "split":
        given = [name for name, value in (("targets", targets), ("drafters", drafters)) if value is not None]
        if given or target_ranks != 1:
            names = ", ".join(f"pipeline.{name}" for name in [*given, *["target_ranks"] * (target_ranks != 1)])
            raise UserError(
                f'{names} would have no effect with layout = "{recipe.layout}"; leave it out or use "split"'
            )
        roles = Roles(drafters=world, canonical=options.canonical)
    else:
        roles = _split(world, drafters, targets, target_ranks, options.canonical)
    if roles.drafters > packs_per_step:
        raise UserError(
            f"optim.packs_per_step is {packs_per_step} and there are {roles.drafters} drafter ranks, so "
            f"{roles.drafters - packs_per_step} would never have work; use a multiple of {roles.drafters} packs, or "
            "fewer ranks"
        )
    if roles.canonical and roles.drafters & (roles.drafters - 1):
        raise UserError(
            f"pipeline.canonical needs 1, 2, 4, 8, ... drafter ranks, and there are {roles.drafters}; change their "
            "number or leave canonical off"
        )
    return roles


def _split(world: int, drafters: int | None, targets: int | None, target_ranks: int, canonical: bool) -> Roles:
    values = {"targets": targets, "drafters": drafters, "target_ranks": target_ranks}
    for name, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"pipeline.{name} is {value}; it must be at least 1")
    if targets is None and drafters is None:
        raise UserError('layout = "split" needs pipeline.targets and pipeline.drafters (one of them may be left out)')
    if targets is None:
        targets = max(0, world - (drafters or 0))
    if drafters is None:
        drafters = world - targets
    if targets % target_ranks:
        raise UserError(
            f"pipeline.target_ranks is {target_ranks}, but there are {targets} target processes; give a multiple of it"
        )
    roles = Roles(drafters=max(0, drafters), targets=targets, target_ranks=target_ranks, canonical=canonical)
    if roles.world != world or roles.drafters < 1 or roles.targets < 1:
        raise UserError(
            f"layout split with {roles.targets} targets and {roles.drafters} drafters makes {roles.world} "
            f"processes, but there are {world}; change pipeline.targets and pipeline.drafters, or the number of "
            "processes"
        )
    return roles
