"""The recipes of deployments/: what can be known of them without docker, Kubernetes, Slurm or systemd."""

import configparser
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deployments"
YAMLS = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.yaml"))
RECIPES = [p for p in FOLDER.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]


def load(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def rendered(template, **given):
    """Fill a base job template as Prefect's workers do."""
    from prefect.utilities.templating import apply_values

    properties = template["variables"]["properties"]
    defaults = {k: v["default"] for k, v in properties.items() if "default" in v}
    return apply_values(template["job_configuration"], defaults | given)


def pools_of(words):
    """Pools that a command line takes its work from."""
    words = [str(w) for w in words]
    return {b for a, b in itertools.pairwise(words) if a == "--pool"}


@pytest.mark.parametrize("name", YAMLS)
def test_every_file_is_yaml_without_doubled_keys(name):
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [k.value for k, _ in node.value if k.value != "<<"]
            assert len(keys) == len(set(keys)), (name, keys)
            self.flatten_mapping(node)
            return super().construct_mapping(node, deep)

    assert all(d is not None for d in yaml.load_all((FOLDER / name).read_text(), Strict))


def test_variables_in_words_and_in_code_are_the_same():
    pattern = re.compile(r"ABLATION_(?!TEST_)[A-Z][A-Z_]*[A-Z]")
    code = {v for d in ("flows", "tasks", "training", "evaluation") for p in (ROOT / d).rglob("*.py")
            for v in pattern.findall(p.read_text())}  # fmt: skip
    read = set(re.findall(r'os\.environ\.get\("(ABLATION_[A-Z_]+)"', (ROOT / "tasks/settings.py").read_text()))
    words = {v for p in [*PAGES, *RECIPES] for v in pattern.findall(p.read_text())}
    assert code == read
    assert words == read


def test_prefects_variables_in_recipes_and_pages_are_settings_of_prefect():
    import prefect.settings

    named = {v for p in [*PAGES, *RECIPES] for v in re.findall(r"\bPREFECT_[A-Z_]+[A-Z]", p.read_text())}
    assert "PREFECT_API_URL" in named
    for name in named:
        assert getattr(prefect.settings, name).name == name


def test_pools_are_those_that_deploying_makes():
    from flows.deploy import POOLS

    compose = load("docker-compose.yaml")[0]["services"]
    assert {s: pools_of(v["command"]) for s, v in compose.items() if pools_of(v.get("command", []))} == {
        pool: {pool} for pool in POOLS
    }
    containers = [
        c
        for d in load("kubernetes/workers.yaml")
        if d["kind"] == "Deployment"
        for c in d["spec"]["template"]["spec"]["containers"]
    ]
    assert {c["name"]: pools_of(c["args"]) for c in containers} == {pool: {pool} for pool in POOLS}
    assert {d["work_pool"]["name"] for d in load("prefect.yaml")[0]["deployments"]} == set(POOLS)


# --- containers


def dockerfile():
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text()))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_the_image_installs_the_tested_torch_as_an_ordinary_user():
    steps = dockerfile()
    known = {"ARG", "FROM", "RUN", "USER", "WORKDIR", "ENV", "COPY", "LABEL", "STOPSIGNAL", "CMD"}
    assert {word for word, _ in steps} <= known
    wanted = next(d for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
                  if d.startswith("torch"))  # fmt: skip
    runs = [rest for word, rest in steps if word == "RUN"]
    assert [re.findall(r"torch==[\d.]+", r) for r in runs if "torch==" in r] == [[wanted, wanted]]
    users = [i for i, (word, _) in enumerate(steps) if word == "USER"]
    assert steps[users[-1]][1] == "1000"
    for i, (word, rest) in enumerate(steps):
        if word == "COPY":
            assert i > users[-1] and rest.startswith("--chown=ablation")
            assert all((ROOT / source).exists() for source in rest.split()[1:-1])
            assert all(f"!{s}" in (FOLDER / "Dockerfile.dockerignore").read_text().split() for s in rest.split()[1:-1])
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = " ".join(rest for word, rest in steps if word == "COPY")
    assert all(p in copied for p in packages["packages"])
    assert steps[-1][0] == "CMD" and pools_of(json.loads(steps[-1][1])) == {"control"}


