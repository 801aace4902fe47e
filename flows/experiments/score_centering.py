"""At an aggressive learning rate, does centering the score limit the drop from peak to final accuracy?

The numbers of `score_centering` (source: the experiment's document, decided in the specification):
3,200 problems / 32 prompts a step = 100 steps, one epoch; a checkpoint every 10 steps, 500 greedy answers each.
Both arms use the policy-gradient loss with w = 1 on the sampler's tokens: with the uncapped importance ratio that the
document names, the correction is identically zero and both arms would be the same run (`departures`).
Tinker's defaults of Adam (beta2 .95, eps 1e-12, no decay, no clipping) are the document's, whose command names the rate
alone.

In fp32 sampler and learner agree and centering has nothing to correct. `score_centering_controls` and the later pairs
of the smoke experiment are positive controls: a stale sampler, and one with coarser weights.

`score_centering_smoke` is the same machinery in miniature (docs/sums.md has its numbers, whatever they are).
"""

from evaluation.findings import Criterion
from evaluation.protocol import Protocol
from training.experiment import Experiment
from training.grpo import Grpo

QUESTION = "At an aggressive learning rate, does score centering limit the drop from peak to final accuracy?"
WEIGHT_ONE = (
    "w = 1 in both arms (REINFORCE on the sampler's tokens) and not the uncapped importance ratio, with which the "
    "correction is identically zero"
)

SCORE_CENTERING = Experiment(
    name="score_centering",
    question=QUESTION,
    model="qwen35_0p8b",
    benchmark="gsm8k",
    num_training_problems=3200,
    arms=("plain", "center"),
    lrs=(1e-4,),
    num_seeds=2,
    steps=100,
    stride=10,
    grpo=Grpo(
        prompts_per_step=32,
        rollouts_per_prompt=8,
        max_new_tokens=512,
        scale_rewards="none",
        importance="one",
        adam_beta2=0.95,
        adam_eps=1e-12,
        weight_decay=0.0,
        max_grad_norm=1e6,
    ),
    lora_rank=32,
    protocols=(
        Protocol(
            benchmark="gsm8k",
            n=1,
            temperature=0.0,
            top_p=1.0,
            max_new_tokens=512,
            prompt="gsm8k/1",
            num_problems=500,
        ),
    ),
    criterion=Criterion(rule="drop"),
    departures=(
        WEIGHT_ONE,
        "no adapter on the output matrix, where the document's command has Tinker's default: tied to the embedding, it "
        "could not be in a complete model",
    ),
    budget_minutes=120,
    needs_gpu=True,
)

SCORE_CENTERING_CONTROLS = SCORE_CENTERING.replace(
    name="score_centering_controls",
    question="Does score centering help where sampler and learner are known to differ?",
    arms=("plain_stale4", "center_stale4", "plain_int8", "center_int8"),
    budget_minutes=240,
)

SCORE_CENTERING_SMOKE = Experiment(
    name="score_centering_smoke",
    question=QUESTION,
    model="sums",
    benchmark="sums",
    num_training_problems=320,
    arms=("plain", "center", "plain_stale4", "center_stale4"),
    lrs=(3e-4,),
    num_seeds=2,
    steps=40,
    stride=10,
    grpo=Grpo(
        prompts_per_step=24,
        rollouts_per_prompt=8,
        max_new_tokens=48,
        scale_rewards="none",
        importance="one",
        compute_dtype="float32",
    ),
    protocols=(Protocol(benchmark="sums", n=1, temperature=0.0, top_p=1.0, max_new_tokens=48, prompt="sums/1"),),
    criterion=Criterion(rule="drop"),
    departures=(WEIGHT_ONE,),
    budget_minutes=30,
    needs_gpu=False,
)
