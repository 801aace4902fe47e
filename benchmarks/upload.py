"""What publishing costs: our upload of 1 GB beside a bare `s3fs` put and a sha256, and what a trainer feels of it.

python benchmarks/upload.py [--gb 1] [--rounds 5]

Against moto's server on loopback, in turns, in one run; each upload is a process of its own, whose CPU seconds
are its own (the server's are left out). The trainer is a loop of optimizer steps on one thread; its CPU
seconds a step are measured with and without our upload beside it, in pairs.
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIECE = 1 << 20
OURS = """
import sys
from pathlib import Path
from training.store import open_store
store, folder, key = open_store(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
assert store.publish(folder, key)
"""
BARE = """
import hashlib, sys
import s3fs
from pathlib import Path
url, folder, key = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
fs = s3fs.S3FileSystem()
for path in sorted(folder.iterdir()):
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    fs.put_file(str(path), f"{url.removeprefix('s3://')}/{key}/{path.name}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = made(Path(name) / "checkpoint", int(args.gb * 1e9))
        with Endpoint() as env:
            found = {"ours": [], "bare": []}
            for number in range(args.rounds):
                for kind, program in (
                    (("bare", BARE), ("ours", OURS)) if number % 2 else (("ours", OURS), ("bare", BARE))
                ):
                    found[kind].append(upload(program, folder, f"{kind}{number}", env))
            tell(found, args.gb)
            beside(folder, env, args.pairs)
    return 0


def made(folder: Path, size: int) -> Path:
    """A folder of one file of random bytes, and its manifest."""
    from evaluation.manifests import Provenance, Revisions, write_manifest

    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as f:
        for _ in range(size // PIECE):
            f.write(os.urandom(PIECE))
    provenance = Provenance(
        cell="benchmark",
        global_step=1,
        fingerprint="0" * 64,
        cell_config=None,
        split_sha256="0" * 64,
        prompt_sha256="0" * 64,
        revisions=Revisions(model="none", datasets={}),
    )
    write_manifest(folder, "checkpoint", provenance)
    return folder


class Endpoint:
    """moto's server, with a bucket."""

    def __enter__(self) -> dict[str, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        own = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        env = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        make = "import s3fs; s3fs.S3FileSystem().mkdir('benchmark')"
        subprocess.run([sys.executable, "-c", make], env=env, check=True)
        return env

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def upload(program: str, folder: Path, key: str, env: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds of one upload, its process's start included."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-c", program, "s3://benchmark", str(folder), key], env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.monotonic() - started
    remove = f"import s3fs; s3fs.S3FileSystem().rm('benchmark/{key}', recursive=True)"
    subprocess.run([sys.executable, "-c", remove], env=env, check=True)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tell(found: dict[str, list[tuple[float, float]]], gb: float) -> None:
    """Print medians, and the ratio of each pair's median."""
    for kind, rounds in found.items():
        wall, cpu = (statistics.median(x) for x in zip(*rounds, strict=True))
        print(f"{kind}: {wall:.2f} s wall ({gb * 1000 / wall:.0f} MB/s), {cpu:.2f} s CPU")
    pairs = list(zip(found["ours"], found["bare"], strict=True))
    print(f"CPU, ours / bare: {statistics.median(a[1] / b[1] for a, b in pairs):.2f}")
    print(f"throughput, ours / bare: {statistics.median(b[0] / a[0] for a, b in pairs):.2f}", flush=True)


def beside(folder: Path, env: dict[str, str], pairs: int) -> None:
    """Print what the trainer's CPU seconds a step are with an upload beside it, against without."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "training/toy_model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    ids = torch.randint(0, model.config.vocab_size, (64, 96))

    def step() -> float:
        started = time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    ratios = []
    for number in range(pairs + 1):
        alone = statistics.median(step() for _ in range(5))
        argv = [sys.executable, "-c", OURS, "s3://benchmark", str(folder), f"beside{number}"]
        process, taken = subprocess.Popen(argv, env=env), []
        time.sleep(1.5)  # past its start
        while process.poll() is None:
            taken.append(step())
        assert process.returncode == 0
        ratios.append(statistics.median(taken) / alone)
        remove = f"import s3fs; s3fs.S3FileSystem().rm('benchmark/beside{number}', recursive=True)"
        subprocess.run([sys.executable, "-c", remove], env=env, check=True)
    told = " ".join(f"{r:.3f}" for r in ratios[1:])
    print(
        f"trainer's CPU a step beside an upload / alone, median of {pairs} pairs: {statistics.median(ratios[1:]):.3f}"
    )
    print(f"  each: {told}")


if __name__ == "__main__":
    sys.exit(main())
