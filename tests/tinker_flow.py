"""`ablation` with the full experiment's miniature in its place: `python -m tinker_flow run score_centering ...`.

Sizes, rates and problems are the tests'; objective, arms, adapters and rule are those of `score_centering`.
"""

import sys

from flows.cli import main
from flows.experiments import EXPERIMENTS, SCORE_CENTERING, SCORE_CENTERING_SMOKE

MINI = SCORE_CENTERING.replace(
    model="sums",
    benchmark="sums",
    num_training_problems=SCORE_CENTERING_SMOKE.num_training_problems,
    lrs=(3e-3,),
    num_seeds=1,
    steps=4,
    stride=2,
    grpo=SCORE_CENTERING.grpo.replace(
        prompts_per_step=8, rollouts_per_prompt=4, max_new_tokens=48, compute_dtype="float32"
    ),
    lora_rank=4,
    protocols=(SCORE_CENTERING_SMOKE.protocols[0].replace(num_problems=40),),
    needs_gpu=False,
)

if __name__ == "__main__":
    EXPERIMENTS[MINI.name] = MINI
    sys.exit(main())
