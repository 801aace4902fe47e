"""The downloads, against a hub of our own on this machine, and what is said when there is none."""

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evaluation.errors import MachineError
from evaluation.problems.download import GSM8K_REPOSITORY, GSM8K_REVISION, MBPP_REPOSITORY, MBPP_REVISION
from evaluation.problems.gsm8k import load_gsm8k
from evaluation.problems.mbpp import load_mbpp, load_mbpp_plus
from evaluation.splits import CANONICAL_TEST

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the local copies of the data")

PARTS = {"train": range(601, 975), "test": CANONICAL_TEST, "validation": range(511, 601), "prompt": range(1, 11)}


def hub_files(configuration: str, tables: dict[str, Any]) -> dict[str, bytes]:
    """Return the repository's files as the hub has them: a card that lists one parquet file a split."""
    parquet = pytest.importorskip("pyarrow.parquet")
    files, listing = {}, ""
    for part, table in tables.items():
        buffer = io.BytesIO()
        parquet.write_table(table, buffer)
        files[f"{configuration}/{part}-00000-of-00001.parquet"] = buffer.getvalue()
        listing += f"  - split: {part}\n    path: {configuration}/{part}-*\n"
    card = f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{listing}  default: true\n---\n"
    return {"README.md": card.encode(), **files}


def mbpp_files() -> dict[str, bytes]:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [json.loads(line) for line in (DATA / "mbpp.jsonl").read_text().splitlines()]
    texts = pyarrow.list_(pyarrow.string())
    schema = pyarrow.schema(
        [("task_id", pyarrow.int32())]
        + [(k, pyarrow.string()) for k in ("text", "code", "test_setup_code")]
        + [(k, texts) for k in ("test_list", "challenge_test_list")]
    )
    tables = {
        part: pyarrow.Table.from_pylist([r for r in rows if r["task_id"] in ids], schema=schema)
        for part, ids in PARTS.items()
    }
    return hub_files("full", tables)


def gsm8k_files() -> dict[str, bytes]:
    pyarrow = pytest.importorskip("pyarrow")
    rows = {s: (DATA / f"gsm8k_{s}.jsonl").read_text(encoding="utf-8").splitlines() for s in ("train", "test")}
    return hub_files("main", {s: pyarrow.Table.from_pylist([json.loads(x) for x in r]) for s, r in rows.items()})


@contextlib.contextmanager
def serving(repository: str, revision: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve one data set repository on this machine; yield the hub's address."""
    api = f"/api/datasets/{repository}"
    configuration = str(Path(list(files)[-1]).parent)
    entries = [{"type": "file", "oid": "0" * 40, "size": len(b), "path": p} for p, b in files.items()]

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bytes, etag: str = '"e"') -> None:
            self.send_response(200)
            for key, value in (
                ("Content-Length", str(len(body))),
                ("ETag", etag),
                ("X-Repo-Commit", revision),
                ("Content-Type", "application/json"),
            ):
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            prefix = f"/datasets/{repository}/resolve/{revision}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                name = path.removeprefix(prefix)
                self.answer(files[name], f'"{list(files).index(name)}"')
            elif path.startswith(f"{api}/tree/"):
                below = path.split(revision, 1)[1].strip("/")
                found = [e for e in entries if str(Path(e["path"]).parent) == (below or ".")]
                found += [] if below else [{"type": "directory", "oid": "1" * 40, "size": 0, "path": configuration}]
                self.answer(json.dumps(found).encode())
            elif path.startswith(f"{api}/paths-info/"):
                self.answer(json.dumps(entries).encode())
            elif path in (api, f"{api}/revision/{revision}"):
                siblings = [{"rfilename": p} for p in files]
                self.answer(json.dumps({"id": repository, "sha": revision, "siblings": siblings}).encode())
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.command = "GET"
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@needs_data
def test_gsm8k_comes_from_the_pinned_commit_of_the_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with serving(GSM8K_REPOSITORY, GSM8K_REVISION, gsm8k_files()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        train, test = load_gsm8k()
    local = load_gsm8k(str(DATA))
    assert (train.problems, test.problems) == tuple(part.problems for part in local)
    assert train.revision == test.revision == GSM8K_REVISION


@needs_data
def test_mbpp_comes_from_the_pinned_commit_of_the_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with serving(MBPP_REPOSITORY, MBPP_REVISION, mbpp_files()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        found = load_mbpp(None)
    assert found.problems == load_mbpp(str(DATA / "mbpp.jsonl")).problems
    assert found.revision == MBPP_REVISION
    # Without the hub, the cache serves.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert load_mbpp(None) == found


@needs_data
def test_mbpp_plus_comes_through_evalplus(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MBPP_OVERRIDE_PATH", str(DATA / "MbppPlus-v0.2.0.jsonl"))
    found = load_mbpp_plus(None)
    assert found.problems == load_mbpp_plus(str(DATA / "MbppPlus-v0.2.0.jsonl")).problems
    assert found.revision.startswith("v0.2.0 c24de0a0")


@pytest.mark.parametrize(
    ("load", "flag"), [(load_mbpp, "--mbpp FILE"), (load_mbpp_plus, "--mbpp-plus FILE"), (load_gsm8k, "--gsm8k FOLDER")]
)
def test_without_a_network_the_flag_is_named(monkeypatch, tmp_path, load, flag):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MachineError, match=flag) as error:
        load(None)
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)
