"""A report with every class of run, every hole, and text that tries to leave its place."""

import math

from evaluation.contamination import Contamination, NearDuplicate, Touched
from evaluation.curves import Criterion, RunEvidence
from evaluation.given import Cost, ReportInput, SampleShown
from evaluation.protocol import Protocol
from evaluation.scores import Counts, Score, estimate_pass_at_ks

HOSTILE = (
    "</pre><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "' onmouseover='document.title=1' x='",
    "<svg/onload=alert(1)>",
    "]]><!--<script>--></style></title></textarea>&lt;b&gt;&amp;",
    "{{constructor.constructor('document.title=1')()}}",
)
PLUS = Protocol(benchmark="mbpp_plus", n=4, temperature=0.8, top_p=0.95, max_new_tokens=64)
OTHER = Protocol(benchmark="mbpp_test276", n=2, temperature=0.8, top_p=1, max_new_tokens=64)
IDS = [f"Mbpp/{i}" for i in range(30)]


def score(protocol: Protocol, passing: list[int]) -> Score:
    n, plus = protocol.n, protocol is PLUS
    counts = [min(n, c) for c in passing]
    found = {str(k): e for k, e in estimate_pass_at_ks([(n, c) for c in counts], protocol.reported_ks).items()}
    return Score(
        label="x", cell="x", global_step=0, benchmark=protocol.benchmark, n=n, num_problems=len(IDS),
        outcomes={"pass": 0, "fail": 0, "timeout": 0, "harness_error": 0},
        pass_at_k={"base": found, "plus": found if plus else None},
        problems={p: Counts(n=n, base=c, plus=c if plus else None, errors=0) for p, c in zip(IDS, counts, strict=True)},
        protocol_sha256=protocol.sha256, prompt_sha256="p", judge_version="j",
    )  # fmt: skip


def run(arm: str, lr: float, ends: dict[int, list[int]], rewards: tuple[float, ...], **more: object) -> RunEvidence:
    label = f"m_{arm}_lr{lr:g}"
    given = {"end": "finished", "onset_step": None, **more}
    return RunEvidence(
        label=label, arm=arm, lr=lr, seed=0, steps=30, checkpoints=(10, 30), rewards=rewards,
        scores={p.benchmark: {s: score(p, c) for s, c in ends.items()} for p in (PLUS, OTHER)},
        figures={"entropy": tuple(0.5 / t for t in range(1, 31)), "seconds": (2.0,) * 30},
        sources=tuple((f"{label}/scores/{PLUS.folder}/global_step_{s}/score.json", f"{s:064x}") for s in ends),
        **given,  # type: ignore[arg-type]
    )  # fmt: skip


def hostile_report() -> ReportInput:
    """Return the input; every free text in it is an attack."""
    level, up, down = [2] * 30, [i % 5 for i in range(30)], [0] * 15 + [2] * 15
    flat, fall = (0.5,) * 30, (0.6,) * 15 + (0.0,) * 15
    runs = (
        run("nobuf", 1e-6, {10: level, 30: up}, flat, signs=(HOSTILE[0],)),
        run("replay", 1e-6, {10: level, 30: [4] * 30}, flat),
        run("nobuf", 3e-6, {10: level, 30: down}, flat),
        run("replay", 3e-6, {10: level, 30: level}, flat),
        run("nobuf", 1e-5, {10: level, 30: [0] * 30}, fall),
        run("replay", 1e-5, {10: level}, (0.5,) * 14 + (math.nan,), end="diverged", onset_step=15),
        run("nobuf", 1e-4, {10: level}, flat[:12], end=None),
        run("replay", 1e-4, {10: level, 30: [0] * 30}, fall),
    )
    samples = tuple(
        SampleShown(
            problem_id=f"Mbpp/{i}", folder="m_nobuf_lr1e-06/global_step_30", index=i, base="pass", plus="fail",
            source=f"def f():\n{payload}\x1b[31m\u202e\ud800", tests_passed=1, tests_total=3,
        )
        for i, payload in enumerate(HOSTILE)
    )  # fmt: skip
    contamination = Contamination(
        touched={"mbpp_plus": Touched(pairs=3, train=2, evaluation=3)},
        clean={"mbpp_plus": tuple(IDS[3:]), "mbpp_test276": tuple(IDS)},
        constant_passable=(),
        overlaps=(),
        near=(NearDuplicate(train_id=HOSTILE[1], evaluation_id="Mbpp/5", benchmark="mbpp_plus", jaccard=0.9),),
        clusters={"mbpp_plus": (("Mbpp/7", "Mbpp/8"),)},
    )
    return ReportInput(
        experiment=f"tiny {HOSTILE[3]}",
        question=f"Does it break? {HOSTILE[4]}",
        registered_sha256="r" * 64,
        model="m",
        protocols=(PLUS, OTHER),
        criterion=Criterion(),
        runs=runs,
        base={"mbpp_plus": score(PLUS, [2] * 20 + [1] * 10), "mbpp_test276": score(OTHER, level)},
        arm_labels={"nobuf": f"no replay {HOSTILE[2]}", "replay": "replay"},
        clean={"mbpp_plus": frozenset(IDS[3:])},
        missing=(f"m_nobuf_lr0.0001 {HOSTILE[1]}",),
        departures=("half the seeds <b>",),
        notes=HOSTILE,
        provenance={"store": f"file:///{HOSTILE[0]}"},
        contamination=contamination,
        samples=samples,
        sources=(("m/scores/x/global_step_0/score.json", "a" * 64),),
        cost=Cost(training_seconds={r.label: 60.0 for r in runs}, stored_bytes={"scores": 10**9}),
    )
