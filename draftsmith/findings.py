"""What `verify` found: rows that pass, warn or fail, and accept lengths side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftsmith.commands import VerifyCommand
from draftsmith.errors import DataError, EnvironmentFault


class CheckFailed(DataError):
    """At least one check of `verify` failed. Exit code 4."""


@dataclass(frozen=True)
class Row:
    """One check. `passed` is None for a warning."""

    check: str
    passed: bool | None
    said: str


@dataclass
class Findings:
    """Rows as they come, and the figures that stand side by side."""

    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Pooled accept length by who measured it."""
    by_reference: dict[str, float] = field(default_factory=dict)
    """The reference's, by the same count."""
    versions: dict[str, dict] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Failed checks that say nothing about the drafter: an engine that could not be made or reached."""

    def add(self, check: str, passed: bool | None, said: str) -> None:
        self.rows.append(Row(check, passed, said))
        self.say(f"{'warn' if passed is None else 'pass' if passed else 'FAIL'}  {check:<12} {said}")

    def side_by_side(self) -> list[str]:
        """The figures as a table: who measured, what, and what the reference says by the same count."""
        lines = [f"{'accept length, pooled':<22} {'measured':>9} {'reference':>10} {'difference':>11}"]
        for name, value in self.figures.items():
            wanted = self.by_reference.get(name, value)
            check = "acceptance" if name in ("trainer", "reference") else name
            verdict = "FAIL" if check in self.failed else "pass"
            lines.append(f"  {name:<20} {value:>9.3f} {wanted:>10.3f} {value - wanted:>+11.3f}  {verdict}")
        return lines

    @property
    def failed(self) -> list[str]:
        return [row.check for row in self.rows if row.passed is False]


def conclude(command: VerifyCommand, found: Findings) -> None:
    """Write the report; raises CheckFailed naming the checks, EnvironmentFault if the drafter is not to blame."""
    if command.output:
        report = {
            "rows": [asdict(row) for row in found.rows],
            "accept_length_pooled": found.figures,
            "reference_by_the_same_count": found.by_reference,
            "versions": found.versions,
            "failed": found.failed,
        }
        try:
            Path(command.output).write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise EnvironmentFault(f"the report {command.output} could not be written: {error}") from error
    if found.failed and set(found.failed) <= set(found.faults):
        raise EnvironmentFault(
            f"{command.folder} passed all that could be checked, which {' and '.join(found.failed)} could not; see the "
            "lines above"
        )
    if found.failed:
        raise CheckFailed(f"{command.folder} failed: {', '.join(dict.fromkeys(found.failed))}; see the lines above")
