"""The process that runs math-verify: one JSON question a line in, one JSON answer a line out. Run by math.py alone.

A question that takes more CPU seconds than it may ends the process, wherever it is: the limit is the kernel's, so
neither C code nor an exception handler of the library can outlast it. The end of the input ends it as well.
"""

import json
import os
import signal
import sys

MEMORY = 4 * 2**30
"""Bytes of address space; an expression that wants more fails."""


def expression(text, parse, config):
    """The parsed expression, or [] for what is none. Read as the content of one box, so nothing is searched for."""
    return parse(f"\\boxed{{{text}}}", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)


def answer(question, parse, verify, config):
    """{"value": whether the gold answer can be read, or whether the given one equals it}, or {"error": why not}."""
    try:
        gold = expression(question["gold"], parse, config)
        if "answer" not in question:
            return {"value": bool(gold)}
        given = expression(question["answer"], parse, config)
        return {"value": bool(gold and given and verify(gold, given, timeout_seconds=None, raise_on_error=True))}
    except Exception as error:  # the library may raise anything on hostile text
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def limited(seconds):
    """From here on the process may use so many CPU seconds; 0 = as many as it likes."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which ends a process


def main():
    """Answers questions until the input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # what the library prints is no reply
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # no such limit on this system
        pass
    from math_verify import LatexExtractionConfig, parse, verify

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        limited(question["seconds"])
        reply = answer(question, parse, verify, config)
        limited(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
