"""The pool of servers, against small HTTP servers that are held back, killed and brought back."""

import json
import threading
import time

import pytest

from tests.engine.stubs import KEY_OF_ALL, PATIENT, Stub
from vlrl.engine.vllm import replicas
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.engine.vllm.replicas import Replica, ReplicaPool, ServerCall, _Run, _Task
from vlrl.errors import ConfigError, TrainingError

_clients = []


@pytest.fixture
def stubs(monkeypatch):
    monkeypatch.setattr(replicas, "_PAUSES", (0.05, 10.0))
    monkeypatch.setattr(replicas, "_LOOK_S", 0.1)
    made = []

    def make(*args, **kwargs):
        made.append(Stub(*args, **kwargs))
        return made[-1]

    yield make
    for stub in made:
        stub.kill()
    while _clients:
        _clients.pop().close()


def pool(*servers, admit=None, timeout_s=PATIENT, key=KEY_OF_ALL, **more):
    client = ServerClient(key, timeout_s)
    _clients.append(client)
    check = admit or (lambda address: client.get(address, "/health"))
    return ReplicaPool([getattr(s, "address", s) for s in servers], client, check, **more)


def raising(error, when=lambda address: True):
    """An admission that raises an error."""
    def admit(address):
        if when(address):
            raise error
    return admit


def until(true):
    end = time.monotonic() + PATIENT
    while not true() and time.monotonic() < end:
        time.sleep(0.005)


def held(event, value=None):
    """Answers when the event is set; with `value` in place of what was asked."""
    return lambda body: event.wait(PATIENT) and (200, {"echo": body if value is None else value})


def asking(value, weight=1):
    (found,) = yield [ServerCall("/do", lambda: json.dumps(value).encode(), weight=weight)]
    return found["echo"]


def test_results_come_in_order_and_the_work_is_shared(stubs):
    a, b, done = stubs(), stubs(), []
    both = pool(a, b)
    assert len(both.admit_all()) == 2
    found = both.run([asking(i) for i in range(40)], lambda *one: done.append((threading.get_ident(), *one)))
    assert found == [*range(40)] and sorted([*a.seen, *b.seen]) == [*range(40)] and min(len(a.seen), len(b.seen)) >= 10
    assert len(done) == 39  # not for the last one
    assert all(thread == threading.get_ident() and number == result for thread, number, result in done)


def test_who_gets_a_request_by_hand():
    """Of two servers the one that is less busy, but not the one that has just failed at it."""
    both = ReplicaPool(["http://a", "http://b"], ServerClient("", 1.0), lambda address: None)
    a, b = both.replicas
    a.ready = b.ready = True
    run = _Run(both, [], None)
    run._load[b] = 2
    call = ServerCall("/", bytes, weight=2)
    assert run._choose(call) is a
    call.avoid = a
    assert run._choose(call) is b
    b.ready = False
    assert run._choose(call) is a  # better than none
    run._attempts[1] = _Task(0, iter(())), 0, call, b
    run._attempts[1][0].results, run._attempts[1][0].missing = [None, None], 2
    run._complete(1, "an answer")
    assert run._load == {a: 0, b: 0} and run._attempts == {}


def test_no_server_gets_more_answers_at_once_than_allowed(stubs):
    most, at_once, guard = [0], [0], threading.Lock()

    def answer(body):
        with guard:
            at_once[0] += 4
            most[0] = max(most[0], at_once[0])
        time.sleep(0.005)  # long enough for others to come in, were they sent
        with guard:
            at_once[0] -= 4
        return 200, {"echo": body}

    one = stubs(answer)
    assert pool(one, most=12).run([asking(i, weight=4) for i in range(20)]) == [*range(20)] and most[0] <= 12
    assert pool(one, most=2).run([asking(1, weight=4)]) == [1]  # a group that is too large goes alone
    free = threading.Event()
    slow, quick = stubs(held(free)), stubs()
    both = pool(slow, quick)
    both.admit_all()

    def note(number, _):
        if len(quick.seen) == 6:
            free.set()

    assert both.run((asking(i, weight=8 if i == "heavy" else 1) for i in ("heavy", *range(6))), note) == [
        "heavy", *range(6)]
    assert slow.seen == ["heavy"]


def test_a_task_may_take_several_steps(stubs):
    one = stubs()

    def twice(value):
        first = yield [ServerCall("/do", lambda k=k: json.dumps([value, k]).encode()) for k in range(3)]
        assert [f["echo"] for f in first] == [[value, k] for k in range(3)]
        nothing = yield []
        assert nothing == []
        (second,) = yield [ServerCall("/do", lambda: json.dumps("end").encode())]
        return value, second["echo"]

    none = asking(0)
    none.close()
    assert pool(one).run([twice(1), none, twice(2)]) == [(1, "end"), None, (2, "end")] and pool(one).run([]) == []


