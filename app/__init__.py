"""The rollout inspector: `vlrl app RUNS_DIR`, and the self-contained page of `vlrl report`.

    library -> index -> details      what run folders hold, as frozen dataclasses
    textfiles, queries, table        safe jsonl and YAML; duckdb over rollout files
    insight, rows, media, notes      what is computed from it, pictures, flags and comments; exports, agreement
    html, marks, draw, forms, cards  the same as HTML, without Gradio; tokens, diffs, style.css
    prose, reading                   Markdown and LaTeX of a model as known elements alone; one answer at full width
    curves, telling, report          the page of a report; film: an episode as a GIF or MP4
    site, pages, server, main        the Gradio app; guard, controls, filters, plots, figures, static/
    playground                       one model in memory, answers as they are written: asking, models, jobs, live

- No torch until the playground loads a model. Run folders are read through vlrl.store alone.
- Everything in a run folder is hostile: text goes through html.el, which escapes whatever is not Html; a run id is one
  that the scan lists, a picture one in the run's own media/; values of a query are parameters; files that cannot be
  read are skipped with a note. No code that a run names is run without `--trust-tasks`.
- Pages are mounted at once and the address decides which is in view; its query is the only state, so every view is a
  link.
"""

from vlrl.errors import VlrlError


class AppError(VlrlError):
    """What the inspector cannot show, in words for the page."""
