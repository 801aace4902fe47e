"""Assert the demo's bands on its own numbers: 3e-4 learns, 3e-3 without replay is dead, nothing is missing."""

import csv
import json
import sys
from pathlib import Path

CELLS, CHECKPOINTS = 8, 2


def main(runs: Path) -> int:
    """Return 0 when every band holds; print each figure beside its band."""
    report = runs / "store" / "reports" / "smoke"
    with (report / "scores.csv").open(encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if (r["suite"], r["subset"], r["k"]) == ("plus", "all", "1")]
    finding = json.loads((report / "finding.json").read_text(encoding="utf-8"))
    value = {r["folder"]: float(r["value"]) for r in rows if r["status"] == "done"}
    base = value["toy/global_step_0"]
    checks = [
        ("scored folders", len(value), len(value) == CELLS * CHECKPOINTS + 1),
        ("missing", finding["missing"], not finding["missing"]),
        ("base pass@1", base, 0.15 < base < 0.5),
    ]
    for arm in ("nobuf", "hardcd_lam0p1"):
        gain = value[f"toy_toy_{arm}_lr3e4/global_step_40"] - base
        checks.append((f"3e-4 {arm}: gain over the base", round(gain, 3), gain >= 0.15))
    dead = value["toy_toy_nobuf_lr3e3/global_step_40"]
    checks.append(("3e-3 nobuf: pass@1", dead, dead < 0.10))
    for name, figure, ok in checks:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {figure}")
    print(finding["sentence"])
    passed = sum(ok for *_, ok in checks)
    print(f"{passed} passed, {len(checks) - passed} failed")
    return 0 if passed == len(checks) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
