"""Ask the web over real sockets: real queue, real slots, and clients that mean no good."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from queue_core import Queue, open_engine
from supervisor.catalogue import Expected
from supervisor.processes import read_processes
from supervisor.slots import Kind, SlotState, SlotTable
from supervisor.web import page, server
from supervisor.web.app import THREADS_MAX, application
from supervisor.web.guard import Hosts, host_of, sent_token
from supervisor.web.sources import Opener, Source, Sources

ROOT = Path(__file__).resolve().parents[2]
TOKEN = b"correct horse battery staple"
EXPECTED = Expected(queues=("emails",), pairs=(("emails", "emails"),))
PATHS = ("/", "/api/status", "/metrics", "/metrics/database", "/metrics/process", "/readyz")


class Web:
    """A server on a free port, in a thread of this process, over sources of the test's choice."""

    def __init__(
        self,
        open_source: Callable[[], Source],
        table: SlotTable | None,
        *,
        token: bytes | None = None,
        bound: str = "127.0.0.1",
    ) -> None:
        look = None if table is None else lambda: read_processes(table)
        sources = Sources(Opener(open_source), EXPECTED, look, cache_seconds=0.0)
        app = application(sources, hosts=Hosts(bound), token=token)
        listener = server.bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = server.url(listener).rstrip("/")
        self._stop = threading.Event()
        self._wake_read, self._wake = os.pipe()
        self._thread = threading.Thread(
            target=server.serve,
            args=(app, listener),
            kwargs={"beat": self._stop.is_set, "wake_fd": self._wake_read},
            daemon=True,
        )
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=15)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask with headers given as `Host="x"`."""
        return self.client.get(path, headers=headers)

    def close(self) -> None:
        """Stop, and see it stop."""
        self.client.close()
        self._stop.set()
        os.write(self._wake, b"!")
        self._thread.join(15)
        assert not self._thread.is_alive()
        os.close(self._wake)
        os.close(self._wake_read)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    """Make the slots of a healthy tree: a keeper and two workers, one of them running job 4711."""
    table = SlotTable.create(
        tmp_path / "t.slots", instance_uuid=str(uuid.uuid4()), pools=["default"], capacity=12
    )
    now_ns = time.monotonic_ns()
    table.tick(now_ns)
    for name, processes in (("default", 2), ("@keeper", 1), ("@web", 1)):
        table.pools[name].active, table.pools[name].processes = 1, processes
    for pool, name, kind in (
        (0, "default/0", Kind.WORKER),
        (0, "default/1", Kind.WORKER),
        (1, "keeper", Kind.KEEPER),
    ):
        slot = table.take()
        assert slot is not None
        slot.open(name=name, pool_index=pool, kind=kind, now_ns=now_ns)
        slot.enter(SlotState.IDLE)
    table.slots[0].begin_batch([(4711, 1)])
    assert table.slots[0].start(0)
    yield table
    table.close()


@pytest.fixture
def start(table: SlotTable, database: Path) -> Iterator[Callable[..., Web]]:
    """Start servers, over the fixture's database and slots unless told otherwise; stop them all."""
    started: list[Web] = []

    def start(
        open_source: Callable[[], Source] | None = None,
        table: SlotTable | None = table,
        *,
        token: bytes | None = None,
        bound: str = "127.0.0.1",
    ) -> Web:
        web = Web(open_source or (lambda: open_engine(database)), table, token=token, bound=bound)
        started.append(web)
        return web

    yield start
    for web in started:
        web.close()


# ---- what is served -----------------------------------------------------------------------


def test_metrics_show_what_the_queue_did(start: Callable[..., Web], database: Path) -> None:
    """A put is in the next scrape, and each path serves its own source."""
    web = start()
    with Queue[dict[str, str]](str(database), "emails") as queue:
        queue.put({"to": "a@b.c"})
    families = {
        path: {family.name for family in text_string_to_metric_families(web.get(path).text)}
        for path in ("/metrics", "/metrics/database", "/metrics/process")
    }
    assert "herdsman_jobs_enqueued" in families["/metrics/database"]
    assert "herdsman_workers" in families["/metrics/process"]
    assert families["/metrics/database"].isdisjoint(families["/metrics/process"])
    assert families["/metrics"] == families["/metrics/database"] | families["/metrics/process"]
    line = 'herdsman_jobs_enqueued_total{queue="emails",task="emails"} 1.0'
    assert line in web.get("/metrics").text.splitlines()


