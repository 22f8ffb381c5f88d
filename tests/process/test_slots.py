"""The shared records: what a reader sees while others write, and after they died."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.slot import BATCH_MAX, NOTE_BYTES_MAX, Kind, Slot, SlotState
from supervisor.slots import (
    UPKEEP_RECORDS,
    SlotsError,
    SlotTable,
    find_slots,
    previous_slots,
    slots_path,
)
from tests.conftest import wait_until

UUID = str(uuid.uuid4())


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    """Return a table of two pools, and of four records that workers may have."""
    made = create(tmp_path / "t.slots")
    yield made
    made.close()


def create(path: Path, capacity: int = 4 + UPKEEP_RECORDS) -> SlotTable:
    """Create a table."""
    return SlotTable.create(path, instance_uuid=UUID, pools=["a", "b"], capacity=capacity)


def opened(table: SlotTable, name: str = "a/0") -> Slot:
    """Return a slot given to a process."""
    slot = table.take()
    assert slot is not None
    slot.open(name=name, pool_index=0, kind=Kind.WORKER, now_ns=time.monotonic_ns())
    return slot


def reopened(table: SlotTable, slot: Slot, name: str = "a/0") -> Slot:
    """Return this FREE slot given to another process."""
    slot.open(name=name, pool_index=0, kind=Kind.WORKER, now_ns=time.monotonic_ns())
    return slot


def in_child(work: Callable[[], None]) -> int:
    """Run a function in a forked process; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


# ---- the file -------------------------------------------------------------------------------


def test_another_process_reads_what_was_written(table: SlotTable) -> None:
    """Attaching by path shows the same pools, slots and header."""
    slot = opened(table, "emails/0")
    slot.begin_batch([(7, 1), (8, 3)])
    assert slot.start(0, hard_ns=123)
    table.pools["a"].note = "no module named x"
    other = SlotTable.attach(table.path, writable=False)
    seen = other.slots[slot.index]
    assert (seen.name, seen.state, seen.job, seen.run) == ("emails/0", SlotState.RUN, 7, 1)
    assert seen.hard_deadline_ns == 123
    assert list(other.pools) == ["a", "b", "@keeper", "@web"]
    assert other.pools["a"].note == "no module named x"
    assert other.instance_uuid == UUID
    assert other.supervisor_pid == os.getpid()
    assert other.same_boot
    other.close()


