"""`ablation doctor`: each check with its known answer, on a host that is made up where ours has not got it."""

import http.server
import json
import re
import threading
from pathlib import Path

import pytest

from evaluation.errors import IncompleteError, MachineError
from flows.cli import main
from flows.commands import checks, places, proof
from flows.commands.checks import Check, check_gpu, check_judge, need_bytes
from flows.commands.places import check_disk, check_hub, check_server, check_store, refused_by
from flows.parameters import Parameters
from flows.planning import make_plan
from training.backends import LocalBackend
from training.store import Store


def of(experiment="smoke", **more):
    return Parameters.model_validate({"experiment": experiment, **more})


# --- GPU


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`host("NAME, total, used", ...)`: a host whose nvidia-smi lists these devices, in MiB."""

    def make(*rows, visible=None):
        listed = "".join(f"{i}\\n" for i in range(len(rows)))
        body = f'case "$*" in *=index*) printf "{listed}" ;; *) printf "' + "\\n".join(rows) + '\\n" ;; esac'
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def test_a_cell_takes_what_the_trainer_reckons():
    """22 bytes a parameter with replay, 18 without, and 3 GiB; no vLLM here to make room for."""
    full = 1_720_574_976
    assert need_bytes(of("full")) == full * 22 + (3 << 30)
    assert need_bytes(of("full", cells=["qwen3_1p7b_base_mbpp_nobuf_lr6e6"])) == full * 18 + (3 << 30)


@pytest.mark.parametrize(
    ("rows", "ok", "words"),
    [
        (["H100, 81559, 500"] * 2, True, "2 x H100, 85 GB free on the fullest; a cell takes 41 GB"),
        (["H100, 81559, 500", "H100, 81559, 50000"], False, "2 x H100, 33 GB free on the fullest"),
        (["T4, 15360, 3"], False, "1 x T4, 16 GB free"),
    ],
)
def test_the_fullest_device_decides(host, monkeypatch, rows, ok, words):
    monkeypatch.setattr(checks, "check_torch", lambda num, needed: Check(name="torch", ok=True, detail=str(num)))
    host(*rows)
    gpu, torch = check_gpu(of("full"))
    assert (gpu.ok, gpu.needed) == (ok, True)
    assert gpu.detail.startswith(words) and torch.detail == str(len(rows))


def test_hidden_devices_are_none(host):
    host("H100, 81559, 500", visible="")
    (gpu,) = check_gpu(of("full"))
    assert not gpu.ok and "hidden" in gpu.detail


def test_a_torch_that_does_not_see_the_devices_is_told(host):
    """The suite's torch is the CPU build: what people get who install it on a GPU host."""
    host("H100, 81559, 500")
    found = {c.name: c for c in check_gpu(of("full"))}
    assert found["gpu"].ok
    assert not found["torch"].ok and found["torch"].needed and "sees 0 of 1" in found["torch"].detail


# --- store


class Refusing(LocalBackend):
    """A folder that refuses one call, as S3 does where a permission is lacking."""

    def __init__(self, root, refused):
        super().__init__(root)
        self.refused = refused

    def __getattribute__(self, name):
        if name == super().__getattribute__("__dict__").get("refused"):
            raise PermissionError(f"AccessDenied when calling {name}")
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("refused", "permission"),
    [
        (None, None),
        ("put", "s3:PutObject"),
        ("sha256", "s3:GetObject"),
        ("folders", "s3:ListBucket)"),
        ("sweep", "s3:ListBucketMultipartUploads"),
        ("remove", "s3:DeleteObject"),
    ],
)
def test_a_lacking_permission_of_the_store_is_named_and_nothing_is_left(tmp_path, refused, permission):
    said = refused_by(Store("s3://b/p", Refusing(tmp_path, refused)))
    if permission is None:
        assert said is None
    else:
        assert said is not None and said.startswith("s3://b/p: cannot ") and permission in said and refused in said
    assert [p for p in tmp_path.iterdir() if refused != "remove"] == []


class Lying(LocalBackend):
    """A store that reads back other bytes, or does not delete."""

    def __init__(self, root, about):
        super().__init__(root)
        self.about = about

    def sha256(self, key):
        return "0" * 64 if self.about == "bytes" else super().sha256(key)

    def remove(self, key):
        if self.about != "delete":
            super().remove(key)


@pytest.mark.parametrize(("about", "what"), [("bytes", "read back"), ("delete", "delete")])
def test_a_store_that_does_not_do_what_it_says_is_told(tmp_path, about, what):
    said = refused_by(Store("file:///s", Lying(tmp_path, about)))
    assert said is not None and said.startswith(f"file:///s: {what}")


def test_every_permission_is_one_that_the_page_lists():
    page = (Path(__file__).resolve().parents[2] / "docs/team.md").read_text()
    source = Path(places.__file__).read_text()
    asked = set(re.findall(r"s3:\w+", source))
    assert len(asked) == 5
    assert asked | {"s3:AbortMultipartUpload"} == set(re.findall(r"s3:[A-Z]\w+", page))


