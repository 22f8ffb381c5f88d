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
        limit = os.environ.get("WATCHDOG_USEC", "")
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usable = bool(self.address) and ours and limit.isdigit()
        self.watchdog_seconds = int(limit) / 2_000_000 if usable else 0.0
        """Send WATCHDOG=1 as often as this; 0 for never. Half the limit, as systemd advises."""

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
