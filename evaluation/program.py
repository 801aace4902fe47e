"""Modules run as programs: every failure is one line on stderr and one exit code (contracts: exit codes)."""

import errno
import gc
import json
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from evaluation.early import STOPPED
from evaluation.errors import AblationError, InputError, MachineError

INTERNAL = 70
UNNAMED = "?"
"""The path of a failure that does not tell it."""

R = TypeVar("R", bound=BaseModel)

_MACHINE = {
    errno.ENOSPC: "free space, or choose another place",
    errno.EDQUOT: "free space, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "give this user access to it, or choose another place",
    errno.EPERM: "give this user access to it, or choose another place",
}
"""What to do about an operating system's refusal."""

_FIXES = {
    "missing": "add it",
    "extra_forbidden": "remove it; unknown keys are refused",
    "json_invalid": "mend the JSON",
    "int_parsing": "use a whole number",
    "int_from_float": "use a whole number",
    "int_type": "use a whole number",
    "float_parsing": "use a number",
    "float_type": "use a number",
    "finite_number": "use a finite number",
    "bool_parsing": "use true or false",
}

_BOUNDS = {
    "greater_than": ("gt", "use more than {}"),
    "greater_than_equal": ("ge", "use {} or more"),
    "less_than": ("lt", "use less than {}"),
    "less_than_equal": ("le", "use {} or less"),
    "literal_error": ("expected", "use {}"),
    "too_short": ("min_length", "give at least {}"),
    "string_too_short": ("min_length", "leave it out, or give at least {} character"),
}

_OS_ERROR = re.compile(r"([A-Z][\w ]+) \(os error (\d+)\)")
"""As Rust's standard library says it: safetensors, tokenizers."""
_OURS = re.compile(r"(\w[\w.-]*)=(.*?): (.*); (.*)", re.DOTALL)
"""The form `FIELD=VALUE: reason; what to do` of our own validators' messages."""


def explain(error: ValidationError, names: Mapping[str, str] | None = None) -> InputError:
    """Turn the first complaint of a record's validation into the one line a person can act on.

    Args:
        error: what pydantic found.
        names: by field, what a person calls it, where that differs.
    """
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause
    if isinstance(cause, ValidationError):
        return explain(cause)
    if cause is not None and (ours := _OURS.fullmatch(str(cause))):
        return InputError(*ours.groups())
    kind = first["type"]
    field = ".".join(str(part) for part in first["loc"]) or error.title
    field = (names or {}).get(field, field)
    key, form = _BOUNDS.get(kind, ("", ""))
    fix = form.format(first.get("ctx", {}).get(key)) if form else _FIXES.get(kind, "correct it")
    value = "" if kind == "missing" else shorten(first["input"])
    return InputError(field, value, re.sub("^(Input|Value error,) *", "", first["msg"]), fix)


def read_record(kind: type[R], path: Path) -> R:
    """Return the record in a JSON file.

    Raises:
        InputError: it is no JSON, or says something impossible; the field is named, or the file.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise InputError(path.name, path, first["msg"], "mend or remove it") from error
        raise explain(error) from error


def shorten(value: object, limit: int = 60) -> str:
    """Return a value as a person wrote it, cut to `limit` characters: an error line is no place for a file."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_ablation_error(error: Exception) -> AblationError | None:
    """Return the failure a person can act on that `error` stands for; None for an internal error."""
    if isinstance(error, AblationError):
        return error
    if isinstance(error, ValidationError):
        return explain(error)
    if isinstance(error, OSError) and error.errno in _MACHINE:
        where = error.filename2 or error.filename or UNNAMED  # of a copy, where it goes: that disk is full
        return MachineError("path", where, error.strerror or "refused", _MACHINE[error.errno])
    told = _OS_ERROR.search(str(error))  # of an extension module: its exceptions carry no number
    if told and int(told[2]) in _MACHINE:
        return MachineError("path", UNNAMED, told[1], _MACHINE[int(told[2])])
    if any(words in str(error) for words in ("PytorchStreamWriter failed writing", "inline_container.cc")):
        return MachineError("path", UNNAMED, "a file could not be written to its end", _MACHINE[errno.ENOSPC])
    return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a failure of the disk say that it was `path`: a write to an open file does not, nor does an extension module.

    Raises:
        MachineError: an extension module's.
        OSError: any other; it is the one that came.
    """
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    except Exception as e:
        known = as_ablation_error(e)
        if isinstance(known, MachineError) and known.value == UNNAMED:
            raise MachineError(known.field, path, known.reason, known.action) from e
        raise


def describe(error: BaseException) -> tuple[str, int]:
    """Return the text after `error: ` (one line) and the exit code of a failure."""
    if isinstance(error, KeyboardInterrupt):
        return "signal=INT or TERM: stopped; the same command goes on from here", STOPPED
    known = as_ablation_error(error) if isinstance(error, Exception) else None
    if known is not None:
        return " ".join(str(known).split()), known.exit_code
    text = f"internal={type(error).__name__}: {shorten(str(error), 300) or 'no message'}; "
    return text + "run it again with --debug for the traceback", INTERNAL


def run_program(main: Callable[[], int], *, debug: bool = False) -> int:
    """Run `main` with SIGTERM as an interrupt, and return its exit code or that of its failure, told in one line."""
    stop_on_sigterm()
    try:
        return main()
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001  the outermost edge: whatever it is, told once
        exec("")  # an interrupt that has passed through `exec` would end `python -m` by its signal, whatever we return
        return tell(e, debug=debug)[1]


def leave(code: int) -> NoReturn:
    """End this process without a last search for cycles among its modules: over a second where torch is loaded."""
    gc.freeze()
    sys.exit(code)


def stop_on_sigterm() -> None:
    """Make SIGTERM an interrupt like Ctrl-C, so that every `finally` runs (main thread only)."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)


def tell(error: BaseException, *, debug: bool = False) -> tuple[str, int]:
    """Write the one line of a failure to stderr (after its traceback, with `debug`); return line and exit code."""
    if debug:
        traceback.print_exception(error)
    line, code = describe(error)
    sys.stderr.write(f"error: {line}\n")
    return line, code
