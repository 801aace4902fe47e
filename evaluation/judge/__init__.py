"""The judge: programs run in a cage, verdicts are made outside of it."""

from evaluation.judge.judge import JUDGE_VERSION, Judge

__all__ = ["JUDGE_VERSION", "Judge"]
