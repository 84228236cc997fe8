"""The pool of servers, against small HTTP servers that are held back, killed and brought back."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from tests.conftest import noise
from vlrl.engine.vllm import replicas
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.engine.vllm.replicas import Replica, ReplicaPool, ServerCall, _Run, _Task
from vlrl.engine.vllm.server import read_key
from vlrl.errors import ConfigError, TrainingError

KEY_OF_ALL = "a key"
PATIENT = 60
"""Seconds that a test waits for what comes at once on a quiet machine."""


class Stub:
    """A server whose `answer(body)` gives (status, value); it may wait."""

    def __init__(self, answer=None, port=0):
        self.answer = answer or (lambda body: (200, {"echo": body, "by": self.address}))
        self.seen, self.healthy, self.state, self._sockets = [], True, {}, set()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # its answers are written in two parts

            def setup(self):
                super().setup()
                stub._sockets.add(self.connection)

            def do_GET(self):
                self.reply(200 if stub.healthy else 503, stub.state)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["Authorization"] != f"Bearer {KEY_OF_ALL}":
                    return self.reply(401, {"error": "who are you"})
                stub.seen.append(body)
                self.reply(*stub.answer(body))

            def reply(self, status, value):
                data = json.dumps(value).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_):
                pass  # a connection that was cut

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def kill(self):
        """As kill -9: nothing listens any more, and every connection is cut."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@pytest.fixture
def stubs():
    made = []

    def make(*args, **kwargs):
        made.append(Stub(*args, **kwargs))
        return made[-1]

    yield make
    for stub in made:
        stub.kill()


_clients = []


@pytest.fixture(autouse=True)
def closed_clients(monkeypatch):
    monkeypatch.setattr(replicas, "_PAUSES", (0.05, 10.0))
    monkeypatch.setattr(replicas, "_LOOK_S", 0.1)
    yield
    while _clients:
        _clients.pop().close()


def pool(*servers, admit=None, timeout_s=PATIENT, key=KEY_OF_ALL, **more):
    client = ServerClient(key, timeout_s)
    _clients.append(client)
    check = admit or (lambda address: client.get(address, "/health"))
    return ReplicaPool([getattr(s, "address", s) for s in servers], client, check, **more)


def asking(value, weight=1):
    (found,) = yield [ServerCall("/do", lambda: json.dumps(value).encode(), weight=weight)]
    return found["echo"]


def test_results_come_in_order_and_the_work_is_shared(stubs):
    a, b = stubs(), stubs()
    done, both = [], pool(a, b)
    assert len(both.admit_all()) == 2
    found = both.run([asking(i) for i in range(40)], lambda *one: done.append((threading.get_ident(), *one)))
    assert found == [*range(40)]
    assert Counter([*a.seen, *b.seen]) == Counter(range(40)) and min(len(a.seen), len(b.seen)) >= 10
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
    assert pool(one, most=12).run([asking(i, weight=4) for i in range(20)]) == [*range(20)]
    assert most[0] <= 12
    assert pool(one, most=2).run([asking(1, weight=4)]) == [1]  # a group that is too large goes alone
    free = threading.Event()
    slow, quick = stubs(lambda body: free.wait(PATIENT) and (200, {"echo": body})), stubs()
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

    def none():
        return "no request at all"
        yield

    assert pool(one).run([twice(1), none(), twice(2)]) == [(1, "end"), "no request at all", (2, "end")]
    assert pool(one).run([]) == []


def test_a_server_killed_while_it_works_loses_no_answer(stubs):
    reached, never = threading.Event(), threading.Event()

    def stuck(body):
        reached.set()
        never.wait(PATIENT)
        return 200, {"echo": body}

    dying, other = stubs(stuck), stubs()
    both = pool(dying, other)
    both.admit_all()
    killer = threading.Thread(target=lambda: (reached.wait(PATIENT), dying.kill()))
    killer.start()
    assert both.run([asking(i) for i in range(30)]) == [*range(30)]
    killer.join()
    assert dying.seen and set(dying.seen) <= set(other.seen)  # what it held was asked again of the other
    assert Counter(other.seen) == Counter(range(30))
    assert not both.replicas[0].ready and both.replicas[0].problem
    never.set()


