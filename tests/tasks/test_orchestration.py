"""Known faults of the orchestrator: what Prefect does not do for us, and that nothing here relies on it."""

import importlib
import pkgutil
import sys
import threading
import time

import pytest
from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL, temporary_settings

import tasks
from evaluation.errors import Stopped
from tasks import launch
from tasks.launch import run_child
from tasks.retries import ONCE_EACH, retriable

ALL = {
    f"{module}.{name}": found
    for module in (m.name for m in pkgutil.iter_modules(tasks.__path__) if m.name != "leash")
    for name, found in vars(importlib.import_module(f"tasks.{module}")).items()
    if isinstance(found, Task)
}


def test_no_task_has_a_cache_or_a_time_limit():
    """ORCHESTRATION-138, ORCHESTRATION-140: neither can go wrong, because neither is used."""
    assert len(ALL) >= 9
    for name, found in ALL.items():
        assert found.cache_policy is NO_CACHE and found.persist_result is False, name
        assert found.timeout_seconds is None, name


FACTOR = {"of": 10}


def helper(x):
    return x * FACTOR["of"]


@task(**ONCE_EACH)
def scored(x):
    return helper(x)


@flow(persist_result=False)
def scoring():
    return scored(2)


@pytest.mark.prefect
def test_a_changed_setting_of_a_helper_changes_the_result(prefect_server):
    """ORCHESTRATION-138: a cache key covers the task's body only; a changed grader would keep the old scores."""
    with temporary_settings({PREFECT_API_URL: prefect_server.url}):
        assert scoring() == 20
        FACTOR["of"] = 99
        assert scoring() == 198


@task(retries=2, retry_condition_fn=retriable, **ONCE_EACH)
def blocked(log):
    threading.Timer(1.0, launch.STOPPING.set).start()
    began = time.monotonic()
    try:
        run_child([sys.executable, "-c", "import time; time.sleep(4)"], log=log)
    except Stopped:
        return time.monotonic() - began


@flow(persist_result=False)
def blocking(log):
    return blocked.submit(log).result()


@pytest.mark.prefect
def test_blocking_work_stops_when_it_is_told(prefect_server, tmp_path):
    """ORCHESTRATION-140: Prefect cannot interrupt a thread, so work that may hang is a child, which can be ended."""
    with temporary_settings({PREFECT_API_URL: prefect_server.url}):
        assert 1.0 <= blocking(tmp_path / "log") < 3
