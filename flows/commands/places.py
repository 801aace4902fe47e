"""What `ablation doctor` asks of the places that a run reaches: store, disks, hub, Prefect server."""

import contextlib
import shutil
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

from evaluation.errors import AblationError
from evaluation.files import sha256_file
from flows.commands.checks import Check
from flows.parameters import Parameters
from flows.planning import make_plan
from tasks.settings import prepare_prefect, settings
from training.backends import LocalBackend
from training.cell import MODELS
from training.store import Store, open_store

HUB_TIMEOUT_S = 5


def examine_places(parameters: Parameters) -> list[Check]:
    """Return every check of a place, in the order in which a run comes to them."""
    return [check_store(parameters), check_disk(parameters), check_hub(parameters), check_server(parameters)]


def check_store(parameters: Parameters) -> Check:
    """Everything that publishing asks of a store, with one small file, which is gone afterwards."""
    store = open_store(parameters.store or str(_nearest(_runs(parameters))))
    return Check(name="store", ok=not (refused := refused_by(store)), detail=refused or f"{store.url} does all it must")


def refused_by(store: Store) -> str | None:
    """Return what a store does not let us do, and why; None if it is a store that runs can publish to."""
    probe, key, backend = Path(__file__), f".doctor-{uuid.uuid4().hex}", store.backend
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("write (s3:PutObject)", lambda: backend.put(probe, key) or True),
        ("read back (s3:GetObject)", lambda: backend.sha256(key) == sha256_file(probe)),
        ("list (s3:ListBucket)", lambda: backend.folders("") is not None),
        ("list uploads (s3:ListBucketMultipartUploads)", lambda: backend.sweep(key) or True),
        ("delete (s3:DeleteObject)", lambda: backend.remove(key) or backend.read(key) is None),
    )
    for step, (what, action) in enumerate(steps):
        try:
            if not action():
                return f"{store.url}: {what}: what it did is not what was asked"
        except (OSError, AblationError) as e:
            if step:
                with contextlib.suppress(OSError, AblationError):
                    backend.remove(key)
            return f"{store.url}: cannot {what}: {e}"
    return None


def check_disk(parameters: Parameters) -> Check:
    """Room for run directories, and for the store where that is a folder; on one disk or on two."""
    totals, runs = make_plan(parameters).totals, _nearest(_runs(parameters))
    copy_gb = totals.checkpoint_gb + totals.sample_gb
    needs = {runs.stat().st_dev: (runs, copy_gb + totals.resume_gb)}
    backend = open_store(parameters.store or str(runs)).backend
    if isinstance(backend, LocalBackend):
        place = _nearest(backend.root)
        at, before = needs.get(place.stat().st_dev, (place, 0.0))
        needs[place.stat().st_dev] = (at, before + copy_gb)
    free = {at: shutil.disk_usage(at).free / 1e9 for at, _ in needs.values()}
    told = [f"{free[at]:.1f} GB free at {at}, {need_gb:.2g} GB needed" for at, need_gb in needs.values()]
    return Check(name="disk", ok=all(free[at] >= need for at, need in needs.values()), detail="; ".join(told))


def check_hub(parameters: Parameters) -> Check:
    """The Hugging Face Hub lets us have the model, or its cache has it; what is shipped needs no hub."""
    from huggingface_hub import constants, get_token, try_to_load_from_cache

    model = MODELS[parameters.grid[0].model]
    hosted = "/" in model.source
    needed = hosted or (parameters.spec.benchmark == "mbpp" and parameters.mbpp is None)
    url = f"{constants.ENDPOINT}/api/models/{model.source}/revision/{model.revision}" if hosted else constants.ENDPOINT
    token = get_token()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as answer:
            return Check(name="hub", ok=True, needed=needed, detail=f"{url} answers {answer.status}")
    except (OSError, ValueError) as e:
        refused = isinstance(e, urllib.error.HTTPError) and e.code in (401, 403)
        why = f"{e}; set HF_TOKEN of an account with access" if refused else f"{getattr(e, 'reason', e)}"
    cached = hosted and isinstance(try_to_load_from_cache(model.source, "config.json", revision=model.revision), str)
    detail = f"{url}: {why}" + ("; the model is in the cache" if cached else "")
    return Check(name="hub", ok=cached, needed=needed, detail=detail)


def check_server(parameters: Parameters) -> Check:
    """The Prefect server answers and, where cells run in its pools, somebody works in them."""
    prepare_prefect()
    from prefect.settings import PREFECT_API_URL

    from tasks.remote import check_workers
    from tasks.server import probe

    url, pools = PREFECT_API_URL.value(), settings().launcher == "deployment"
    if not url:
        detail = "none is configured (PREFECT_API_URL): `ablation run` starts one of its own"
        return Check(name="server", ok=not pools, needed=pools, detail=detail)
    try:
        probe(url)
        if pools:
            check_workers(parameters.experiment, parameters.grid)
    except AblationError as e:
        return Check(name="server", ok=False, detail=str(e))
    return Check(name="server", ok=True, detail=f"{url} answers" + (", with workers in gpu and eval" if pools else ""))


def _runs(parameters: Parameters) -> Path:
    return Path(parameters.runs or f"runs/{parameters.folder}").absolute()


def _nearest(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.is_dir())
