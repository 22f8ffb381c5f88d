"""Tell cheaply whether somebody may have committed: a look at the log file, not into it.

Boundary: one `stat`, and one word of the kernel's when the file is written; no database, no
clock. It errs on one side only: it may say yes without reason, and its user asks the database
itself once a second whatever it says.
"""

from __future__ import annotations

import os
from typing import Final

from supervisor.linux import open_watch, watch_once

SETTLED_SECONDS: Final = 0.05
"""A file that was written just before a look may be written again and look the same: the kernel
stamps with the time of its last tick (10 ms at most), and a log that starts again from its top
keeps its size. So one look more than that after the first is needed, and the answer is yes."""
SILENT_MAX: Final = 3
"""So often the kernel may keep a write to itself before it is not relied upon any more; once or
twice can be a write that a look met between its time stamp and the word of it."""


class Glance:
    """What a write-ahead log looked like at the last look. `path` is "" where there is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int, int] | None = None
        self._since = 0.0
        self._settled = False
        self.fd = -1
        self._armed = False
        self._silent = 0

    def stirred(self, now: float) -> bool:
        """Whether the log may hold commits of after the last look; `now` is in steady seconds."""
        try:
            status = os.stat(self._path)
        except OSError:
            self._seen = None
            return True  # no log, or none to be seen: only the database can tell
        seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._since, self._settled = seen, now, False
            return True
        if self._settled:
            return False
        self._settled = now - self._since >= SETTLED_SECONDS
        return True

    def arm(self) -> bool:
        """Have `fd` become readable at the next write; False where one has to look instead.

        Look once more before sleeping: a write of before this call is not told.
        """
        if not self._armed and self._silent < SILENT_MAX:
            if self.fd < 0:
                self.fd = open_watch()
            self._armed = self.fd >= 0 and watch_once(self.fd, self._path)
        return self._armed

    def told(self, stirred: bool) -> bool:
        """Whether `fd` has told of a write since `arm`; it then has to be armed anew.

        `stirred` is what a look said just before: a write that the kernel kept to itself (as some
        file systems do) is remembered, and too many of them end the use of `fd`.
        """
        try:
            self._armed = not os.read(self.fd, 4096)
            self._silent = 0
            return True
        except BlockingIOError:
            if stirred:
                self._silent += 1
                if self._silent >= SILENT_MAX:
                    self.close()
            return False

    def close(self) -> None:
        """Close `fd`."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._armed = -1, False
