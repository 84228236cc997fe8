"""`vlrl plan`: the memory that a run needs, before any GPU is rented."""

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
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that train; those of servers come on top.")] = 1,
    gpu_memory: Annotated[float | None, typer.Option(min=1, help="GiB of each; by default the card's.",
                                                     show_default=False)] = None,
    card: Annotated[str, typer.Option(help="Name of the GPU.")] = "H100",
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt, visual ones included; by "
                                                      "default an image of model.max_pixels and 256 of text.",
                                                      show_default=False)] = None,
    visual_tokens: Annotated[int | None, typer.Option(min=0, help="Those of its image or video.",
                                                      show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory: does a config fit on these GPUs, and what would make it fit?

    Only the shape of the model is read; those of common releases are built in. Exit code 0 when it fits, 1 when it does
    not. `vlrl train CONFIG --dry-run` measures the prompts of the data, for --prompt-tokens. A few
    episodes of a task with an environment are played, to see how much they show.
    """
    from vlrl.tools.machine import plan as tool
    from vlrl.tools.machine import plan_advice
    from vlrl.tools.machine.gpu_specs import CARDS, card_of

    chosen = card_of(card)
    if chosen is None:
        raise ConfigError(f"--card {card!r} is not known; known are {', '.join(c.name for c in CARDS)}. Name any of "
                          "them, and give the memory with --gpu-memory")
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
