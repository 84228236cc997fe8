"""The jobs behind the subcommands of `vlrl`, one module each, usable without the command line.

    datasets/       check, convert, split and measure data files
    makers/         generate data sets from web pages, simulators and videos
    synthesis/      make new rows from existing rows, runs and the answers of a teacher model
    tasks/          create and list tasks, score rows with answers, score the rollouts of a run again
    play/           answer samples as a person
    evaluation/     evaluate models, also with several answers per sample, seeds, settings and prompt wordings
    experiments/    reports of runs, comparisons, sweeps
    stages/         a run of several stages
    hub/            export and publish models and rollouts
    clients/        query models over HTTP
    servers/        serve the model of a config over HTTP
    machine/        estimate what a run needs, and check this machine
    tiny/           build and train the tiny models; only tiny/cold_start and tiny/episode_start import tasks

The modules train, evaluate and run are the Python interface of `vlrl`. The module docs writes the tables of
docs/configuration.md, and request.py defines the options of a job as a dataclass."""
