"""Names of settings in TRL, EasyR1, verl, VLM-R1 and ms-swift, for messages about unknown settings.

docs/coming-from.md lists the same names, with differences in meaning."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {
    "rollout.prompts_per_step": "per_device_train_batch_size steps_per_generation generation_batch_size "
        "gradient_accumulation_steps rollout_batch_size",
    "rollout.minibatches": "gradient_accumulation_steps global_batch_size",
    "steps": "max_steps",
    "epochs": "num_train_epochs total_epochs",
    "rollout.group_size": "num_generations n",
    "eval.temperature": "num_generations_eval val_override_config",
    "rollout.max_new_tokens": "max_completion_length max_response_length",
    "rollout.temperature": "temperature",
    "rollout.updates": "num_iterations ppo_epochs",
    "train.lr": "learning_rate lr",
    "train.schedule": "lr_scheduler_type",
    "train.warmup": "warmup_steps warmup_ratio lr_warmup_ratio",
    "train.betas": "adam_beta1 adam_beta2 betas",
    "train.weight_decay": "weight_decay",
    "train.max_grad_norm": "max_grad_norm",
    "algo.kl_coef": "beta disable_kl kl_coef",
    "algo.kl": "use_bias_correction_kl kl_penalty",
    "algo.clip_low": "epsilon clip_ratio_low",
    "algo.clip_high": "epsilon_high clip_ratio_high",
    "algo.loss": "delta loss_type importance_sampling_level clip_ratio_dual",
    "algo.aggregation": "loss_type loss_avg_mode",
    "algo.advantage": "scale_rewards multi_objective_aggregation adv_estimator advantage_estimator",
    "algo.weights": "top_entropy_quantile off_policy_mask_threshold",
    "algo.entropy": "entropy_coef use_adaptive_entropy",
    "algo.reference": "sync_ref_model",
    "algo.correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "algo.mask_truncated": "mask_truncated_completions overlong_filter",
    "task.rewards": "reward_weights",
    "task.parts": "reward_function reward_funcs reward_method external_plugins",
    "model.name": "model_name_or_path model_path model",
    "model.dtype": "dtype bf16 fp16 torch_dtype",
    "model.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "model.lora.rank": "use_peft lora_r rank lora_rank tuner_type train_type",
    "model.lora.alpha": "lora_alpha alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.quantize": "load_in_4bit quant_bits",
    "model.lora.target": "lora_target_modules target_modules",
    "engine.name": "use_vllm vllm_mode",
    "engine.memory": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "engine.tensor_parallel": "vllm_tensor_parallel_size tensor_parallel_size",
    "engine.sleep": "vllm_enable_sleep_mode sleep_level",
    "engine.top_p": "top_p",
    "engine.top_k": "top_k",
    "engine.servers": "vllm_server_base_url",
    "run.dir": "output_dir save_checkpoint_path",
    "save.every": "save_steps save_freq",
    "save.keep": "save_total_limit save_limit",
    "eval.every": "eval_strategy eval_steps val_freq",
    "resume": "resume_from_checkpoint load_checkpoint_path find_last_checkpoint",
    "log.samples_every": "log_completions",
    "log.trackers": "report_to logger",
    "log.project": "project project_name",
    "seed": "seed data_seed",
    "curriculum.name": "shuffle_dataset shuffle dataset_shuffle",
    "data.train": "train_files data_file_paths dataset",
    "data.heldout": "val_files val_dataset",
    "data.heldout_share": "val_split_ratio split_dataset_ratio",
    "data.columns": "prompt_key answer_key image_key columns",
    "data.stream": "streaming dataset_streaming",
    "data.shuffle_buffer": "shuffle_buffer_size buffer_size streaming_shuffle_buffer",
    "task.prompt": "format_prompt",
    "limits.prompt_tokens": "max_prompt_length max_length",
    "engine.batch_rollouts": "val_batch_size",
    "model.max_pixels": "max_pixels",
    "model.min_pixels": "min_pixels",
    "algo.kl_in": "use_kl_loss",
    "curriculum.keep": "online_filtering dynamic_sample",
    "train.tokens_per_batch": "micro_batch_size_per_device_for_update dynamic_batching",
    "train.packing": "padding_free",
    "model.train": "freeze_vision_tower freeze_vision_modules freeze_vit freeze_aligner freeze_llm",
    "train.min_lr_ratio": "min_lr_ratio",
    "data.root": "image_folders image_dir",
    "algo.critic.lr": "critic.optim.lr",
    "algo.critic.clip": "cliprange_value",
    "algo.critic.warmup": "critic_warmup",
    "algo.critic.gamma": "gamma",
    "algo.critic.lam": "lam",
}
"""Setting of vlrl -> its names in other frameworks, separated by spaces. A name is only the part after the last dot,
unless this part is ambiguous."""


_MOST = 5
"""Maximum number of names that one message translates."""


def translation(name: str) -> str:
    """Text to append to a message about an unknown setting: `" Here it is train.lr (docs/coming-from.md)."` if `name`
    is a name of another framework, else ""."""
    own = _here(name)
    return f" Here it is {own} (docs/coming-from.md)." if own else ""


def similar_translation(name: str) -> str:
    """Like `translation`, for a misspelt name of another framework."""
    names = {one.rpartition(".")[2] for names in _NAMES.values() for one in names.split()}
    near = difflib.get_close_matches(name.rpartition(".")[2], sorted(names), n=1, cutoff=0.85)
    return translation(near[0]) if near else ""


def translations_below(name: str, value: Any) -> str:
    """Text to append to a message about an unknown section with the content `value`: `" Here worker.actor.optim.lr is
    train.lr (docs/coming-from.md)."` if other frameworks have settings of these names, else ""."""
    hints = [f"{leaf} is {own}" for leaf in _leaves(name, value) if leaf != name and (own := _here(leaf))]
    more = ", ..." if hints[_MOST:] else ""
    return f" Here {', '.join(hints[:_MOST])}{more} (docs/coming-from.md)." if hints else ""


def _here(name: str) -> str:
    whole = [setting for setting, names in _NAMES.items() if "." in name and name in names.split()]
    word = name.rpartition(".")[2]
    return " or ".join(whole or (setting for setting, names in _NAMES.items() if word in names.split()))


def _leaves(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield name
    else:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
