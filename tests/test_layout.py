"""The shape of the tree: names that shadow nothing, files of one story, effects where they belong, storeys kept."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "tasks", "training", "evaluation")
MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))

MAX_FILE, MAX_FUNCTION = 330, 45
"""About 300 and about 40: a tenth more is not worth a worse cut."""

LONG_FILES: dict[str, str] = {
    "evaluation/judge/child.py": "what runs inside the cage must be readable in one place, to be believed",
    "training/trainer.py": "the only file that may touch TRL's internals",
}
"""File -> why it is longer."""

LONG_FUNCTIONS: dict[str, str] = {
    "training/config.py:grpo_config": "a table: every setting that makes TRL mean what the specification says",
    "flows/embedded.py:run": "the start of a flow that must not be imported before its environment is set",
    "training/run.py:_steps": "one attempt from the trainer's making to its three endings, in order",
}
"""`file:function` -> why it is longer."""

SHADOWS: dict[str, str] = {
    "evaluation/statistics.py": "the contract names evaluation.statistics; always imported through its package",
}
"""File -> why its name may be that of a standard module."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: the docstring is no part of the limit, since it is what makes a function readable."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    skipped = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - skipped


def test_no_module_is_named_like_a_dependency_the_standard_library_or_a_sibling() -> None:
    """A path entrypoint puts its own folder first on sys.path: `flows/datasets.py` would shadow datasets."""
    installed = set(importlib.metadata.packages_distributions())
    taken = installed | set(sys.stdlib_module_names) | set(PACKAGES) | {"tests", "deployments", "benchmarks"}
    modules = [p for p in MODULES if p.stem != "__init__"]
    found = {name(p) for p in modules if p.stem in taken}
    found |= {name(p) for p in MODULES if p.stem == "__init__" and p.parent.parent != ROOT and p.parent.name in taken}
    assert found == set(SHADOWS) & {name(p) for p in MODULES}


def test_tests_are_no_package_and_have_distinct_names() -> None:
    tests = list((ROOT / "tests").rglob("*.py"))
    assert [name(p) for p in tests if p.name == "__init__.py"] == []
    names = [p.name for p in tests if p.name != "conftest.py"]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []


def test_files_are_of_one_story() -> None:
    found = {name(p): len(p.read_text().splitlines()) for p in MODULES}
    assert {n: k for n, k in found.items() if k > MAX_FILE and n not in LONG_FILES} == {}


def test_functions_are_of_one_thought() -> None:
    found = {f"{name(p)}:{f.name}": length(f) for p in MODULES for f in functions(ast.parse(p.read_text()))}
    assert {n: k for n, k in found.items() if k > MAX_FUNCTION and n not in LONG_FUNCTIONS} == {}


def test_no_allowance_outlives_its_file() -> None:
    for file in [*LONG_FILES, *SHADOWS, *(f.partition(":")[0] for f in LONG_FUNCTIONS)]:
        assert (ROOT / file).is_file(), file


def test_the_environment_is_read_in_one_place() -> None:
    readers = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}:
                readers.add(name(path))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                readers |= {name(path) for a in node.names if a.name in {"environ", "getenv"}}
    assert readers <= {"tasks/settings.py"}


def test_sources_are_ascii_with_docstrings() -> None:
    assert [name(p) for p in MODULES if not p.read_bytes().isascii()] == []
    assert [name(p) for p in MODULES if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_the_top_level_is_that_of_the_design() -> None:
    expected = {"flows", "tasks", "training", "evaluation", "deployments", "tests", "docs", "benchmarks", ".ci"}
    assert expected <= {p.name for p in ROOT.iterdir() if p.is_dir()}
    for file in ("pyproject.toml", "Makefile", "LICENSE", "README.md", "requirements.lock", ".ci/run"):
        assert (ROOT / file).is_file(), file


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.is_file():
        pytest.skip("import-linter is not installed")
    found = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]


@pytest.mark.parametrize(
    "module", ["flows.cli", "flows.planning", "training.store", "evaluation.program", "evaluation.statistics"]
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    """`ablation plan` and every refusal answer at once; a worker that registers flows needs no GPU stack."""
    heavy = "torch transformers trl vllm datasets prefect pandas matplotlib scipy evalplus s3fs"
    code = f"import sys, {module}; print(*sorted(set('{heavy}'.split()) & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
