"""What `vlrl sweep` is asked for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vlrl.tools.request import option

JOBS = "Runs side by side, e.g. 2; they share the CPU, and the GPUs of CUDA_VISIBLE_DEVICES where there are as many."


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """The options of `vlrl sweep`."""

    seeds: int = option(3, "Seeds by which settings are chosen: 0, 1, ...", min=1)
    test_seeds: int = option(5, "Further seeds, on which the chosen settings are measured.", min=1)
    method: str | None = option(
        None, "grid: every combination; random: --trials drawn ones; halving: worse ones get fewer seeds. Default: "
        "grid, or random where a range is given.", metavar="grid|random|halving")
    n: int | None = option(None, "With random and halving: choices of settings. Default: 16.", "--trials", metavar="N",
                           min=2)
    eta: int | None = option(None, "With halving: one of so many goes on to the next seed. Default: 2.", metavar="N",
                             min=2)
    metric: str = option("reward/mean", "The metric that decides, e.g. iou or correct_frac.")
    split: str | None = option(None, "The split that decides. Default: the first of eval.splits.")
    base: bool = option(True, "Run the config as it is on the test seeds too.")
    seed: int | None = option(None, "With random and halving: another seed draws other settings, e.g. 1. Default: 0.",
                              metavar="N")
    jobs: int = option(1, JOBS, min=1)
    sft: bool = option(False, "Sweep `vlrl sft` instead of `vlrl train`.")