def test_openmetrics_is_served_to_who_asks(start: Callable[..., Web]) -> None:
    """The content type is exactly the library's, and the body ends as the format demands."""
    answer = start().get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


def test_the_dashboard_shows_queues_workers_and_dead_letters(
    start: Callable[..., Web], database: Path
) -> None:
    """Everything an operator looks for first is on the one page, without any script."""
    with Queue[dict[str, str]](str(database), "emails") as queue:
        queue.put({"to": "a@b.c"})
        queue.put({"to": "a@b.c"})
        job = queue.get(timeout=0)
        assert job is not None
        queue.fail(job, error="SMTPError: mailbox <full>")
    text = start().get("/").text
    for needle in ("emails", "default/0", "job 4711", f'class="id">{job.id}<', "rejected"):
        assert needle in text
    assert "SMTPError: mailbox &lt;full&gt;" in text
    assert '<noscript><meta http-equiv="refresh"' in text


def test_the_last_dead_letters_are_those_that_died_last(
    start: Callable[..., Web], database: Path
) -> None:
    """Of many, in several queues, the latest deaths are shown: an old job that died again too."""
    died = []
    with (
        Queue[int](str(database), "emails") as emails,
        Queue[int](str(database), "reports") as reports,
    ):
        for number in range(12):
            queue = reports if number % 3 else emails
            queue.put(number)
            job = queue.get(timeout=0)
            assert job
            queue.fail(job, error="x")
            died.append(job.id)
        emails.replay(died[0])
        again = emails.get(timeout=0)
        assert again
        emails.fail(again, error="x")
    shown = [dead["id"] for dead in start().get("/api/status").json()["dead"]]
    assert shown == [died[0], *reversed(died[3:])]


def test_the_api_says_the_same_as_the_page(start: Callable[..., Web], database: Path) -> None:
    """The document has stable keys and plain values."""
    with Queue[dict[str, str]](str(database), "emails") as queue:
        queue.put({"to": "a@b.c"})
    status = start().get("/api/status").json()
    assert status["schema_version"] == 1
    assert status["ready"]
    assert status["reasons"] == []
    (emails,) = status["queues"]
    assert emails["depth"]["ready"] == 1
    assert status["totals"]["enqueued"] == 1
    assert [worker["job"] for worker in status["workers"]] == [4711, None]
    assert set(status) == {
        "schema_version", "taken", "version", "instance", "engine", "live", "ready", "reasons",
        "warnings", "draining", "database", "depth", "totals", "queues", "queues_total", "pools",
        "workers", "dead",
    }  # fmt: skip


def test_the_page_needs_nothing_from_elsewhere_and_nothing_inline(
    start: Callable[..., Web],
) -> None:
    """Each asset the page names is served here, and the strict policy has nothing to block."""
    web = start()
    text = web.get("/").text
    assert " style=" not in text
    assert "<style" not in text
    assert "<script>" not in text
    assert "//" not in text.replace("<!doctype html>", "")
    assets = [part.split('"')[0] for part in text.split('="/static/')[1:]]
    assert len(assets) >= 3
    for asset in assets:
        answer = web.get(f"/static/{asset}")
        assert answer.status_code == 200
        assert "max-age" in answer.headers["cache-control"]


def test_hostile_text_stays_text(start: Callable[..., Web], database: Path) -> None:
    """No name and no error can become markup, leave its line or turn the direction of the page."""
    evil = '"><script>alert(1)</script>'
    with Queue[dict[str, str]](str(database), "emails") as queue:
        queue.put({"to": "x"}, task=evil[:100])
        job = queue.get(timeout=0)
        assert job is not None
        queue.fail(job, error=f"{evil}\u202egnp.exe\x1b[2J\n{'x' * 5000}")
    text = start().get("/").text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "x" * 500 not in text


def test_head_says_what_get_would(start: Callable[..., Web]) -> None:
    """HEAD has the status and headers of GET, and no body."""
    web = start()
    for path in (*PATHS, "/livez"):
        answer = web.client.head(path)
        assert answer.status_code == 200
        assert answer.content == b""
        assert int(answer.headers["content-length"]) > 0


