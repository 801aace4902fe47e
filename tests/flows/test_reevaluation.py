"""`re-evaluation/nightly` on a real server: what lacks a score gets it, from stored samples where that is sound."""

import hashlib
import json
import shutil

import pytest

from evaluation.protocol import Protocol
from flows.experiments import EXPERIMENTS

pytestmark = pytest.mark.prefect

(PROTOCOL,) = EXPERIMENTS["micro"].protocols
CELL = "toy_toy_nobuf_lr3e4"


def nightly(server, *parameters):
    argv = [x for p in ("experiment=micro", *parameters) for x in ("-p", p)]
    return server.run("prefect", "deployment", "run", "re-evaluation/nightly", *argv, "--watch", timeout=600)


def manifests(store):
    kept = [p.parent for p in store.rglob("MANIFEST.json") if "reports" not in p.parts]
    return {p.relative_to(store).as_posix(): (p / "MANIFEST.json").read_bytes() for p in kept}


def counted(folder):
    return json.loads((folder / "score.json").read_text())["problems"]


def under_another_protocol(folder, **changes):
    """Move a stored score to where a changed protocol would have put it."""
    other = Protocol.model_validate(PROTOCOL.model_dump() | changes)
    target = folder.parents[1] / other.folder / folder.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder, target)
    score = json.loads((target / "score.json").read_text())
    assert score["protocol"] == PROTOCOL.model_dump(mode="json")
    score |= {"protocol": other.model_dump(mode="json"), "protocol_sha256": other.sha256}
    text = json.dumps(score)
    (target / "score.json").write_text(text)
    manifest = json.loads((target / "MANIFEST.json").read_text())
    for f in manifest["files"]:
        if f["path"] == "score.json":
            f |= {"sha256": hashlib.sha256(text.encode()).hexdigest(), "size_bytes": len(text)}
    (target / "MANIFEST.json").write_text(json.dumps(manifest))
    return target


@pytest.fixture(scope="module")
def stored(control_worker, tmp_path_factory):
    """A finished `micro`, of which only the store is left: another host's view of it."""
    runs = tmp_path_factory.mktemp("micro")
    done = control_worker.run("flows.cli", "run", "micro", "--runs", str(runs))
    assert done.returncode == 0, done.stderr
    store = tmp_path_factory.mktemp("store")
    shutil.rmtree(store)
    (runs / "store").rename(store)
    return store


def test_a_missing_score_comes_back_and_nothing_else_is_touched(control_worker, stored, tmp_path):
    folder = stored / CELL / "scores" / PROTOCOL.folder / "global_step_2"
    before, counts = manifests(stored), counted(folder)
    samples = (folder / "samples.jsonl").read_bytes()
    shutil.rmtree(folder)

    done = nightly(control_worker, f"store={stored.as_uri()}", f"runs={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    after = manifests(stored)
    mine = folder.relative_to(stored).as_posix()
    assert {k: v for k, v in after.items() if k != mine} == {k: v for k, v in before.items() if k != mine}
    assert counted(folder) == counts
    assert (folder / "samples.jsonl").read_bytes() == samples
    assert not list(tmp_path.glob("*/logs")), "something was trained"
    finding = json.loads((stored / "reports/micro/finding.json").read_text())
    assert not finding["missing"]

    again = nightly(control_worker, f"store={stored.as_uri()}", f"runs={tmp_path}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert manifests(stored) == after


@pytest.mark.parametrize(("changes", "drawn"), [({"ks": (1,)}, False), ({"seed": 7}, True)])
def test_a_changed_protocol_judges_stored_samples_where_that_is_sound(control_worker, stored, tmp_path, changes, drawn):
    folder = stored / CELL / "scores" / PROTOCOL.folder / "global_step_4"
    counts, samples = counted(folder), (folder / "samples.jsonl").read_bytes()
    other = under_another_protocol(folder, **changes)

    done = nightly(control_worker, f"store={stored.as_uri()}", f"runs={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert counted(folder) == counts
    assert (folder / "samples.jsonl").read_bytes() == samples
    log = tmp_path / "evaluation" / "draw.log"
    assert (log.exists() and " samples" in log.read_text()) is drawn
    assert (tmp_path / "fetched").exists() is drawn
    shutil.rmtree(other)


def test_a_store_without_a_cell_is_nothing_to_do(control_worker, tmp_path):
    done = nightly(control_worker, f"runs={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "data").exists()