@pytest.mark.slow
def test_a_server_that_comes_back_gets_nothing_before_it_is_admitted(stubs):
    dying, other, let_in, work = stubs(), stubs(), threading.Event(), threading.Event()
    port, asked = dying.port, []

    def admit(address):
        if address.endswith(str(port)):
            asked.append(address)
            if dying.http.fileno() == -1 and not let_in.is_set():
                raise Unavailable("stale")

    both = pool(dying, other, admit=admit)
    both.admit_all()
    dying.kill()
    assert both.run([asking(i) for i in range(8)]) == [*range(8)]
    assert [r.ready for r in both.replicas] == [False, True]
    back = stubs(port=port)
    asked.clear()

    def answer(body):
        if body == "first" and not let_in.is_set():
            while len(asked) < 2:  # it is asked for, and refused
                time.sleep(0.005)
            assert not back.seen
            let_in.set()
        return work.wait(PATIENT) and (200, {"echo": body})

    other.answer = answer

    def second():
        (found,) = yield [ServerCall("/do", lambda: b'"first"')]
        calls = [ServerCall("/do", lambda i=i: json.dumps(i).encode()) for i in range(20)]
        return found["echo"], [f["echo"] for f in (yield calls)]

    back.answer = lambda body: (work.set(), (200, {"echo": body}))[1]
    threading.Thread(target=lambda: (let_in.wait(PATIENT), _until(lambda: both.replicas[0].ready), work.set()),
                     daemon=True).start()
    assert both.run([second()]) == [("first", [*range(20)])]
    assert back.seen and both.replicas[0].ready


def _until(true):
    end = time.monotonic() + PATIENT
    while not true() and time.monotonic() < end:
        time.sleep(0.005)


def test_an_error_of_the_server_is_tried_again_elsewhere(stubs):
    for status in (500, 503, 409, 429):
        bad, good = stubs(lambda body, status=status: (status, {"error": "not now"})), stubs()
        both = pool(bad, good, retries=4)
        both.admit_all()
        assert both.run([asking(i) for i in range(4)]) == [*range(4)], status
        assert Counter(good.seen) == Counter(range(4)) and bad.seen, status


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
    def admit(address):
        raise ConfigError("engine.dtype differs")

    with pytest.raises(ConfigError, match="dtype differs"):
        pool(stubs(), admit=admit).run([asking(1)])
    gone = stubs()
    gone.kill()
    with pytest.raises(TrainingError, match=rf"no server.*{gone.port}.*[Cc]onnect.*vlrl serve"):
        pool(gone, wait_s=0.3).run([asking(1)])
    with pytest.raises(TrainingError, match="no server"):
        pool(gone, wait_s=0.3).admit_all()


@pytest.mark.slow
def test_a_server_that_is_being_brought_up_to_date_is_there(stubs):
    """Large weights and their comparison take longer together than a server may be away."""
    one, calls = stubs(), []

    def admit(address):
        calls.append(address)
        threading.Event().wait(1.0)

    assert pool(one, admit=admit, wait_s=0.2).run([asking(1)]) == [1] and len(calls) == 1

    def fail(address):
        admit(address)
        raise Unavailable("no room for the weights")

    calls.clear()
    with pytest.raises(TrainingError, match=r"0\.2 s \(.*no room for the weights\)"):  # it says why, and asks no more
        pool(one, admit=fail, wait_s=0.2).admit_all()
    assert len(calls) == 1


@pytest.mark.slow
def test_a_slow_server_is_left_for_another(stubs):
    free = threading.Event()
    slow, other = stubs(lambda body: free.wait(PATIENT) and (200, {"echo": body})), stubs()
    both = pool(slow, other, timeout_s=2.0)
    both.admit_all()
    assert both.run([asking(i) for i in range(2)]) == [0, 1]
    assert slow.seen and set(slow.seen) <= set(other.seen)
    free.set()


def test_a_host_that_is_gone_breaks_no_connection_but_is_given_up(stubs):
    """Its answer may still come, much later: it is dropped."""
    free, asked = threading.Event(), threading.Event()

    def answer(body):
        asked.set()
        free.wait(PATIENT)
        return 200, {"echo": "late"}

    silent, other = stubs(answer), stubs()
    silent.healthy = False
    both = pool(silent, other, admit=lambda address: None if not asked.is_set() else _deaf(address, silent),
                patience_s=0.3)
    both.admit_all()

    def slow():
        (found,) = yield [ServerCall("/do", lambda: b"1")]
        free.set()
        more = yield [ServerCall("/do", lambda k=k: str(k).encode()) for k in range(2, 30)]
        return [found["echo"], *(m["echo"] for m in more)]

    assert both.run([slow()]) == [[*range(1, 30)]]
    assert silent.seen == [1]


