"""What can go wrong, by whose fault; each kind has one exit code (contracts: 1, 2, 3, 75)."""


class AblationError(Exception):
    """A failure a person can act on; `str()` is the one line they read after `error: `."""

    exit_code = 70


class InputError(AblationError, ValueError):
    """The input is wrong and nothing was started (exit 2)."""

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str, action: str) -> None:
        self.field, self.value, self.reason, self.action = field, value, reason, action
        super().__init__(f"{field}={value}: {reason}; {action}")


class MachineError(AblationError):
    """This machine lacks something: a GPU, the cage, the store, disk space, an extra package (exit 3)."""

    exit_code = 3

    def __init__(self, field: str, value: object, reason: str, action: str) -> None:
        self.field, self.value, self.reason, self.action = field, value, reason, action
        super().__init__(f"{field}={value}: {reason}; {action}")


class IncompleteError(AblationError):
    """The work ended, but something is missing or a check failed (exit 1)."""

    exit_code = 1


class Stopped(AblationError):
    """A signal ended the work; the same command goes on from where it was (exit 75)."""

    exit_code = 75
