"""Start supervisors from a process that has imported everything, by forking it.

Half a second of each start is an interpreter's imports, a hundred times over. A template has
done them; what it forks becomes the supervisor by the same entry point, with descriptors,
environment, session and folder as if it had been executed. The tests of the command line start
the same services by executing them.

Boundary: processes only; what runs in them is `service`'s and `tree`'s.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 30
STANDARD = (0, 1, 2)
LOST = -1000
"""The exit code of a copy whose template is gone: no process has it."""

# ---- the template's side --------------------------------------------------------------------


def service(arguments: Sequence[str]) -> int:
    """Be `python -m supervisor`."""
    from supervisor.cli import main

    sys.argv = ["herdsman", *arguments]
    main()
    return 0


def host(arguments: Sequence[str]) -> int:
    """Be `tree.py`."""
    faulthandler.enable()
    from tests.process.tree import serve

    return serve(Path(arguments[0]))


KINDS = {"service": service, "host": host}


def prepare(kind: str) -> None:
    """Import what a supervisor of this kind has imported by the time it supervises."""
    # It finds the room for titles where the first environment lies: `become` sets another.
    setproctitle.getproctitle()
    if kind == "service":
        import supervisor.cli.app
        from supervisor.cli import run

        run._import_structlog()
        from supervisor import keeper, logs, settings, supervise, worker  # noqa: F401
    else:
        sys.modules["rich"] = None  # type: ignore[assignment]  # as `serve` has it
        import supervisor.supervise  # noqa: F401
        import tests.process.tree  # noqa: F401


def become(kind: str, order: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn the copy into a supervisor, and leave with its exit code."""
    code = 1
    try:
        os.setsid()
        for descriptor, standard in zip(descriptors, STANDARD, strict=True):
            os.dup2(descriptor, standard)
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environ"])
        random.seed()
        code = KINDS[kind](order["arguments"])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def answer_all(kind: str, requests: socket.socket) -> None:
    """Fork a supervisor, or say how one ended, for each request, until nobody is left to ask."""
    if os.fork():
        os._exit(0)  # so that the one behind is no child of the tests', which count theirs
    prepare(kind)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, len(STANDARD))
        if not message:
            return
        order = json.loads(message)
        pid = 0
        reply: int | None = None
        if "pid" in order:
            ended, status = os.waitpid(order["pid"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if ended else None
        else:
            pid = reply = os.fork()
            if pid == 0:
                become(kind, order, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            requests.send(json.dumps(reply).encode())
        except OSError:  # whoever asked waits no more, and was told of no copy
            if pid:
                os.kill(pid, signal.SIGKILL)
            return


# ---- the test's side ------------------------------------------------------------------------


class Copy:
    """A supervisor that a template has forked; used as a `subprocess.Popen` is."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._ended = os.pidfd_open(pid)  # a zombie at the worst: only `poll` reaps it

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            os.close(self._ended)
            self.returncode = LOST  # unless it is told
            self.returncode = self._template.ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code once it has one. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"supervisor {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code


class Template:
    """A process to copy; it ends with the one that made it."""

    def __init__(self, kind: str) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(ANSWER_SECONDS)
        self._lock = threading.Lock()
        with theirs:
            subprocess.run(
                [sys.executable, "-P", __file__, kind, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=ROOT, check=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=ANSWER_SECONDS,
            )  # fmt: skip

    def ask(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Send one request, and return what is answered.

        Whatever goes wrong is its last: a late answer would be taken for the next one's.
        """
        with self._lock:
            try:
                socket.send_fds(self._ours, [json.dumps(order).encode()], descriptors)
                if not (reply := self._ours.recv(1 << 16)):
                    raise ConnectionError("the template has ended")
                return json.loads(reply)
            except BaseException:
                self.end()
                raise

    def start(
        self,
        *arguments: object,
        folder: Path,
        environ: Mapping[str, str],
        out: int,
    ) -> Copy:
        """Start a supervisor that writes its output to a descriptor."""
        words = [str(one) for one in arguments]
        order = {"arguments": words, "folder": str(folder), "environ": dict(environ)}
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            return Copy(self, self.ask(order, [null, out, out]))
        finally:
            os.close(null)

    def end(self) -> None:
        """End it: it has nobody left to answer to. The next to ask for its kind gets another."""
        for kind in [kind for kind, one in _made.items() if one is self]:
            del _made[kind]
        self._ours.close()


_made: dict[str, Template] = {}


def template(kind: str) -> Template:
    """Return the template of this process for `service` or `host`; there is one of each."""
    if kind not in _made:
        _made[kind] = Template(kind)
    return _made[kind]


def end_all() -> None:
    """End the templates of this process."""
    for one in list(_made.values()):
        one.end()


def let_go(started: Sequence[subprocess.Popen[bytes] | Copy]) -> None:
    """Wait for supervisors that were killed, each of them, and for what watches them."""
    for one in started:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            one.wait(5)


if __name__ == "__main__":
    answer_all(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
