"""The rollout inspector: `vlrl app RUNS_DIR`, and the self-contained page of `vlrl report`.

    library -> index -> details      run folders as frozen dataclasses
    textfiles, queries, table        safe reading of jsonl and YAML; duckdb over rollout files
    analysis, rows, media, notes     comparisons and histories, images, flags and comments; exports, agreement
    html, marks, draw, forms, cards  the same as HTML, without Gradio; tokens, diffs, style.css
    prose, reading                   Markdown and LaTeX written by a model, restricted to known elements; one answer
    curves, notable, report          the report page; film: an episode as GIF or MP4
    site, pages, server, main        the Gradio app; guard, controls, filters, plots, figures, static/
    playground                       one model in memory, streaming answers: asking, models, jobs, in_memory

- torch is imported only when the playground loads a model. Run folders are read through vlrl.store alone.
- Everything in a run folder is untrusted: html.el escapes any text that is not Html; a run id must be in the scan, an
image in the run's own media/; query values are SQL parameters; unreadable files are skipped with a note. Code named by
a run is never executed without `--trust-tasks`.
- All pages are mounted at once, and the address selects the visible one. The query string is the only state, so every
view has a link.
"""

from vlrl.errors import VlrlError


class AppError(VlrlError):
    """An error whose message is shown on the page."""