def test_a_server_killed_while_it_works_loses_no_answer(stubs):
    never = threading.Event()
    dying, other = stubs(held(never)), stubs()
    both = pool(dying, other)
    both.admit_all()
    threading.Thread(target=lambda: (until(lambda: dying.seen), dying.kill())).start()
    assert both.run([asking(i) for i in range(30)]) == [*range(30)]
    assert dying.seen and set(dying.seen) <= set(other.seen)  # what it held was asked again of the other
    assert sorted(other.seen) == [*range(30)] and not both.replicas[0].ready and both.replicas[0].problem
    never.set()


@pytest.mark.slow
def test_a_server_that_comes_back_gets_nothing_before_it_is_admitted(stubs):
    dying, other, let_in, asked = stubs(), stubs(), threading.Event(), []

    def admit(address):
        if address == dying.address:
            asked.append(address)
            if dying.http.fileno() == -1 and not let_in.is_set():
                raise Unavailable("stale")

    both = pool(dying, other, admit=admit)
    both.admit_all()
    dying.kill()
    assert both.run([asking(i) for i in range(8)]) == [*range(8)] and [r.ready for r in both.replicas] == [False, True]
    back = stubs(port=dying.port)
    asked.clear()

    def answer(body):
        if body == "first":
            until(lambda: len(asked) >= 2)  # it is asked for, and refused
            assert not back.seen
            let_in.set()
            until(lambda: both.replicas[0].ready)
        else:
            until(lambda: back.seen)
        return 200, {"echo": body}

    other.answer = answer

    def second():
        (found,) = yield [ServerCall("/do", lambda: b'"first"')]
        calls = [ServerCall("/do", lambda i=i: json.dumps(i).encode()) for i in range(20)]
        return found["echo"], [f["echo"] for f in (yield calls)]

    assert both.run([second()]) == [("first", [*range(20)])] and back.seen and both.replicas[0].ready


def test_an_error_of_the_server_is_tried_again_elsewhere(stubs):
    for status in (500, 503, 409, 429):
        bad, good = stubs(lambda body, status=status: (status, {"error": "not now"})), stubs()
        both = pool(bad, good, retries=4)
        both.admit_all()
        assert both.run([asking(i) for i in range(4)]) == [*range(4)], status
        assert sorted(good.seen) == [*range(4)] and bad.seen, status


def test_requests_that_end_the_run(stubs):
    bad = [stubs(lambda body: (500, {"error": "out of order"})) for _ in range(2)]
    with pytest.raises(TrainingError, match=r"failed 3 times.*500 out of order.*engine\.retries"):
        pool(*bad, retries=2).run([asking(1)])
    assert sum(len(b.seen) for b in bad) == 3
    one = stubs(lambda body: (400, {"error": "the prompt is too long"}))
    with pytest.raises(TrainingError, match="too long"):
        pool(one).run([asking(1)])
    assert one.seen == [1]
    with pytest.raises(ConfigError, match=r"engine\.key_file"):
        pool(one, key="another").run([asking(1)])
    with pytest.raises(ConfigError, match="dtype differs"):
        pool(stubs(), admit=raising(ConfigError("engine.dtype differs"))).run([asking(1)])
    gone = stubs()
    gone.kill()
    with pytest.raises(TrainingError, match=rf"no server.*{gone.port}.*[Cc]onnect.*vlrl serve"):
        pool(gone, wait_s=0.3).run([asking(1)])
    with pytest.raises(TrainingError, match="no server"):
        pool(gone, wait_s=0.3).admit_all()


@pytest.mark.slow
def test_a_server_that_is_being_brought_up_to_date_is_there(stubs):
    """Large weights and their comparison take longer together than a server may be away."""
    one, calls, errors = stubs(), [], []

    def admit(address):
        calls.append(address)
        time.sleep(1.0)
        for error in errors:
            raise error

    assert pool(one, admit=admit, wait_s=0.2).run([asking(1)]) == [1] and len(calls) == 1
    errors.append(Unavailable("no room for the weights"))
    with pytest.raises(TrainingError, match=r"0\.2 s \(.*no room for the weights\)"):  # it says why, and asks no more
        pool(one, admit=admit, wait_s=0.2).admit_all()
    assert len(calls) == 2


def test_a_host_that_is_gone_breaks_no_connection_but_is_given_up(stubs):
    """Its answer may still come, much later: it is dropped."""
    free = threading.Event()
    silent, other = stubs(held(free, "late")), stubs()
    silent.healthy = False
    deaf = raising(Unavailable("deaf"), lambda address: silent.seen and address == silent.address)
    both = pool(silent, other, admit=deaf, patience_s=0.3)
    both.admit_all()

    def slow():
        (found,) = yield [ServerCall("/do", lambda: b"1")]
        free.set()
        more = yield [ServerCall("/do", lambda k=k: str(k).encode()) for k in range(2, 30)]
        return [found["echo"], *(m["echo"] for m in more)]

    assert both.run([slow()]) == [[*range(1, 30)]] and silent.seen == [1]