def test_the_image_is_made_with_shell_that_parses_and_a_variant_that_is_known(tmp_path):
    runs = [rest for word, rest in dockerfile() if word == "RUN"]
    for run in runs:
        subprocess.run(["sh", "-n", "-c", run], check=True)
    (chosen,) = [r for r in runs if "VARIANT" in r]
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").write_text("#!/bin/sh\n")
    for stand_in in ("pip", "python"):
        (tmp_path / stand_in).chmod(0o755)
    said = {}
    for variant in ("cuda", "cpu", "tpu"):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VARIANT": variant}
        said[variant] = subprocess.run(["sh", "-c", chosen], env=env, capture_output=True, text=True)
    assert [d.returncode for d in said.values()] == [0, 0, 2]
    assert said["cuda"].stdout == "install torch==2.13.0\n" and "whl/cpu" in said["cpu"].stdout


def test_compose_names_what_there_is():
    file, gpu = load("docker-compose.yaml")[0], load("docker-compose.gpu.yaml")[0]
    services = file["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        assert ("image" in service) and not service.get("privileged")
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in file["volumes"]
    assert set(gpu["services"]) <= set(services)
    assert all(
        s["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia" for s in gpu["services"].values()
    )
    assert services["control"]["environment"]["ABLATION_LAUNCHER"] == "deployment"
    assert all("ABLATION_LAUNCHER" not in services[s]["environment"] for s in ("gpu", "eval"))
    example = re.findall(r"(?m)^#?([A-Z_]+)=", (FOLDER / "ablation.env.example").read_text())
    asked = set(re.findall(r"\$\{([A-Z_]+)", (FOLDER / "docker-compose.yaml").read_text()))
    assert {v for v in asked if v.startswith(("AWS_", "ABLATION_", "HF_", "PREFECT_API"))} <= set(example)
    assert asked - set(example) == {
        "VARIANT", "GIT_COMMIT", "POSTGRES_PASSWORD", "PREFECT_UI_API_URL", "SERVER_PORT", "STORE_PORT", "GPU_LIMIT",
        "EVAL_LIMIT",
    }  # fmt: skip
    version = next(d for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
                   if d.startswith("prefect"))  # fmt: skip
    assert services["server"]["image"].split(":")[1].split("-")[0] == re.findall(r">=([\d.]+)", version)[0]


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    from faulty_s3 import Endpoint, settings

    server = Endpoint(tmp_path / "s3.log")
    for name, value in settings(server.url).items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def test_the_buckets_command_makes_it_once_or_finds_it(endpoint):
    import s3fs

    command = load("docker-compose.yaml")[0]["services"]["bucket"]["command"]
    for _ in range(2):
        subprocess.run([sys.executable, *command[1:]], check=True)
    assert s3fs.S3FileSystem(skip_instance_cache=True).ls("") == ["ablation"]


# --- work pools


@pytest.mark.parametrize("name", ["docker-job.yaml", "kubernetes/job.yaml"])
def test_a_job_template_declares_what_it_uses_and_takes_what_the_deployments_give(name):
    template = load(name)[0]
    used = set(re.findall(r"\{\{ *(\w+) *\}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])
    given = {k for d in load("prefect.yaml")[0]["deployments"] for k in d["work_pool"]["job_variables"]}
    assert given <= used
    left = rendered(template, command="prefect flow-run execute", env={}, labels={}, name="n")
    assert "{{" not in json.dumps(left)


def test_a_job_of_kubernetes_has_its_gpu_and_what_the_judge_needs():
    job = rendered(load("kubernetes/job.yaml")[0], command="prefect flow-run execute", env={"A": "b"}, gpus=2)
    pod = job["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert (container["args"], container["env"]) == ("prefect flow-run execute", {"A": "b"})
    assert "command" not in container  # the image has no entry point: the arguments are the command
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"]["runAsNonRoot"] and "hostUsers" not in pod
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert job["job_manifest"]["spec"]["backoffLimit"] == 0 and pod["terminationGracePeriodSeconds"] >= 90
    homes = [m["mountPath"] for m in container["volumeMounts"]]
    assert f"{dict(s for s in dockerfile() if s[0] == 'WORKDIR')['WORKDIR']}/runs" in homes


def test_the_clusters_workers_may_do_what_a_worker_does_and_no_more():
    files = load("kubernetes/workers.yaml")
    made = {(d["kind"], d["metadata"]["name"]) for d in files}
    for d in files:
        if d["kind"] == "RoleBinding":
            assert (d["roleRef"]["kind"], d["roleRef"]["name"]) in made
            assert all((s["kind"], s["name"]) in made for s in d["subjects"])
        if d["kind"] == "Role":
            assert all("*" not in r["verbs"] + r["resources"] and "secrets" not in r["resources"] for r in d["rules"])
        if d["kind"] == "Deployment":
            assert ("ServiceAccount", d["spec"]["template"]["spec"]["serviceAccountName"]) in made
            labels = d["spec"]["template"]["metadata"]["labels"]
            assert d["spec"]["selector"]["matchLabels"] == labels


# --- hosts


@pytest.mark.parametrize("unit", sorted(p.name for p in (FOLDER / "systemd").iterdir()))
def test_a_unit_starts_what_is_there(unit):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(FOLDER / "systemd" / unit)
    service = parser["Service"]
    assert service["User"] == "ablation" and service["Restart"] == "always"
    program, *words = shlex.split(service["ExecStart"])
    assert program.startswith(service["WorkingDirectory"] + "/.venv/bin/")
    if "worker" in unit:
        assert (ROOT / words[0]).is_file() and pools_of(words) == {"%i"}
        assert service["KillMode"] == "mixed" and int(service["TimeoutStopSec"]) >= 90
        assert service["SuccessExitStatus"] == "75"
        done = subprocess.run([sys.executable, ROOT / words[0], "--help"], capture_output=True, text=True, check=True)
        assert {"--pool", "--limit"} <= set(re.findall(r"--\w+", done.stdout))


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (1, False), (3, False), (137, False)])
def test_a_slurm_job_goes_back_to_the_queue_only_when_it_was_stopped(tmp_path, code, requeued):
    for name, body in (
        ("srun", f'echo "$@" > {tmp_path}/ran; exit {code}'),
        ("scontrol", f'echo "$@" > {tmp_path}/said'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "41"}
    done = subprocess.run(["bash", FOLDER / "ablation.sbatch", "a", "b c"], env=env, check=False)
    assert done.returncode == code
    assert (tmp_path / "ran").read_text() == "--kill-on-bad-exit=0 a b c\n"
    assert ((tmp_path / "said").exists() and (tmp_path / "said").read_text() == "requeue 41\n") is requeued


def test_a_slurm_job_is_warned_in_time_and_needs_a_command(tmp_path):
    text = (FOLDER / "ablation.sbatch").read_text()
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(\S+))?$", text))
    assert {"requeue", "open-mode", "ntasks-per-node"} <= set(options)
    sign, _, seconds = options["signal"].partition("@")
    assert sign == "TERM" and int(seconds) >= 90  # to the steps: a B: would warn the shell alone
    done = subprocess.run(["bash", FOLDER / "ablation.sbatch"], capture_output=True, text=True, env={"PATH": "/bin"})
    assert done.returncode != 0 and "name the command" in done.stderr


FAKE_WORKER = """
import os, signal, subprocess, sys, time
assert sys.argv[1:] == ["worker", "start", "--pool", "gpu", "--limit", "2"], sys.argv
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
run = '''
import signal, sys, time
def save(*_):
    time.sleep(0.5); open({saved!r}, "w").close(); sys.exit()
signal.signal(signal.SIGTERM, save)
open({started!r}, "w").close()
time.sleep({seconds})
'''
child = subprocess.Popen([sys.executable, "-c", run], start_new_session=True)
def stop(*_):  # as Prefect's does: it kills what runs
    child.kill(); open({told!r}, "w").close(); sys.exit()
signal.signal(signal.SIGTERM, stop)
if {seconds} > 99:
    time.sleep(600)
os._exit(5)
"""


@pytest.fixture
def our_worker(tmp_path):
    """`our_worker(seconds)`: worker.py over a stand-in for Prefect's, whose one run lasts so long."""
    marks = {name: tmp_path / name for name in ("saved", "started", "told")}

    def start(seconds):
        (tmp_path / "prefect").mkdir()
        (tmp_path / "prefect" / "__init__.py").touch()
        names = {k: str(v) for k, v in marks.items()}
        (tmp_path / "prefect" / "__main__.py").write_text(FAKE_WORKER.format(seconds=seconds, **names))
        argv = [sys.executable, str(FOLDER / "worker.py"), "--pool", "gpu", "--limit", "2"]
        ignored = "trap '' INT; exec " + shlex.join(argv)  # as a shell's & does
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.Popen(["bash", "-c", ignored], env=env, start_new_session=True)

    return start, marks


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_told_to_stop_lets_its_runs_save(our_worker, wait_for, sign):
    start, marks = our_worker
    worker = start(600)
    wait_for(lambda: marks["started"].exists(), 60, "the run")
    os.killpg(worker.pid, sign)  # as a terminal's Ctrl-C and some launchers do: to everybody
    assert worker.wait(60) == 75
    assert marks["saved"].stat().st_mtime <= marks["told"].stat().st_mtime


def test_a_worker_that_ends_by_itself_lets_its_runs_end(our_worker):
    start, marks = our_worker
    began = time.monotonic()
    assert start(2).wait(60) == 5
    assert time.monotonic() - began >= 2 and marks["started"].exists()