# ---- health -------------------------------------------------------------------------------


def test_a_healthy_tree_is_live_and_ready(start: Callable[..., Web]) -> None:
    """Both probes say ok in one word, and as JSON when asked."""
    web = start()
    for path in ("/livez", "/readyz"):
        assert web.get(path).text == "ok\n"
        document = web.get(path, Accept="application/json").json()
        assert document == {"schema_version": 1, "ok": True, "reasons": []}


def test_a_silent_supervisor_is_not_live(start: Callable[..., Web], table: SlotTable) -> None:
    """When the supervisor's loop stands still, the probe says so."""
    web = start()
    table.tick(max(1, time.monotonic_ns() - 11_000_000_000))
    answer = web.get("/livez")
    assert answer.status_code == 503
    assert "the supervisor has been silent for 11 s" in answer.text


def _answering() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("answer_")}


def test_livez_does_not_touch_the_database(
    start: Callable[..., Web], wait_until: Callable[..., object]
) -> None:
    """A database that hangs does not make anybody kill a working tree."""
    gate = threading.Event()

    def hang() -> Source:
        gate.wait(30)
        raise OSError("opened too late")

    web, before = start(hang), _answering()
    others = [
        threading.Thread(target=httpx.get, args=(web.url + "/metrics",), kwargs={"timeout": 20})
        for _ in range(50)
    ]
    for other in others:
        other.start()
    try:
        wait_until(
            lambda: len(_answering() - before) == THREADS_MAX,
            what="every thread waits for the database",
        )
        began = time.monotonic()
        assert web.get("/livez").status_code == 200
        assert time.monotonic() - began < 2
    finally:
        gate.set()
        for other in others:
            other.join(20)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda table: setattr(table, "draining", True), "draining"),
        (
            lambda table: [
                slot.bury(cause=1, signal=9, exit_code=0, now_ns=time.monotonic_ns())
                for slot in table.live()
                if slot.kind is Kind.WORKER
            ],
            "pool default is without a ready worker",
        ),
    ],
)
def test_a_tree_that_takes_no_jobs_is_not_ready(
    start: Callable[..., Web], table: SlotTable, break_it: Callable[[SlotTable], None], reason: str
) -> None:
    """The probe answers 503 and names the reason, one a line."""
    web = start()
    break_it(table)
    answer = web.get("/readyz")
    assert answer.status_code == 503
    assert reason in answer.text
    assert web.get("/livez").status_code == 200
    assert reason in web.get("/").text


def test_the_note_of_a_parked_pool_is_shown(start: Callable[..., Web], table: SlotTable) -> None:
    """Why a pool was given up is on the page and in the probe, escaped."""
    for slot in table.live():
        if slot.kind is Kind.WORKER:
            slot.bury(cause=7, signal=0, exit_code=78, now_ns=time.monotonic_ns())
    table.pools["default"].parked = 1
    table.pools["default"].note = "ModuleNotFoundError: <myapp>"
    web = start()
    assert "pool default is parked: ModuleNotFoundError: <myapp>" in web.get("/readyz").text
    assert "ModuleNotFoundError: &lt;myapp&gt;" in web.get("/").text


def test_a_broken_database_is_an_answer(start: Callable[..., Web], database: Path) -> None:
    """Metrics and pages answer 200 and say so, only readiness fails; no traceback anywhere."""
    database.write_bytes(b"no database at all " * 1000)
    web = start()
    for path in ("/", "/api/status", "/metrics"):
        answer = web.get(path)
        assert answer.status_code == 200
        assert "Traceback" not in answer.text
    assert "herdsman_database_up 0.0" in web.get("/metrics").text.splitlines()
    assert "herdsman_queue_jobs" not in web.get("/metrics").text
    assert not web.get("/api/status").json()["database"]["up"]
    answer = web.get("/readyz")
    assert answer.status_code == 503
    assert answer.text.startswith("the database cannot be read: ")


