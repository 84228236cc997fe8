"""`vlrl plan`: estimates the memory that a run needs, before any GPU is rented."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.tools.machine.plan import Plan
    from vlrl.tools.machine.plan_advice import Change


@examples(
    "vlrl plan configs/models/qwen2_5_vl_7b.yaml task=grounding --gpus 8 --gpu-memory 80",
    "vlrl plan configs/models/qwen2_5_vl_7b.yaml task=grounding model.lora.rank=0 engine=vllm --gpus 8",
    "vlrl plan configs/models/qwen2_5_vl_3b.yaml task=grounding --card 'RTX 4090'")
def plan(
    config: ConfigPath, settings: Words = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs for training, not counting those of inference "
                                                  "servers.")] = 1,
    gpu_memory: Annotated[float | None, typer.Option(min=1, show_default=False, help=(
        "Memory of each GPU in GiB. Default: the memory of --card."))] = None,
    card: Annotated[str, typer.Option(help="Name of the GPU model.")] = "H100",
    prompt_tokens: Annotated[int | None, typer.Option(min=1, show_default=False, help=(
        "Tokens per prompt, including visual tokens. Default: an image of model.max_pixels and 256 text "
        "tokens."))] = None,
    visual_tokens: Annotated[int | None, typer.Option(min=0, help="Visual tokens per prompt.",
                                                      show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate GPU memory: does a config fit on these GPUs, and if not, what would make it fit?

    Only the model's architecture is read, not its weights; the architectures of common releases are built in. The exit
    code is 0 if the run fits and 1 if it does not. To measure the prompts of your data, for --prompt-tokens, use `vlrl
    train CONFIG --dry-run`. If the task has an environment, a few episodes are played to measure how much text and how
    many images they contain."""
    from vlrl.tools.machine import plan as tool
    from vlrl.tools.machine import plan_advice
    from vlrl.tools.machine.gpu_specs import CARDS, card_of

    chosen = card_of(card)
    if chosen is None:
        raise ConfigError(f"--card {card!r} is not known. Known: {', '.join(c.name for c in CARDS)}. Name one of "
                          "these cards, and give the memory of your card with --gpu-memory")
    words = list(settings or ())
    loaded = load(config, words)
    keywords: dict[str, Any] = {"prompt_tokens": prompt_tokens, "visual_tokens": visual_tokens,
                                "observed": tool.observe(loaded)}
    result = tool.plan(loaded, gpus, chosen, gpu_memory, **keywords)
    remedies = [] if result.fits else plan_advice.changes(config, words, result, **keywords)
    if as_json:
        emit(_plain(result) | {"changes": [{"settings": c.words, **_plain(c.plan)} for c in remedies]})
    else:
        _print(result, remedies)
    if not result.fits:
        raise typer.Exit(1)


def _plain(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "fits": plan.fits, "tight": plan.tight}


def _print(plan: Plan, remedies: list[Change]) -> None:
    from vlrl.tools.machine import plan as tool
    from vlrl.tools.machine import plan_advice
    advice = [] if plan.fits else ["", *plan_advice.render_changes(remedies)]
    typer.echo("\n".join([*tool.render(plan), *advice]))
