"""What a user may do wrong, and the exit code for it. `cli.main` turns these into one line and that code."""

from __future__ import annotations


class UserError(ValueError):
    """Bad options or input: says what was given, what is allowed, what to do. Exit code 2."""

    exit_code = 2


class EnvironmentFault(UserError):
    """Something of the machine is missing or broken (a package, the disk). Exit code 3."""

    exit_code = 3


class DataError(UserError):
    """The user's data cannot be used as it is. Exit code 4."""

    exit_code = 4


class Diverged(UserError):
    """Training met too many non-finite gradients. Exit code 5."""

    exit_code = 5


class Interrupted(UserError):
    """Stopped by a signal after saving; the same command continues. Exit code 75."""

    exit_code = 75