def test_a_locked_database_does_not_hold_the_answer(
    start: Callable[..., Web], database: Path
) -> None:
    """While another program holds the file for itself, answers come in time, and say so."""
    with Queue[int](str(database), "emails") as queue:
        queue.put(1)
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("PRAGMA journal_mode = DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        web = start()
        began = time.monotonic()
        assert web.get("/readyz").status_code == 503
        assert "herdsman_database_up 0.0" in web.get("/metrics").text.splitlines()
        assert time.monotonic() - began < 12
        assert web.get("/livez").status_code == 200
    finally:
        holder.close()


# ---- who may ask --------------------------------------------------------------------------


def test_every_answer_carries_the_protective_headers(start: Callable[..., Web]) -> None:
    """Also refusals, files and failures: no frame, no sniffing, no foreign or inline script."""
    web = start()
    for path in (*PATHS, "/livez", "/nothing", "/static/herdsman.css"):
        headers = web.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert web.get("/", Host="evil.example").headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "", "a b"])
def test_another_host_name_is_refused(start: Callable[..., Web], host: str) -> None:
    """A page that points its own name at this address (DNS rebinding) reads nothing."""
    web = start()
    for path in (*PATHS, "/livez", "/static/herdsman.css"):
        answer = web.get(path, Host=host)
        assert answer.status_code == 400
        assert "emails" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9464", "127.0.0.1:1", "[::1]:9464"])
def test_names_of_this_host_are_answered(start: Callable[..., Web], host: str) -> None:
    """Every way to name the loopback works, whatever the port."""
    assert start().get("/livez", Host=host).status_code == 200


def test_bound_to_every_address_each_address_is_a_name() -> None:
    """A probe by pod address works then; a foreign name still does not."""
    hosts = Hosts("0.0.0.0")  # noqa: S104 - the case under test
    assert host_of("10.1.2.3:9464") in hosts
    assert host_of("[fe80::1]") in hosts
    assert host_of("evil.example") not in hosts
    assert host_of("10.1.2.3") not in Hosts("10.9.9.9")
    assert host_of("10.9.9.9") in Hosts("10.9.9.9")
    assert host_of("[fd00::9]:80") in Hosts("fd00::9")


def _basic(password: bytes) -> str:
    return "Basic " + base64.b64encode(b"me:" + password).decode()


def test_with_a_token_only_livez_is_open(start: Callable[..., Web]) -> None:
    """Everything that tells something wants the token, as Bearer or as Basic's password."""
    web = start(token=TOKEN)
    wrong = (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN.decode()}x"},
        {"Authorization": "Bearer"},
        {"Authorization": TOKEN.decode()},
        {"Authorization": "Basic !!!"},
        {"Authorization": _basic(b"")},
        {"Authorization": "Basic " + base64.b64encode(TOKEN).decode()},
        {"Cookie": f"token={TOKEN.decode()}"},
    )
    for path in (*PATHS, "/static/herdsman.css", "/nothing"):
        for headers in wrong:
            answer = web.get(path, **headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
    for path in PATHS:
        for right in (f"Bearer {TOKEN.decode()}", f"bearer  {TOKEN.decode()}", _basic(TOKEN)):
            assert web.get(path, Authorization=right).status_code == 200
        assert web.get(path, Authorization=_basic(TOKEN), Host="proxy.example").status_code == 200
    assert web.get("/livez").status_code == 200


def test_tokens_are_read_from_both_schemes() -> None:
    """Whatever stands in the header, reading it never fails."""
    assert sent_token("Bearer abc") == b"abc"
    assert sent_token("Basic bWU6YWJj") == b"abc"
    for nothing in (None, "", "Bearer ", "Basic", "Basic é", "Digest abc", "Basic YWJj"):
        assert sent_token(nothing) is None


def test_only_reading_is_possible(start: Callable[..., Web]) -> None:
    """Any other method is refused, with the two that work."""
    web = start()
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
        answer = web.client.request(method, "/", content=b"x" * 100_000)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"


NOT_THERE = (
    "/nothing", "/metrics/", "/static/", "/static/nothing.css", "/static/../page.py",
    "/static/%2e%2e%2fpage.py", "/static/..%5cpage.py", "//evil.example/", "/%00",
    "/templates/dashboard.html", "/api/status/x",
)  # fmt: skip


def test_what_is_not_there_is_404(start: Callable[..., Web]) -> None:
    """No path leads to a file, a redirect or a traceback."""
    web = start()
    for path in NOT_THERE:
        with socket.create_connection(("127.0.0.1", web.port), 10) as client:
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode())
            answer = _read_all(client)
        assert answer.startswith(b"HTTP/1.1 404 "), path
        assert b"there is nothing here" in answer


