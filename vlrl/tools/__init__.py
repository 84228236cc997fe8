"""What the subcommands of `vlrl` do: one module a job, usable without the command line.

    datasets/       files of rows: checked, converted, split, measured
    makers/         rows drawn by code, from pages, simulators and films
    synthesis/      new rows made from rows, runs and a teacher's answers
    tasks/ play/    a task without a model: begun, listed, scored; played by a person
    evaluation/     models measured over data: several answers, seeds, settings and wordings
    experiments/    runs reported, compared, and started by the dozen
    stages/         a run of several stages
    hub/            models and rollouts that are exported and published
    clients/        models of others behind HTTP
    servers/        the model of a config behind HTTP
    machine/        what a run needs, and what this machine can do
    tiny/           the tiny models; cold_start and episode_start alone in vlrl/ import tasks

train, evaluate and run are what `vlrl` offers to Python; docs writes the tables of docs/configuration.md.
"""
