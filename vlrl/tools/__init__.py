"""The jobs behind the subcommands of `vlrl`, one module each, usable without the command line.

    datasets/       files of rows: checked, converted, split, measured
    makers/         rows drawn by code, from pages, simulators and films
    synthesis/      new rows made from rows, runs and a teacher's answers
    tasks/ play/    a task without a model: scaffolded, listed, scored; played by a person
    evaluation/     models measured over data: several answers, seeds, settings and wordings
    experiments/    reports of runs, comparisons, sweeps
    stages/         a run of several stages
    hub/            models and rollouts, exported and published
    clients/        models behind HTTP
    servers/        the model of a config behind HTTP
    machine/        what a run needs, and what this machine can do
    tiny/           the tiny models; cold_start and episode_start alone in vlrl/ import tasks

train, evaluate and run are the Python interface of `vlrl`; docs writes the tables of docs/configuration.md; request.py
makes the options of a job a dataclass.
"""
