"""The command `ablation`: subcommands in `flows/commands/`, one answer on stdout, everything else on stderr.

Exit codes (contracts): 0 done; 1 ended, but something is missing or a check failed; 2 wrong input; 3 this machine lacks
something; 70 an internal error; 75 stopped by a signal. An error is one line, `error: FIELD=VALUE: reason; what to do`;
with `--json` it is also the document (`error/1`), so that stdout is one JSON object whatever happens.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from evaluation.errors import InputError
from evaluation.program import leave, stop_on_sigterm, tell
from flows.commands import COMMANDS, Answer
from tasks.settings import tell_from


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints have the form of every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise the complaint instead of printing the usage.

        Raises:
            InputError: always.
        """
        help_hint = f"see `{self.prog} --help`"
        patterns = (
            (
                r"argument (?P<field>.+?): invalid (?P<kind>\w+) value: '(?P<value>.*)'",
                "is not a whole number",
                help_hint,
            ),
            (r"argument (?P<field>.+?): invalid choice: '(?P<value>.*?)' \(choose from (?P<known>.*)\)", "unknown", ""),
            (r"argument (?P<field>.+?): (?P<reason>expected .*)", "", help_hint),
            (r"the following arguments are required: (?P<field>.*)", "is missing", help_hint),
            (r"unrecognized arguments: (?P<value>.*)", "not known here", help_hint),
        )
        for pattern, reason, action in patterns:
            if m := re.fullmatch(pattern, message, re.DOTALL):
                found = m.groupdict()
                field = found.get("field", "arguments").split("/")[-1].lstrip("-")
                known = found.get("known", "").replace("'", "")
                raise InputError(
                    field, found.get("value", ""), found.get("reason", reason), action or f"use one of {known}"
                )
        raise InputError("arguments", " ".join(sys.argv[1:]), message, help_hint)


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    everywhere = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    everywhere.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    everywhere.add_argument("--debug", action="store_true", help="tracebacks and all log lines")
    parser = Parser(
        prog="ablation", description=(__doc__ or "").partition("\n")[0], parents=[everywhere], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, parents=[everywhere], allow_abbrev=False)
        command.configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json, debug = "--json" in words, "--debug" in words
    _prepare_streams(debug)
    stop_on_sigterm()
    out = sys.stdout
    try:
        args = build_parser().parse_args(words)
        with contextlib.redirect_stdout(sys.stderr):  # what a library prints is no part of the answer
            answer = COMMANDS[args.command].execute(args)
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001  the outermost edge: whatever it is, told once
        line, code = tell(e, debug=debug)
        answer = Answer({"schema": "error/1", "error": line, "exit_code": code}, "", code)
    text = json.dumps(answer.document, allow_nan=False) if as_json else answer.text
    if text:
        _say(text, out)
    return answer.exit_code


def _prepare_streams(debug: bool) -> None:
    """Send logs to stderr, and let no character of a file name or a program break either stream."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    tell_from(logging.DEBUG if debug else logging.INFO)


def _say(text: str, out: TextIO) -> None:
    """Write the answer; a reader that has left (`| head`) changes neither the work done nor its exit code."""
    try:
        out.write(text + "\n")
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # the flush at exit would complain again


def command() -> NoReturn:
    """Be the command `ablation`."""
    leave(main())


if __name__ == "__main__":
    command()
