"""What the subcommands of `vlrl` do: one module a job, usable without the command line.

- Runs: dryrun, memory, plan (planadvice), pixelbudget, measure and answers (`vlrl eval`), export, extrapolate,
  weight_changes, status, doctor (trials).
- Servers of the model of a config: record (episodes), chat (for other harnesses).
- Tasks: catalogue and scaffold (templates/), score_rows, rescore, play.
- Data: datacheck (rowcheck: canonical fields, leaks), dataconvert, datasplit, difficulty (prompttable: pass rates as
  columns), and what makes rows (making): makegui, makedriving (drivingscenes, drivingplan), makevideo
  (drawnvideo, realvideo).
- docs writes the tables of docs/configuration.md; tiny_models and tiny_families make tiny models; cold_start makes the
  embedded one, and alone in vlrl/ imports tasks: it learns from grounding and digits, and asks video and driving.
"""
