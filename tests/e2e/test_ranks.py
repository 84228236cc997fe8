"""A rank that dies, hangs, fails or takes long: what the others say, and how the run goes on (torchrun, gloo)."""

import re
import signal

import psutil
import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, FEW, ROOT, assert_same_run, finished, wait_for

pytestmark = pytest.mark.slow


def outcome(how):
    if how == "dead while saving":  # under torchrun, which holds the store, and ends the other rank after its message
        done = forked.run(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
                           "tests.e2e.ranks", how], {**ENV, "ACCELERATE_USE_CPU": "true"}, ROOT, 300)
    else:
        done = forked.run(["-m", "tests.e2e.ranks", how], ENV, ROOT, 300, processes=2)
    return done, re.findall(r"^error: .*$", done.stderr, re.MULTILINE)


MISSING = {
    "dally": (0, r"rank 0 waited \d+ s in .* for rank 1 \(in step 7, train for \d+ s\)"),
    "fail": (0, r"for rank 1 \(ended in step 7, train: KeyError: 'a fault of rank 1 alone'\)"),
    "leave": (0, r"for rank 1 \(ended in step 7, train: it ended normally\)"),
    "impatient": (1, r"waited \d+ s in step 7, train: receiving the value of rank 0 \(ranks.py:\d+\) for rank 0 \(in"),
    "dead while saving": (1, r"in step 7, train: waiting for rank 0: saving \(ranks.py:\d+\) for rank 0 \(no sign of"),
    "transport": (0, r"rank 0 waited \d+ s in step 7, train for rank 1 \(no sign of life from host .*gloo"),
}
"""What is done -> who waits, and its message."""


@pytest.mark.parametrize("how", MISSING)
def test_the_others_say_who_is_missing_where(how):
    done, errors = outcome(how)
    rank, message = MISSING[how]
    assert done.returncode != 0
    (own,) = [e for e in errors if e.startswith(f"error: rank {rank} waited ")]
    assert re.search(message, own), own
    assert "start the same command again on every host" in own and "limits.collective_s=5" in own


def test_what_rank_0_does_alone_may_take_longer_than_the_limit():
    done, errors = outcome("patient")
    assert done.returncode == 0 and not errors, done.stderr
    said = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("saved"))
    assert [words[:2] for words in said] == [["saved", "0"], ["saved", "1"]]
    assert said[0][2] == said[1][2]  # both are at the same place, else a later message would name the wrong rank


@pytest.mark.long
def test_a_run_whose_ranks_are_killed_and_stopped_goes_on_exactly(pair):
    """Rank 0 holds the lock and writes; a rank that is stopped hangs with open connections."""
    folder = pair.config.parent / "struck"
    words = [str(pair.config), f"run.dir={folder}", *FEW, "limits.collective_s=20"]
    said = [folder.with_name(f"struck-{number}.txt") for number in range(2)]
    with open(said[0], "w") as text:
        ranks = [forked.Process([str(ROOT / "train.py"), *words], {**ENV, **env}, folder.parent, text, text)
                 for env in forked.ranks(2)]
    wait_for(folder, 1, ranks, said[0].read_text)
    ranks[0].send_signal(signal.SIGKILL)
    assert [rank.wait(300) for rank in ranks] == [-signal.SIGKILL, 1]
    with open(said[1], "w") as text:
        both = forked.Process([*pair.launcher, *words], {**ENV, "ACCELERATE_USE_CPU": "true"}, folder.parent, text,
                              text)
    wait_for(folder, 3, [both], said[1].read_text)
    (rank,) = [p for p in psutil.Process(both.pid).children() if p.environ().get("RANK") == "1"]
    rank.send_signal(signal.SIGSTOP)
    assert both.wait(300) != 0 and not rank.is_running()  # torchrun has ended it
    store = r"^error: rank 1 waited \d+ s in .* the launcher's store at \S+ does not answer either"  # rank 0 held it
    rank_1 = r"^error: rank 0 waited \d+ s in .* for rank 1 \(no sign of life from host "
    for text, missing in zip(said, (store, rank_1), strict=True):
        assert re.search(missing, text.read_text(), re.MULTILINE), text.read_text()
    assert "resuming from" in finished(pair.config, folder, *FEW, processes=2).stdout
    assert_same_run(folder, pair.whole)