def test_a_store_on_s3_is_tried_with_everything(tmp_path, monkeypatch):
    from faulty_s3 import Endpoint, settings

    server = Endpoint(tmp_path / "s3.log")
    try:
        for name, value in settings(server.url).items():
            monkeypatch.setenv(name, value)
        assert "bucket does not exist" in check_store(of(store="s3://absent/p")).detail
        import s3fs

        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        fs.mkdir("there")
        found = check_store(of(store="s3://there/p"))
        assert found.ok, found.detail
        assert fs.find("there") == []
    finally:
        server.close()


# --- disk, hub, server


def test_disk_is_counted_once_for_runs_and_once_more_for_a_store_beside_them(tmp_path, monkeypatch):
    need = {}
    for store in ("s3://bucket/p", str(tmp_path / "a store")):
        found = check_disk(of("full", runs=str(tmp_path), store=store))
        need[store] = float(found.detail.rpartition(", ")[2].split()[0])
    totals = make_plan(of("full")).totals
    assert need["s3://bucket/p"] == pytest.approx(totals.checkpoint_gb + totals.sample_gb + totals.resume_gb, rel=0.05)
    assert need[str(tmp_path / "a store")] > need["s3://bucket/p"]
    free = float(found.detail.split()[0])
    assert found.ok == (free >= need[str(tmp_path / "a store")])


@pytest.fixture
def hub(monkeypatch):
    """A hub on loopback: `hub.answers[path] = status`."""
    from huggingface_hub import constants

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.status = [], 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


def test_the_hub_is_asked_for_the_pinned_model_with_the_token(hub):
    found = check_hub(of("full"))
    assert found.ok and found.needed
    ((path, token),) = hub.asked
    assert path.startswith("/api/models/Qwen/Qwen3-1.7B-Base/revision/ea980cb0a6c2") and token == "Bearer hf_secret"
    assert "hf_secret" not in found.detail


def test_a_hub_that_refuses_says_what_to_set(hub):
    hub.status = 401
    found = check_hub(of("full"))
    assert not found.ok and "HF_TOKEN" in found.detail


def test_a_model_in_the_cache_needs_no_hub(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert not check_hub(of("full")).ok
    revision = "ea980cb0a6c2ae4b936e82123acc929f1cec04c1"
    cached = tmp_path / "models--Qwen--Qwen3-1.7B-Base" / "snapshots" / revision / "config.json"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    assert file_download.try_to_load_from_cache("Qwen/Qwen3-1.7B-Base", "config.json", revision=revision)
    found = check_hub(of("full"))
    assert found.ok and "the model is in the cache" in found.detail and hub.asked == []


def test_what_is_shipped_needs_no_hub(hub):
    assert not check_hub(of("smoke")).needed
    assert check_hub(of("smol")).needed and not check_hub(of("smol", mbpp="m", mbpp_plus="p")).needed


@pytest.mark.prefect
def test_the_server_and_its_workers(deployed, monkeypatch):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: deployed.url}):
        assert check_server(of()).ok
        monkeypatch.setenv("ABLATION_LAUNCHER", "deployment")
        lacking = check_server(of())
        assert not lacking.ok and lacking.needed and "needs an online worker" in lacking.detail
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        monkeypatch.setenv("ABLATION_LAUNCHER", "process")
        assert not check_server(of()).ok


# --- what it all means


@pytest.mark.parametrize(
    ("failing", "code"),
    [
        ([], 0),
        ([("hub", "machine", False)], 0),
        ([("gpu", "machine", True)], 3),
        ([("judge: plain", "proof", True)], 1),
        ([("judge: plain", "proof", True), ("gpu", "machine", True)], 3),
    ],
)
def test_exit_codes(monkeypatch, capsys, failing, code):
    made = [Check(name=n, kind=k, needed=needed, ok=False, detail="no") for n, k, needed in failing]
    monkeypatch.setattr(checks, "examine_machine", lambda _: [Check(name="python", ok=True, detail="3.11"), *made])
    monkeypatch.setattr(places, "examine_places", lambda _: [])
    assert main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0) and found["schema"] == "doctor/1"
    assert [set(c) for c in found["checks"]] == [{"name", "ok", "detail", "needed", "kind"}] * (1 + len(made))
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == f"smoke {'can' if code == 0 else 'cannot'} run here"


def test_a_judge_that_lets_a_cheat_pass_fails_as_a_proof(monkeypatch):
    from evaluation.judge import audit

    honest = audit.audit(True)
    assert all(c.ok for c in honest)
    passed = [type(honest[0])(name=c.name, ok=c.name != "no asserts", detail=c.detail) for c in honest]
    monkeypatch.setattr(audit, "audit", lambda caged: passed)
    failed = [c for c in check_judge() if not c.ok]
    assert [(c.name, c.kind) for c in failed] == [("judge: no asserts", "proof")]


def test_a_trainer_that_fails_is_a_failed_proof_and_a_machine_without_is_not(monkeypatch):
    def fails(rank):
        raise IncompleteError("loss=NaN: at step 1")

    monkeypatch.setattr(proof, "_compared", fails)
    found = proof.prove_resume()
    assert [(c.ok, c.kind, c.detail) for c in found] == [(False, "proof", "loss=NaN: at step 1")] * 2

    def lacks(rank):
        raise MachineError("disk", "/tmp", "is full", "make room")

    monkeypatch.setattr(proof, "_compared", lacks)
    with pytest.raises(MachineError):
        proof.prove_resume()
