"""The rollout inspector: `vlrl app RUNS_DIR`, and the self-contained page of `vlrl report`. Imports no torch.

    library -> index -> details      what run folders hold, as frozen dataclasses
    insight, media, notes            what is computed from it, pictures, flags and comments
    html, draw, cards, tokens, diffs the same as HTML, without Gradio
    site, pages, server, main        the Gradio app

Everything in a run folder is hostile: paths are checked, texts are escaped, files that cannot be read are skipped with
a note.
"""

from vlrl.errors import VlrlError


class AppError(VlrlError):
    """What the inspector cannot show, in words for the page."""
