"""The pages: commands that parse, targets and links that are there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.errors import AblationError
from flows.cli import build_parser, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "deployments/README.md"]


def lines(page):
    """Lines of code: indented ones, and what is between backticks."""
    text = page.read_text()
    indented = [x.strip() for x in text.splitlines() if x.startswith("    ")]
    return indented + re.findall(r"`([^`\n]+)`", text)


def commands(page, program):
    """Command lines of a program, without comments, prompts and the environment before them."""
    found = (
        re.search(rf"(?:^|&& |\.venv/bin/|^\S+=\S+ )({program} .*)", line.partition(" #")[0]) for line in lines(page)
    )
    return [m[1].partition(" && ")[0].strip().rstrip("]") for m in found if m]


def is_whole(command):
    """False for `ablation run EXPERIMENT`, `ablation publish STORE ...`: words for something else."""
    return not re.search(r"\b(EXPERIMENT|STORE|SAMPLES|FILE|NAME|DIR|PATH_OR_REPO)\b|\.\.\.", command)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_of_ablation_parses(page):
    for command in filter(is_whole, commands(page, "ablation")):
        try:
            build_parser().parse_args(shlex.split(command)[1:])
        except AblationError as e:
            assert "is missing" in str(e), f"{command}: {e}"  # `ablation plan`, in a sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_target_of_make_is_there(page):
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = {m for line in lines(page) for m in re.findall(r"\bmake ([a-z-]+)", line)}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for name in re.findall(
        r"`((?:flows|tasks|training|evaluation|tests|deployments|docs|benchmarks)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), name


PLANS = sorted(
    {
        c
        for p in PAGES
        if p.name != "adding.md"
        for c in filter(is_whole, commands(p, "ablation plan"))
        if c.count(" ") > 1
    }
)


@pytest.mark.parametrize("command", PLANS)
def test_every_plan_is_one_that_can_be_made(command, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert "cells" in capsys.readouterr().out


@pytest.mark.campaign
@pytest.mark.parametrize(
    "words",
    sorted(
        {
            " ".join(c.split()[1:3])
            for p in PAGES
            for c in commands(p, "prefect")
            if re.match(r"prefect [a-z-]+ [a-z]", c)
        }
    ),
)
def test_every_command_of_prefect_is_there(words):
    argv = [sys.executable, "-m", "prefect", *words.split(), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
