"""What a cell means in TRL's words: every setting, explicit. docs/training.md has the reason of each."""

from pathlib import Path

from trl.trainer.grpo_config import GRPOConfig

from training.cell import Cell
from training.folder import Runtime
from training.footprint import VLLM_SHARE


def grpo_config(cell: Cell, runtime: Runtime, scratch: Path, longest_prompt: int | None = None) -> GRPOConfig:
    """Return every setting that makes the run mean what the cell says; docs/training.md has the reason of each.

    Batch sizes count completions (verl's count prompts). `steps_per_generation` is left out: it is then the number of
    micro-batches, so that every generation feeds one optimizer step and no old log-probs are needed.

    Args:
        cell: what is trained.
        runtime: where; the micro-batch is lowered to a divisor of a process's share of the step's rollouts.
        scratch: Trainer's own output folder.
        longest_prompt: tokens; sets the context length of a vLLM engine.

    Raises:
        InputError: the step cannot be dealt out evenly among the processes.
    """
    g, cuda = cell.grpo, runtime.device.startswith("cuda")
    rollouts = runtime.share(g)
    micro = min(runtime.micro_batch or rollouts, rollouts)
    while rollouts % micro:
        micro -= 1
    return GRPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rollouts // micro,
        num_generations=g.rollouts_per_prompt,
        max_completion_length=g.max_new_tokens,
        temperature=g.temperature,
        top_p=g.top_p,
        top_k=0,
        beta=g.beta,
        use_bias_correction_kl=False,
        epsilon=g.epsilon,
        importance_sampling_level="token",
        loss_type=g.loss_type,
        scale_rewards=g.scale_rewards,
        mask_truncated_completions=g.mask_truncated,
        num_iterations=1,
        shuffle_dataset=True,
        optim="adamw_torch_fused",
        learning_rate=cell.lr,
        lr_scheduler_type=g.lr_schedule,
        warmup_steps=g.warmup_steps,
        adam_beta1=g.adam_beta1,
        adam_beta2=g.adam_beta2,
        adam_epsilon=g.adam_eps,
        weight_decay=g.weight_decay,
        max_grad_norm=g.max_grad_norm,
        max_steps=cell.steps,
        seed=cell.seed,
        data_seed=cell.seed,
        bf16=cuda and g.compute_dtype == "bfloat16",
        use_cpu=not cuda,
        gradient_checkpointing=cuda,
        use_vllm=runtime.sampler == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=VLLM_SHARE,
        vllm_importance_sampling_correction=False,
        vllm_max_model_length=longest_prompt and longest_prompt + g.max_new_tokens,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=list(runtime.report_to) or "none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=cuda,
        ddp_find_unused_parameters=False,
    )
