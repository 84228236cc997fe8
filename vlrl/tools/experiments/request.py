"""Defines SweepRequest, the options of `vlrl sweep`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from vlrl.tools.request import option

JOBS = "Number of parallel runs, e.g. 2; they share the CPU, and the GPUs in CUDA_VISIBLE_DEVICES if there are enough."


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """The options of `vlrl sweep`, each with its help text."""

    seeds: int = option(3, "Number of seeds (0, 1, ...) on which the settings are selected.", min=1)
    test_seeds: int = option(5, "Number of further seeds, on which the selected settings are measured.", min=1)
    method: str | None = option(
        None, "grid: every combination of settings; random: --trials random combinations; halving: worse combinations "
              "get fewer seeds. Default: grid, or random if a range is swept.", metavar="grid|random|halving")
    n: int | None = option(None, "With random and halving: number of combinations of settings. Default: "
                                 "16.", "--trials", metavar="N",
                           min=2)
    eta: int | None = option(None, "With halving: the best 1/eta of the combinations go on to the next seed. Default: "
                                   "2.", metavar="N",
                             min=2)
    metric: str = option("reward/mean", "The metric by which settings are compared, e.g. iou or correct_frac.")
    split: str | None = option(None, "The split on which settings are compared. Default: the first of eval.splits.")
    base: bool = option(True, "Also run the unchanged config on the test seeds.")
    seed: int | None = option(None, "With random and halving: seed for choosing the random combinations, e.g. 1. "
                                    "Default: 0.",
                              metavar="N")
    jobs: int = option(1, JOBS, min=1)
    sft: bool = option(False, "Sweep `vlrl sft` instead of `vlrl train`.")
