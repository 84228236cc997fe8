"""The rollout inspector: the web app of `vlrl app RUNS_DIR`, and the self-contained HTML page of `vlrl report`.

    library, index, details          run folders as frozen dataclasses: runs, lists of rollouts, one group in full
    textfiles, queries, table        safe reading of JSONL and YAML files; duckdb queries over rollout files
    analysis, rows, media            comparisons and histories; images and videos
    notes, exports                   flags, comments and the agreement of annotators; selected rollouts as a file
    html, marks, draw, forms, cards  HTML of groups and answers, without Gradio; also tokens, diffs and style.css
    prose                            Markdown and LaTeX of a model as safe HTML
    curves, notable, report, film    the report page; an episode as GIF or MP4
    site, pages, server              the Gradio app; also guard, controls, filters, plots and static/
    playground                       asks one model in memory; also asking, models and in_memory

- torch is imported only when the playground loads a model. Run folders are read only through vlrl.store.
- Everything in a run folder is untrusted. html.el escapes all text that is not Html. A run id must belong to a run
found below RUNS_DIR, and an image to the run's media/ folder. Query values are SQL parameters. Unreadable files are
skipped with a note. Code named by a run is executed only with `--trust-tasks`.
- All pages are mounted at once, and the URL selects the visible one. The query string holds the whole state, so every
view has a link."""

from vlrl.errors import VlrlError


class AppError(VlrlError):
    """An error whose message is shown to the user on the page."""
