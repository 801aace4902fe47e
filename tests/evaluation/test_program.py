"""Whatever fails, a person reads one line with field, value, reason and fix, and a script reads one exit code."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, field_validator

from evaluation.errors import IncompleteError, InputError, MachineError, Stopped
from evaluation.program import as_ablation_error, describe, explain, naming, run_program, shorten
from evaluation.protocol import Protocol
from evaluation.records import Record


class Inner(Record):
    stride: int = Field(ge=1)
    rate: float = Field(default=0.5, gt=0, lt=1, allow_inf_nan=False)
    word: str = "a"

    @field_validator("word")
    @classmethod
    def _known(cls, word: str) -> str:
        if word == "input":
            raise InputError("word", word, "is known to be wrong", "use a")
        if word == "value":
            raise ValueError("word=value: a reason; with a fix: use a")
        if word == "bare":
            raise ValueError("no form at all")
        return word


class Outer(Record):
    cell: Inner


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ({"stride": 0}, "cell.stride=0: should be greater than or equal to 1; use 1 or more"),
        ({"stride": 1, "rate": 2}, "cell.rate=2: should be less than 1; use less than 1"),
        ({"stride": "x"}, "cell.stride=x: should be a valid integer, unable to parse string as an integer; "),
        ({}, "cell.stride=: Field required; add it"),
        ({"stride": 1, "speed": 9}, "cell.speed=9: Extra inputs are not permitted; remove it"),
        ({"stride": 1, "word": "input"}, "word=input: is known to be wrong; use a"),
        ({"stride": 1, "word": "value"}, "word=value: a reason; with a fix: use a"),
        ({"stride": 1, "word": "bare"}, "cell.word=bare: no form at all; correct it"),
        ({"stride": 1, "rate": float("nan")}, "cell.rate="),
    ],
)
def test_validation_errors_become_the_line(cell: dict[str, object], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"cell": cell})
    assert str(explain(caught.value)).startswith(line)


@pytest.mark.parametrize("text", ["{", "", "[]", "3", '{"cell": 3}'])
def test_broken_json_becomes_the_line(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(text)
    line, code = describe(caught.value)
    assert code == 2 and "\n" not in line and "=" in line and ";" in line


def test_the_protocol_s_own_words_reach_the_line() -> None:
    with pytest.raises(ValidationError) as caught:
        Protocol(benchmark="mbpp_plus", n=4, temperature=0.6, top_p=0.95, max_new_tokens=8, ks=(10,))
    assert str(explain(caught.value)).startswith("ks=10: pass@10 needs 1 <= k <= n=4; draw more samples")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a", 1, "b", "c"), 2),
        (MachineError("a", 1, "b", "c"), 3),
        (IncompleteError("a"), 1),
        (Stopped("a"), 75),
        (KeyboardInterrupt(), 75),
        (RuntimeError("x"), 70),
        (AssertionError(), 70),
        (OSError(errno.ENOSPC, "No space left on device", "/store/x"), 3),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), 3),
        (ValueError("I/O error: No such file (os error 2)"), 70),
        (RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/3"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "/store/x"), 3),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 70),
    ],
)
def test_each_failure_has_its_exit_code_and_one_line(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert run_program(fail) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert ("--debug" in err) == (code == 70)


def test_of_a_copy_the_place_that_is_full_is_named() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/from", None, "/to")
    assert str(as_ablation_error(error)).startswith("path=/to: No space left on device")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/3"),
    ],
)
def test_a_failure_of_the_disk_that_names_no_file_gets_the_one_at_hand(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error) if isinstance(error, OSError) else MachineError) as caught, naming(tmp_path / "x"):
        raise error
    line, code = describe(caught.value)
    assert line.startswith(f"path={tmp_path / 'x'}: ") and line.endswith("; free space, or choose another place")
    assert code == 3


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full", "/its/own"), KeyError("x"), InputError("a", 1, "b", "c")]
)
def test_what_names_its_own_file_or_is_no_failure_of_the_disk_stays_as_it_is(error: Exception) -> None:
    before = describe(error)
    with pytest.raises(type(error)) as caught, naming(Path("/at/hand")):
        raise error
    assert caught.value is error
    assert describe(error) == before


def test_the_traceback_is_for_debug_only(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise RuntimeError("x\ny")

    assert run_program(fail, debug=True) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: internal=RuntimeError: x y; ")


def test_a_long_value_or_reason_is_cut_and_kept_on_one_line() -> None:
    assert shorten("a\nb  c") == "a b c"
    assert len(shorten("x" * 1000)) == 60
    line, _ = describe(InputError("samples", "a\nb", "two\nlines", "mend\tit"))
    assert line == "samples=a b: two lines; mend it"


def test_errors_of_others_are_internal() -> None:
    assert as_ablation_error(KeyError("x")) is None


def test_sigterm_is_an_interrupt_that_runs_finally_and_exits_75() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from evaluation.program import run_program\n"
        "def main():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "sys.exit(run_program(main))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (found.returncode, found.stdout) == (75, "cleaned up\n")
    assert "the same command goes on" in found.stderr


def test_leaving_keeps_the_exit_code_what_was_printed_and_what_is_due_at_exit() -> None:
    code = (
        "import atexit\n"
        "from evaluation.program import leave\n"
        "class Ring:\n"  # only a search for cycles finds it: what `leave` spares
        "    def __del__(self):\n"
        "        print('searched')\n"
        "ring = Ring()\n"
        "ring.itself = ring\n"
        "del ring\n"
        "atexit.register(print, 'at exit')\n"
        "print('last words', end=' ')\n"
        "leave(75)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (75, "last words at exit\n", "")
