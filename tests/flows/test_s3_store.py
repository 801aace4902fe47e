"""A whole experiment whose store is S3, on a server on loopback: the same command, another URL."""

import json

import pytest
from faulty_s3 import Endpoint, FaultyProxy, settings

pytestmark = pytest.mark.prefect

SECRET = settings("")["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture
def proxy(tmp_path, monkeypatch):
    endpoint = Endpoint(tmp_path / "s3.log")
    proxy = FaultyProxy(endpoint)
    for name, value in settings(proxy.url).items():
        monkeypatch.setenv(name, value)
    from training.s3 import S3Backend

    S3Backend("micro-bucket").fs.mkdir("micro-bucket")
    yield proxy
    proxy.close()
    endpoint.close()


def test_micro_on_s3_with_faults_then_again_with_nothing_to_do(prefect_server, proxy, tmp_path):
    runs, env = tmp_path / "runs", settings(proxy.url)
    argv = ("flows.cli", "run", "micro", "--runs", str(runs), "--store", "s3://micro-bucket/team/x", "--json")
    proxy.share, proxy.left, proxy.faults = 0.1, 40, ("500", "503", "reset", "lost", "cut_up", "corrupt_up")
    first = prefect_server.run(*argv, timeout=600, **env)
    assert first.returncode == 0, first.stderr
    assert proxy.injected
    assert set(json.loads(first.stdout)["cells"].values()) == {"stable"}
    assert all(n == 1 for key, n in proxy.sent.items() if "/global_step_" in key), proxy.sent

    before = {k: n for k, n in proxy.sent.items() if "/reports/" not in k and ".probe-" not in k}
    second = prefect_server.run(*argv, timeout=600, **env)
    assert second.returncode == 0, second.stderr
    assert {k: n for k, n in proxy.sent.items() if "/reports/" not in k and ".probe-" not in k} == before

    found = prefect_server.run("flows.cli", "verify", "s3://micro-bucket/team/x", "--json", **env)
    assert json.loads(found.stdout)["ok"], found.stdout
    everything = [first.stdout, first.stderr, second.stderr, *(p.read_bytes() for p in runs.rglob("*") if p.is_file())]
    assert not [t for t in everything if (SECRET if isinstance(t, str) else SECRET.encode()) in t]
    assert not list(runs.rglob("store"))
