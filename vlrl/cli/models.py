"""`vlrl extrapolate` and `vlrl tiny`: write models without a training run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples, is_free
from vlrl.errors import ConfigError, did_you_mean
from vlrl.tools.tiny.families import DEFAULT, FAMILIES


@examples(
    "vlrl extrapolate runs/lora/checkpoints/step-000050 runs/lora/checkpoints/step-000100 -o models/beyond",
    "vlrl extrapolate runs/a/checkpoints/step-000100 runs/a -k 0.5 -o models/half",
    "Then evaluate it, and keep it if it is better:",
    "vlrl eval configs/quickstart.yaml --model models/half")
def extrapolate(
    earlier: Annotated[Path, typer.Argument(metavar="A", show_default=False,
                                            help="The earlier run folder, checkpoint or model folder.")],
    later: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The later run folder, checkpoint or "
                                                                                "model folder, of the same model.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", show_default=False,
                                      help="A new or empty folder, e.g. models/beyond.")],
    k: Annotated[float, typer.Option("-k", metavar="NUMBER", help="How far to go beyond B, as a multiple of the "
                                                                  "difference B - A.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Write weights beyond a checkpoint: B + k (B - A), the weights of checkpoint B moved further in the direction in
    which training changed A to B.

    Works for full models and adapters. Config and processor are copied from B. k=0 gives B itself, k=-0.5 the average
    of A and B."""
    from vlrl.tools.stages.extrapolate import extrapolate as write
    done = write(earlier, later, out, k)
    if as_json:
        emit({name: str(v) if isinstance(v, Path) else v for name, v in asdict(done).items()})
    else:
        typer.echo(f"{done.later} + {done.k:g} * ({done.later} - {done.earlier}) -> {done.folder}: {done.moved} of "
                   f"{done.tensors} tensors differ between the two, at a distance of {done.distance:.3g}")


@examples(
    "vlrl tiny --out models/tiny",
    "vlrl tiny --family qwen2_5_vl --out /tmp/random --random",
    "vlrl train configs/quickstart.yaml model.name=models/tiny")
def tiny(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", show_default=False,
                                      help="A new or empty folder, e.g. models/tiny.")],
    family: Annotated[str, typer.Option(metavar="NAME", help=f"Architecture: {', '.join(FAMILIES)}.")] = DEFAULT,
    random: Annotated[bool, typer.Option("--random", help="Random float32 weights, without pretraining.")] = False,
    episodes: Annotated[bool, typer.Option("--episodes", help="Train the embedded model further, to call a tool and "
                                                              "to act over several turns (about five "
                                                              "minutes).")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N",
                                      help="Seed for the weights and the training examples, e.g. 1.")] = 0,
    max_pixels: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False, help=(
        "With --random: the processor's maximum number of pixels per image, e.g. 16384. Default: the value of the "
        "family."))] = None,
) -> None:
    """Build a tiny vision-language model (about 1 M parameters) with a real architecture and processor.

    Without --random the model is pretrained, partly on wrong labels, to locate drawn shapes, to read digits, to answer
    questions about drawn clips and to plan simulated drives. It is saved in bfloat16, and is a starting point that RL
    improves on a CPU within minutes. No network is needed, but the extras vlrl[demo,driving] are."""
    if family not in FAMILIES:
        raise ConfigError(f"--family {family!r} is not known.{did_you_mean(family, FAMILIES)} "
                          f"Known: {', '.join(FAMILIES)}.")
    if not is_free(out):
        raise ConfigError(f"{out} is not an empty folder, and nothing is overwritten: name another folder, or "
                          "delete this folder first")
    if episodes and (random or family != DEFAULT):
        raise typer.BadParameter("trains the embedded model further, so it excludes --random and --family: remove them",
                                 param_hint="--episodes")
    if max_pixels is not None and not random:
        raise typer.BadParameter("needs --random, because a pretrained model has the pixel limit of its family",
                                 param_hint="--max-pixels")
    from vlrl.tools.tiny import models

    if random:
        models.build(family, out, seed=seed, max_pixels=max_pixels)
    elif episodes:
        from vlrl.tools.tiny import episode_start

        episode_start.run(out, seed)
    else:
        from vlrl.tools.tiny import cold_start

        cold_start.run(family, out, seed)
    typer.echo(f"{out}: sha256 {models.weights_sha256(out)}")