# ---- clients that mean no good ------------------------------------------------------------


def _read_all(client: socket.socket) -> bytes:
    parts = []
    client.settimeout(15)
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_nonsense_is_refused_and_the_next_is_served(
    start: Callable[..., Web], request_bytes: bytes
) -> None:
    """Malformed or oversized requests get a 4xx answer or none; nobody else notices."""
    web = start()
    with socket.create_connection(("127.0.0.1", web.port), 10) as client:
        client.sendall(request_bytes)
        client.shutdown(socket.SHUT_WR)
        try:
            answer = _read_all(client)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert web.get("/livez").status_code == 200


def test_a_client_that_sends_half_a_request_is_cut_off(
    start: Callable[..., Web], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow clients cannot keep everybody else out: each loses its place."""
    monkeypatch.setattr(server, "HEADER_SECONDS_MAX", 0.2)
    web = start()
    slow = [socket.create_connection(("127.0.0.1", web.port), 10) for _ in range(110)]
    try:
        for client in slow:
            client.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        for client in slow:
            with contextlib.suppress(ConnectionResetError):
                assert _read_all(client) == b""
        assert web.get("/livez").status_code == 200
    finally:
        for client in slow:
            client.close()


# ---- starting and stopping ----------------------------------------------------------------


def test_an_address_in_use_is_one_sentence() -> None:
    """Who holds the port is the operator's question; the text says what to do."""
    listener = server.bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with listener, pytest.raises(server.WebError) as caught:
        server.bind("127.0.0.1", port)
    wanted = (
        f"cannot listen on 127.0.0.1:{port}: address already in use; "
        "stop what holds it, or change web.listen"
    )
    assert str(caught.value) == wanted


@pytest.mark.parametrize("host", ["192.0.2.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_one_sentence(host: str) -> None:
    """A wrong listen address is refused with its own text."""
    with pytest.raises(server.WebError, match=rf"{host}:9464"):
        server.bind(host, 9464)


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"x" * 5000])
def test_a_token_file_of_no_use_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty, too short and too long are refused; the token itself is never shown."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(server.WebError, match=r"web\.token_file") as caught:
        server.read_token(path)
    assert "short" not in str(caught.value).replace("too short", "")
    path.write_bytes(b"  long enough token \n")
    assert server.read_token(path) == b"long enough token"


TREE = textwrap.dedent("""
    import sys, uuid
    from pathlib import Path
    from supervisor import logs, settings, web
    from supervisor.slots import SlotState, SlotTable
    from supervisor.supervise import PoolSpec, Tree, run
    config, slots = Path(sys.argv[1]), Path(sys.argv[2])
    chosen = settings.load(config, {})
    logs.configure(json=True)
    def idle(child):
        child.ready()
        while not child.stopping:
            import select
            select.select([child.wake_fd], [], [], 1.0)
            child.clear_wake()
            child.slot.enter(SlotState.IDLE)
        return 0
    table = SlotTable.create(
        slots, instance_uuid=str(uuid.uuid4()), pools=["default"], capacity=24
    )
    tree = Tree(
        pools=[PoolSpec(name="default", processes=1, main=idle)],
        keeper=idle,
        web=lambda child: web.serve(child, chosen, chosen.database),
        table=table,
        grace_seconds=3.0,
    )
    assert "uvicorn" not in sys.modules
    sys.exit(run(tree))
""")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Start supervisors with a dummy worker and keeper and the real web; end them all."""
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> subprocess.Popen[bytes]:
        config = tmp_path / "herdsman.toml"
        config.write_text(
            f'database = "herdsman.db"\n[web]\nlisten = "127.0.0.1:{port}"\n'
            '[logs]\nfile = "web.log"\n'
        )
        Queue[int](str(tmp_path / "herdsman.db"), "emails").put(1)
        process = subprocess.Popen(
            [sys.executable, "-c", TREE, str(config), str(tmp_path / "tree.slots")],
            cwd=ROOT,
            stderr=(tmp_path / "log").open("wb"),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(20)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_web_of_a_tree_serves_restarts_and_stops(
    tree: Callable[[int], subprocess.Popen[bytes]],
    wait_until: Callable[..., object],
    tmp_path: Path,
) -> None:
    """Killed, it is back at once on the same port; at TERM the tree ends cleanly, without it."""
    port = _free_port()
    process = tree(port)
    wait_until(lambda: _ready(port), what="the tree is ready")
    table = SlotTable.attach(tmp_path / "tree.slots", writable=False)
    web = next(slot for slot in table.live() if slot.kind is Kind.WEB)
    first = web.pid
    os.kill(first, signal.SIGKILL)
    wait_until(
        lambda: any(s.kind is Kind.WEB and s.pid != first for s in table.live()) and _ready(port),
        what="another web serves",
    )
    table.close()
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    assert 'herdsman_worker_exits_total{cause="signal",pool="@web"} 1.0' in text.splitlines()
    assert 'herdsman_queue_jobs{queue="emails",state="ready"} 1.0' in text.splitlines()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not _ready(port)


def test_the_web_of_a_tree_beats_once_a_second_and_reopens_logs(
    tree: Callable[[int], subprocess.Popen[bytes]],
    wait_until: Callable[..., object],
    tmp_path: Path,
) -> None:
    """It shows signs of life while nobody asks, and a signal neither stops it nor makes it spin."""
    port = _free_port()
    tree(port)
    wait_until(lambda: _ready(port), what="the tree is ready")
    table = SlotTable.attach(tmp_path / "tree.slots", writable=False)
    web = next(slot for slot in table.live() if slot.kind is Kind.WEB)
    os.kill(web.pid, signal.SIGUSR1)
    wait_until((tmp_path / "web.log").exists, what="the log file is opened anew")
    assert (tmp_path / "web.log").stat().st_mode & 0o777 == 0o600
    before, began = web.progress, time.monotonic()
    wait_until(lambda: web.progress >= before + 3, what="three signs of life")
    assert time.monotonic() - began > 1.5
    assert web.rss_bytes > 0
    table.close()


def test_a_taken_port_is_told_and_the_workers_go_on(
    tree: Callable[[int], subprocess.Popen[bytes]],
    wait_until: Callable[..., object],
    tmp_path: Path,
) -> None:
    """The web says in one sentence why it is away, and comes back when the port is free."""
    with server.bind("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        process = tree(port)
        log = tmp_path / "log"
        wait_until(lambda: b"web_not_started" in log.read_bytes(), what="the reason is logged")
        lines = [json.loads(line) for line in log.read_bytes().splitlines()]
        why = next(line["why"] for line in lines if line["event"] == "web_not_started")
        assert why.startswith(f"cannot listen on 127.0.0.1:{port}: address already in use")
        table = SlotTable.attach(tmp_path / "tree.slots", writable=False)
        wait_until(
            lambda: any(s.kind is Kind.WORKER and s.state is SlotState.IDLE for s in table.live()),
            what="the worker works",
        )
        table.close()
        assert process.poll() is None
        assert b"Traceback" not in log.read_bytes()
    wait_until(lambda: _ready(port), timeout_seconds=40, what="the web came back")


# ---- small parts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\u2013"), (0, "0 s"), (0.25, "250 ms"), (1.234, "1.2 s"), (59.4, "59 s"),
        (60, "1 min"), (192, "3 min 12 s"), (3960, "1 h 6 min"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations_read_well(seconds: float | None, text: str) -> None:
    """One or two units, never a pile of digits."""
    assert page.span(seconds) == text


def test_bars_stay_inside_and_show_every_state() -> None:
    """A state with one job among millions is still visible, and no bar is too long."""
    depth = {"claimed": 1, "ready": 9_000_000, "delayed": 1, "dead": 1}
    pieces = page.bar(depth, sum(depth.values()))
    assert [piece["state"] for piece in pieces] == ["claimed", "ready", "delayed", "dead"]
    assert all(float(piece["width"]) >= 3 for piece in pieces)
    last = pieces[-1]
    assert float(last["x"]) + float(last["width"]) <= page.BAR_WIDTH + 0.1
    assert page.bar({}, 0) == []