def test_only_we_can_read_the_files(table: SlotTable) -> None:
    """Files 0600, the folder of stacks 0700."""
    slot = opened(table)
    stacks = Path(slot.stack_path)
    assert stat.S_IMODE(table.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(stacks.stat().st_mode) == 0o600
    assert stat.S_IMODE(stacks.parent.stat().st_mode) == 0o700


def test_another_layout_is_refused_in_one_sentence(table: SlotTable) -> None:
    """A file of another version, of no version, and one cut short."""
    with open(table.path, "r+b") as file, mmap.mmap(file.fileno(), 4096) as mapping:
        mapping[8] = 99
    with pytest.raises(SlotsError, match="has layout 99, and this herdsman reads layout 1"):
        SlotTable.attach(table.path)
    table.path.write_bytes(b"x" * 8192)
    with pytest.raises(SlotsError, match="is no herdsman slot file"):
        SlotTable.attach(table.path)
    table.path.write_bytes(b"herdsman")
    with pytest.raises(SlotsError, match="is no herdsman slot file"):
        SlotTable.attach(table.path)
    with pytest.raises(SlotsError, match="cannot open"):
        SlotTable.attach(table.path.with_name("none"))


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Neither at creation, which replaces it, nor at attaching, which refuses."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "t.slots"
    path.symlink_to(precious)
    with pytest.raises(SlotsError):
        SlotTable.attach(path)
    create(path).close()
    assert precious.read_text() == "mine"
    assert not path.is_symlink()


def test_the_path_depends_on_database_and_instance(tmp_path: Path) -> None:
    """One name for one database by any road to it; found again by readers."""
    database = tmp_path / "q.db"
    database.touch()
    (tmp_path / "link.db").symlink_to(database)
    path = slots_path(database)
    assert path == slots_path(tmp_path / "link.db")
    assert path != slots_path(database, "other")
    assert find_slots(database) is None
    made = create(path)
    try:
        assert find_slots(database) == path
        assert find_slots(database, "other") is None
    finally:
        made.unlink()
        made.close()
    assert find_slots(database) is None


def test_the_place_of_another_user_is_passed_over(tmp_path: Path) -> None:
    """A directory (or anything not ours) under our name sends us to the next place."""
    database = tmp_path / "q.db"
    database.touch()
    first = slots_path(database)
    first.mkdir()
    try:
        second = slots_path(database)
    finally:
        first.rmdir()
    assert second.parent != first.parent


def test_records_of_crashed_runs_are_set_aside_up_to_a_limit(tmp_path: Path) -> None:
    """Each run keeps what the one before left, with its stacks; the number is bounded."""
    path = tmp_path / "t.slots"
    for run in range(12):
        made = create(path)
        slot = opened(made, f"run/{run}")
        Path(slot.stack_path).write_text(f"stack {run}")
        made.close()
    left = previous_slots(path)
    assert len(left) == 8
    old = SlotTable.attach(left[0])
    assert old.slots[0].name == "run/0"
    assert old.slots[0].stack_text() == "stack 0"
    old.close()
    newest = SlotTable.attach(left[-1])
    assert newest.slots[0].name == "run/10"
    newest.close()


def test_the_file_outlives_a_sigkill_of_its_creator(tmp_path: Path) -> None:
    """Batch, started and finished are all there."""
    path = tmp_path / "t.slots"

    def work() -> None:
        made = create(path)
        slot = opened(made)
        slot.begin_batch([(1, 1), (2, 1), (3, 1)])
        slot.start(0)
        slot.finish_ok(0, 55)
        slot.start(1)
        os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(in_child(work), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    made = SlotTable.attach(path)
    batch = made.slots[0].batch()
    assert batch is not None
    assert (batch.finished, batch.running, batch.unstarted) == ({0: 55}, 1, ((3, 1),))
    made.close()


def test_a_full_place_is_an_error_and_no_crash_later(tmp_path: Path) -> None:
    """All pages are taken at creation: a full tmpfs would kill a writer afterwards."""
    made = create(tmp_path / "t.slots")
    size = (tmp_path / "t.slots").stat()
    assert size.st_blocks * 512 >= size.st_size
    made.close()
    with pytest.raises(SlotsError, match="cannot create"):
        create(tmp_path / "none" / "t.slots")


# ---- records --------------------------------------------------------------------------------


def test_the_last_records_are_for_the_keeper_and_web(table: SlotTable) -> None:
    """Workers get the others, until somebody frees one."""
    taken = []
    while (slot := table.take()) is not None:
        slot.open(name="a/0", pool_index=0, kind=Kind.WORKER, now_ns=1)
        taken.append(slot)
    assert len(taken) == len(table.slots) - UPKEEP_RECORDS
    for _ in range(UPKEEP_RECORDS):
        kept = table.take(upkeep=True)
        assert kept is not None
        kept.open(name="keeper", pool_index=0, kind=Kind.KEEPER, now_ns=1)
    assert table.take(upkeep=True) is None


def test_a_dead_record_waits_until_it_is_freed(table: SlotTable) -> None:
    """Life of a record: FREE, BOOT, IDLE, DEAD, FREE; nobody takes it in between."""
    slot = opened(table)
    slot.enter(SlotState.IDLE)
    assert slot.ready_ns
    with pytest.raises(RuntimeError, match="not FREE"):
        slot.open(name="b/0", pool_index=1, kind=Kind.WORKER, now_ns=1)
    slot.free()
    assert slot.state is SlotState.IDLE, "only the dead are freed"
    slot.bury(cause=2, signal=9, exit_code=0, now_ns=5)
    assert table.dead() == [slot]
    assert table.take() is not slot
    slot.free()
    again = reopened(table, slot, "b/1")
    assert (again.epoch, again.cause, again.jobs_done, again.ready_ns) == (2, 0, 0, 0)


def test_a_new_process_inherits_nothing_from_the_one_before(table: SlotTable) -> None:
    """Batch, note, stack and wishes are cleared."""
    slot = opened(table)
    slot.begin_batch([(1, 1)])
    slot.start(0)
    slot.note = "broken"
    slot.retire = 1
    Path(slot.stack_path).write_text("old stack")
    slot.bury(cause=1, signal=0, exit_code=1, now_ns=1)
    slot.free()
    reopened(table, slot)
    batch = slot.batch()
    assert batch is not None
    assert (batch.claims, batch.started) == ((), 0)
    assert (slot.note, slot.retire, slot.stack_text()) == ("", 0, "")


@given(st.text(max_size=800))
def test_a_note_of_any_text_is_cut_between_characters(text: str) -> None:
    """Hostile texts of any length come back whole, or as a prefix."""
    words = memoryview(bytearray(8 * 1024)).cast("Q")
    slot = Slot(words, 0, "")
    slot.note = text
    encodable = text.encode("utf-8", "replace").decode()
    assert encodable.startswith(slot.note)
    assert len(slot.note.encode()) > NOTE_BYTES_MAX - 4 or slot.note == encodable


def test_stacks_are_bounded_and_printable(table: SlotTable) -> None:
    """A terminal never gets control characters from a dead process."""
    slot = opened(table)
    Path(slot.stack_path).write_bytes(b"\x1b[2J" + b"x" * 100_000 + b"\nlast line\xff")
    text = slot.stack_text()
    assert len(text.encode()) <= 16 * 1024 + 8
    assert "last line" in text
    assert "\x1b" not in text
    Path(slot.stack_path).write_text("dump\nFatal Python error: Aborted\nthe stack\n")
    assert slot.stack_text().startswith("Fatal Python error: Aborted")


# ---- batches --------------------------------------------------------------------------------


def test_a_batch_over_the_limit_is_refused(table: SlotTable) -> None:
    """256 fit, 257 do not."""
    slot = opened(table)
    slot.begin_batch([(at, 1) for at in range(BATCH_MAX)])
    for at in range(BATCH_MAX):
        assert slot.start(at)
        slot.finish_ok(at, at)
    batch = slot.batch()
    assert batch is not None
    assert batch.finished == {at: at for at in range(BATCH_MAX)}
    with pytest.raises(ValueError, match="257"):
        slot.begin_batch([(at, 1) for at in range(BATCH_MAX + 1)])


def test_a_revoked_rest_is_not_started(table: SlotTable) -> None:
    """The running job goes on, the rest is the keeper's; the next batch is free again."""
    slot = opened(table)
    slot.begin_batch([(1, 1), (2, 1), (3, 1)])
    assert slot.start(0)
    assert slot.revoke() == 1
    batch = slot.batch()
    assert batch is not None
    assert batch.rest == ((2, 1), (3, 1))
    assert batch.running == 0
    assert not slot.start(1)
    assert slot.revoke() == 1, "asking again says the same"
    slot.end_batch()
    assert slot.revoke() is None
    slot.begin_batch([(4, 1)])
    assert slot.start(0)
    assert slot.revoke() is None, "nothing left to take back"


def test_a_revocation_never_reaches_the_next_batch(table: SlotTable) -> None:
    """The worker begins another batch in the middle of a revocation of the old one."""
    slot = opened(table)
    slot.begin_batch([(1, 1), (2, 1)])

    def next_batch(seconds: float) -> None:
        slot.end_batch()
        slot.begin_batch([(3, 1), (4, 1)])

    assert slot.revoke(pause=next_batch) is None
    assert slot.start(0)
    assert slot.start(1)
    batch = slot.batch()
    assert batch is not None
    assert batch.rest == ()


def test_death_while_publishing_a_batch_shows_no_batch(table: SlotTable) -> None:
    """An odd sequence: the reader knows that it knows nothing, at once."""
    slot = opened(table)

    class Bomb(list[tuple[int, int]]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            yield (1, 1)
            os._exit(0)

    os.waitpid(in_child(lambda: slot.begin_batch(Bomb([(1, 1), (2, 1)]))), 0)
    before = time.monotonic()
    assert slot.batch() is None
    assert time.monotonic() - before < 1
    slot.bury(cause=2, signal=9, exit_code=0, now_ns=1)
    slot.free()
    assert reopened(table, slot).batch() is not None


def test_readers_never_see_a_mixture_of_two_batches(table: SlotTable) -> None:
    """A writer publishes and works as fast as it can while we read."""
    slot = opened(table)

    def work() -> None:
        number = 0
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            number += 1
            size = 1 + number % 40
            slot.begin_batch([(number, number)] * size)
            for at in range(size):
                slot.start(at)
                slot.finish_ok(at, number)
            if number % 3 == 0:
                slot.end_batch()

    pid = in_child(work)
    looks = 0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        batch = slot.batch()
        if batch is None or not batch.claims:
            continue
        looks += 1
        (number, _) = batch.claims[0]
        assert set(batch.claims) == {(number, number)}
        assert len(batch.claims) == 1 + number % 40
        assert set(batch.finished.values()) <= {number}
        assert list(batch.finished) == list(range(len(batch.finished)))
    assert looks > 50


def test_no_job_is_both_started_and_handed_back(table: SlotTable) -> None:
    """Worker and keeper race over every batch; each job has exactly one of the two."""
    slot = opened(table)
    rounds = 60

    def work() -> None:
        for number in range(rounds):
            slot.begin_batch([(number * 100 + at, 1) for at in range(100)])
            ran = 0
            for at in range(100):
                if not slot.start(at):
                    break
                ran = at + 1
                time.sleep(0)
            slot.holder = number << 16 | ran + 1
            while slot.retire != number + 1:  # the test has compared
                time.sleep(0)

    pid = in_child(work)
    handed_back = 0
    for number in range(rounds):
        wait_until(
            lambda n=number: (b := slot.batch()) is not None and b.claims[:1] == ((n * 100, 1),),
            poll_seconds=0,
        )
        started = slot.revoke()
        batch = slot.batch()
        assert batch is not None
        wait_until(lambda n=number: slot.holder >> 16 == n and slot.holder & 0xFFFF, poll_seconds=0)
        ran = (slot.holder & 0xFFFF) - 1
        if started is None:
            assert batch.rest == ()
        else:
            handed_back += 1
            assert batch.rest == tuple((number * 100 + at, 1) for at in range(started, 100))
            # One job may be neither: refused to the worker, which hands it back itself.
            assert started - 1 <= ran <= started
        slot.retire = number + 1
    assert os.waitpid(pid, 0)[1] == 0
    assert handed_back > 0


def test_two_python_versions_of_a_process_share_the_words(table: SlotTable) -> None:
    """A process started from nothing attaches and reads what we write now."""
    slot = opened(table)
    code = (
        "import sys, time; from supervisor.slots import SlotTable\n"
        "slot = SlotTable.attach(sys.argv[1]).slots[0]\n"
        "deadline = time.monotonic() + 20\n"
        "slot.holder = 1\n"
        "while slot.progress < 500 and time.monotonic() < deadline: time.sleep(0)\n"
        "sys.exit(0 if slot.progress >= 500 else 1)"
    )
    reader = subprocess.Popen([sys.executable, "-c", code, str(table.path)])
    wait_until(lambda: slot.holder == 1)
    for _ in range(500):
        slot.beat()
    assert reader.wait(30) == 0
