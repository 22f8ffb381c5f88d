"""Tell systemd what the supervisor is doing.

Boundary: one datagram at a time to `NOTIFY_SOCKET`, never blocking, never
failing: a supervisor without systemd behaves the same.
"""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends state changes to the service manager, when there is one."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self.address = "\0" + address[1:] if address.startswith("@") else address
        self.sent = 0
        self._watchdog_at_ns = 0
        limit = os.environ.get("WATCHDOG_USEC", "")
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usable = bool(self.address) and ours and limit.isdigit()
        self.watchdog_seconds = int(limit) / 2_000_000 if usable else 0.0
        """Send WATCHDOG=1 as often as this; 0 for never. Half the limit, as systemd advises."""

    def feed(self, now_ns: int, *, well: bool) -> int | None:
        """Feed systemd's watchdog when it is due and all is well; return when to come again."""
        if not self.watchdog_seconds:
            return None
        if well and now_ns >= self._watchdog_at_ns:
            self.send(WATCHDOG=1)
            self._watchdog_at_ns = now_ns + int(self.watchdog_seconds * 1_000_000_000)
        return max(self._watchdog_at_ns, now_ns + 100_000_000)

    def send(self, **fields: str | int) -> None:
        """Send fields in one datagram, `READY=1`."""
        if not self.address:
            return
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, flags) as sender:
                sender.sendto(message.encode(), self.address)
            self.sent += 1
        except OSError:
            return  # no reader, or a full queue: news, not a duty