def test_doubt_and_a_server_that_is_up_later(stubs):
    one, seen = stubs(), []
    alone = pool(one, admit=seen.append)
    assert [r.address for r in alone.admit_all()] == [one.address] and len(seen) == 1
    alone.run([asking(1)])
    assert len(seen) == 1
    alone.invalidate()
    alone.run([asking(1)])
    assert len(seen) == 2
    gone = stubs()
    gone.kill()
    alone = pool(gone)
    threading.Timer(0.3, lambda: stubs(port=gone.port)).start()
    assert alone.run([asking(1)]) == [1]


def test_a_server_that_takes_longer_to_load_than_a_run_lasts_is_admitted(stubs):
    a, b = stubs(), stubs()
    asked, loaded = threading.Event(), threading.Event()

    def admit(address):
        if address == b.address:
            asked.set()
            assert loaded.wait(PATIENT)

    both = pool(a, b, admit=admit)
    both.replicas[1].awaited = False
    assert both.run([asking(1)]) == [1] and asked.wait(PATIENT) and not both.replicas[1].ready
    loaded.set()
    until(lambda: both.replicas[1].report)
    asked.clear()
    assert sorted(both.run([asking(i) for i in range(10)])) == [*range(10)]
    assert both.replicas[1].ready and b.seen and not asked.is_set()
    both.invalidate()
    loaded.clear()
    assert both.run([asking(2)]) == [2] and not both.replicas[1].ready  # what it had is not what it must have
    loaded.set()


def test_no_server_is_asked_twice_at_a_time(stubs):
    """Short runs, one after the other, while it takes long to say that it may be used."""
    a, b, inside, asked = stubs(), stubs(), [], []
    free = threading.Event()

    def admit(address):
        if address == b.address:
            asked.append(len(asked))
            inside.append(address)
            assert len(inside) == 1 and free.wait(PATIENT)
            inside.remove(address)
            if len(asked) == 1:
                raise ConfigError("with the weights before")

    both = pool(a, b, admit=admit)
    both.replicas[1].awaited = False
    assert [both.run([asking(i)]) for i in range(4)] == [[i] for i in range(4)]
    both.invalidate()
    assert [both.run([asking(i)]) for i in range(4)] == [[i] for i in range(4)]
    assert asked == [0] and not both.replicas[1].ready
    free.set()
    until(lambda: both.run([asking(1)]) == [1] and both.replicas[1].ready)  # the error was of weights that are old
    assert asked == [0, 1]


def test_no_report_on_a_server_is_lost_while_another_one_is_looked_for(stubs):
    """The report comes between the reading and the clearing of the place that it is put into."""
    one, hearing, told, main = stubs(), threading.Event(), threading.Event(), threading.current_thread()

    class Watched(Replica):
        _report = None

        @property
        def report(self):
            found = self._report
            if threading.current_thread() is main and self.checking and not hearing.is_set():
                hearing.set()
                assert told.wait(PATIENT)
            return found

        @report.setter
        def report(self, value):
            self._report = value
            if value is not None:
                told.set()

    class Lock:
        """Of the pool; says when somebody waits for it."""

        def __init__(self):
            self.own = threading.Lock()

        def __enter__(self):
            if not self.own.acquire(blocking=False):
                told.set()
                self.own.acquire()

        def __exit__(self, *_):
            self.own.release()

    alone = pool(one, admit=lambda address: hearing.wait(PATIENT), wait_s=PATIENT / 3)
    alone.replicas, alone._lock = [Watched(one.address)], Lock()
    assert alone.run([asking(1)]) == [1] and hearing.is_set()


def test_what_a_dropped_server_still_holds_is_asked_elsewhere_when_its_host_is_gone(stubs):
    """One request fails, which drops it; the others wait on connections that nobody breaks."""
    free, guard, first = threading.Event(), threading.Lock(), []

    def answer(body):
        with guard:
            first.append(body)
            if len(first) == 3:
                silent.healthy = False
                return 500, {"error": "the last that is heard of it"}
        free.wait(PATIENT)
        return 200, {"echo": "late"}

    silent, other = stubs(answer), stubs()
    deaf = raising(Unavailable("deaf"), lambda address: len(first) >= 3 and address == silent.address)
    both = pool(silent, other, admit=deaf, patience_s=0.3)
    both.admit_all()
    other.answer = lambda body: (len(first) >= 3 or until(lambda: len(first) >= 3), (200, {"echo": body}))[1]
    begun = time.monotonic()
    assert both.run([asking(i) for i in range(6)]) == [*range(6)]
    assert time.monotonic() - begun < PATIENT / 2  # and not when the client's time is up
    free.set()


def test_a_run_in_another_thread_can_be_given_up(stubs):
    free = threading.Event()
    one = stubs(held(free))
    alone = pool(one)
    threading.Thread(target=lambda: (until(lambda: one.seen), alone.abandon(TrainingError("the run ends")))).start()
    with pytest.raises(TrainingError, match="the run ends"):
        alone.run([asking(1)])
    free.set()
