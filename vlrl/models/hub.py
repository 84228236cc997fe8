"""Checks once whether the model hub can be reached, so that an unreachable hub costs seconds instead of minutes."""

from __future__ import annotations

import logging
import os
from functools import cache

log = logging.getLogger(__name__)
_PATIENCE_S = 10


def check_hub(name: str) -> None:
    """Before the model `name` is loaded: if the hub does not answer, switches huggingface_hub to offline mode and its
    local cache. Without this check huggingface_hub tries to download each of a model's files six times, with pauses
    that add up to minutes."""
    if not os.path.isdir(name):
        _check_hub()


@cache
def _check_hub() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # of requests or httpx, by version
        log.warning("the model hub %s cannot be reached (%s): only models in the local cache can be loaded",
                    constants.ENDPOINT, " ".join(str(error).split()) or type(error).__name__)
        constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets
