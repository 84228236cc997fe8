"""What is known of every prompt, by hand."""

import numpy as np

from vlrl.curriculum import Draw, Outcome
from vlrl.curriculum.history import History


def test_what_is_known_by_hand():
    history = History(4)
    assert history.visit([2, 0, 2, 2]) == [0, 0, 1, 2] and history.visit([2, 3]) == [3, 0]
    assert history.visits.tolist() == [1, 0, 4, 1]
    whole = History(5)
    whole.subset(np.array([3, 1])).visit([0, 0, 1])
    assert whole.visits.tolist() == [0, 1, 0, 2, 0]
    whole.note([Outcome(Draw(3, 0), (1.0, 0.0), (True, False))], 7)
    again = History(5)
    other = again.subset(np.array([3, 1]))
    again.load_state_dict(whole.state_dict())
    assert other.visits.tolist() == [2, 1] and other.last.tolist() == [7, -1] and other.reward[0] == 0.5