def _deaf(address, silent):
    if address == silent.address:
        raise Unavailable("deaf")


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
    timer = threading.Timer(0.3, lambda: stubs(port=gone.port))
    timer.start()
    assert alone.run([asking(1)]) == [1]
    timer.join()


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
    _until(lambda: both.replicas[1].report)
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
            assert len(inside) == 1
            assert free.wait(PATIENT)
            inside.remove(address)
            if len(asked) == 1:
                raise ConfigError("with the weights before")

    both = pool(a, b, admit=admit)
    both.replicas[1].awaited = False
    for i in range(4):
        assert both.run([asking(i)]) == [i]
    both.invalidate()
    for i in range(4):
        assert both.run([asking(i)]) == [i]
    assert asked == [0] and not both.replicas[1].ready
    free.set()
    end = time.monotonic() + PATIENT
    while not both.replicas[1].ready:  # the error was of weights that are old
        assert both.run([asking(1)]) == [1] and time.monotonic() < end
    assert asked == [0, 1]


def test_no_report_on_a_server_is_lost_while_another_one_is_looked_for(stubs):
    """The report comes between the reading and the clearing of the place that it is put into."""
    one, hearing, told = stubs(), threading.Event(), threading.Event()
    main = threading.current_thread()

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
    both = pool(silent, other, admit=lambda address: _deaf(address, silent) if len(first) >= 3 else None,
                patience_s=0.3)
    both.admit_all()
    other.answer = lambda body: (len(first) >= 3 or _until(lambda: len(first) >= 3), (200, {"echo": body}))[1]
    begun = time.monotonic()
    assert both.run([asking(i) for i in range(6)]) == [*range(6)]
    assert time.monotonic() - begun < PATIENT / 2  # and not when the client's time is up
    free.set()


def test_a_run_in_another_thread_can_be_given_up(stubs):
    free, reached = threading.Event(), threading.Event()
    alone = pool(stubs(lambda body: (reached.set(), free.wait(PATIENT), (200, {"echo": body}))[2]))
    threading.Thread(target=lambda: (reached.wait(PATIENT), alone.abandon(TrainingError("the run ends")))).start()
    with pytest.raises(TrainingError, match="the run ends"):
        alone.run([asking(1)])
    free.set()


def test_prompts_travel_without_loss_and_keys_come_from_a_file(monkeypatch, tmp_path, caplog):
    image = noise(1, 30, 20)
    frames = np.stack([np.asarray(noise(i, 16, 8)) for i in range(4)])
    sent = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": [image], "video": [(frames, {"fps": 2.5, "at":
            [0, 1]})]}, "bias": {7: float("-inf")}, "floats": np.arange(3, dtype=np.float32), "n": np.int64(3),
            "nothing": None}
    found = vllm_wire.unpack(vllm_wire.pack(sent))
    (got,) = found["multi_modal_data"]["image"]
    assert isinstance(got, Image.Image) and got.mode == "RGB" and np.array_equal(np.asarray(got), np.asarray(image))
    (video, metadata), = found["multi_modal_data"]["video"]
    assert video.dtype == np.uint8 and np.array_equal(video, frames) and metadata == {"fps": 2.5, "at": [0, 1]}
    assert isinstance(found["multi_modal_data"]["video"][0], tuple)
    assert found["bias"] == {7: float("-inf")} and found["n"] == 3 and found["nothing"] is None
    assert found["floats"].dtype == np.float32 and found["floats"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="Lock"):
        vllm_wire.pack({"x": asyncio.Lock()})
    monkeypatch.setenv("VLRL_ENGINE_KEY", "of the environment")
    assert read_key("") == "of the environment"
    (tmp_path / "key").write_text("of the file\n")
    for mode, told in ((0o600, False), (0o640, True)):
        (tmp_path / "key").chmod(mode)
        assert read_key(str(tmp_path / "key")) == "of the file"
        assert ("can be read by users other than its owner (mode 640)" in caplog.text) == told
    with pytest.raises(ConfigError, match=r"engine\.key_file"):
        read_key(str(tmp_path / "absent"))
