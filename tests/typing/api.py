"""Use the whole library as a typed program does, rightly and, where marked, wrongly.

Nothing here is run. A type checker reads it: what it infers is asserted, and every marked line
must be an error, since a mark that is not needed is an error too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict, assert_type

from queue_core import (
    AsyncQueue,
    Attempt,
    Backoff,
    Counts,
    Done,
    Engine,
    Job,
    JobId,
    Queue,
    Ran,
    Reason,
    Reject,
    Retry,
    Serializer,
    Snooze,
    State,
    Worker,
    open_engine,
)
from queue_core.upkeep import BackedUp, Diagnostics, Drift, Vacuumed


class Mail(TypedDict):
    """A payload."""

    to: str


class Plain:
    """A serializer for texts."""

    def dumps(self, payload: str, /) -> bytes | str:
        """Encode."""
        return payload

    def loads(self, data: bytes, /) -> str:
        """Decode."""
        return data.decode()


def use(path: Path) -> None:
    """Use a queue."""
    mails: Queue[Mail] = Queue(path, "mails", max_attempts=3, backoff=Backoff(kind="fixed"))
    texts = Queue(path, "texts", serializer=Plain(), backoff=lambda attempt: attempt * 2.0)
    assert_type(texts, Queue[str])
    assert_type(mails.put({"to": "a"}, delay=timedelta(seconds=5), key="k"), JobId)
    assert_type(mails.put({"to": "a"}).duplicate, bool)
    assert_type(mails.put_many([{"to": "a"}], keys=[None], headers={"h": 1}), list[JobId])
    job = mails.get(timeout=5)
    assert_type(job, Job[Mail] | None)
    assert job is not None
    assert_type(job.payload, Mail)
    assert_type(job.headers, Mapping[str, Any])
    assert_type(list(job.ledger), list[Attempt])
    assert_type(job.reason, Reason | None)
    assert_type(job.state, State)
    assert_type(mails.get_many(3), list[Job[Mail]])
    mails.ack([job])
    mails.finish(job, Snooze(after_seconds=1))
    assert_type(mails.find(1), Job[Mail] | None)
    assert_type(mails.dead(reason="poison", newest=True), list[Job[Mail]])
    assert_type(mails.jobs("ready"), list[Job[Mail]])
    assert_type(mails.counts(), Counts)
    assert_type(mails.replay_all(reason=Reason.POISON, dry_run=True), int)
    assert_type(mails.backup("copy.db"), BackedUp)
    assert_type(mails.vacuum(), Vacuumed)
    assert_type(mails.recount(), list[Drift])
    assert_type(mails.check(full=True), list[str])
    assert_type(mails.diagnostics(), Diagnostics)
    engine = open_engine(path)
    assert_type(engine, Engine)
    with mails.transaction() as tx, Queue[int](path, engine=engine) as numbers:
        numbers.put(1, tx=tx)
    serializer: Serializer[str] = Plain()
    assert_type(Queue(path, serializer=serializer), Queue[str])


def handle(job: Job[Mail]) -> Done | Retry | Reject | None:
    """Handle a job."""
    return Retry(error="later", after_seconds=1.0) if job.payload["to"] else None


def work(mails: Queue[Mail]) -> None:
    """Use a worker."""
    worker = Worker(mails, handle, permanent_errors=(ValueError,), heartbeat_seconds=5)
    assert_type(worker, Worker[Mail])
    ran = worker.run_once(timeout=1)
    assert_type(ran, Ran[Mail] | None)
    worker.run(signals=())


async def use_async(path: Path) -> None:
    """Use a queue from coroutines."""
    async with AsyncQueue[Mail](path, "mails", max_depth=10) as mails:
        assert_type(await mails.put({"to": "a"}, key="k", priority=3), JobId)
        assert_type(await mails.get(timeout=5), Job[Mail] | None)
        assert_type(await mails.get_many(3), list[Job[Mail]])
        assert_type(await mails.counts(), Counts)
        async with mails.transaction() as tx:
            assert_type(await tx.put({"to": "b"}), JobId)


def misuse(path: Path, mails: Queue[Mail], texts: Queue[str], job: Job[Mail]) -> None:
    """Get it wrong in every way that a type checker should catch."""
    mails.put("a text")  # type: ignore[arg-type]
    mails.put({"from": "a"})  # type: ignore[typeddict-item]
    mails.put_many([1, 2])  # type: ignore[list-item]
    mails.put({"to": "a"}, priority="high")  # type: ignore[arg-type]
    mails.put({"to": "a"}, dealy=5)  # type: ignore[call-arg]
    mails.get("soon")  # type: ignore[arg-type]
    texts.ack(job)  # type: ignore[arg-type]
    print(mails.get().payload)  # type: ignore[union-attr]
    mails.finish(job, "done")  # type: ignore[arg-type]
    job.payload = {"to": "b"}  # type: ignore[misc]
    Queue[int](path, serializer=Plain())  # type: ignore[arg-type]
    Worker(texts, handle)  # type: ignore[arg-type]
    Worker(mails, lambda job: "done")  # type: ignore[arg-type,return-value]
    Backoff(kind="linear")  # type: ignore[arg-type]
    Backoff("fixed")  # type: ignore[call-arg]
    Retry()  # type: ignore[call-arg]


async def misuse_async(mails: AsyncQueue[Mail]) -> None:
    """Forget what coroutines need."""
    await mails.put({"to": "a"}, dealy=5)  # type: ignore[call-arg]
    await mails.put("a text")  # type: ignore[arg-type]
    print((await mails.get()).payload)  # type: ignore[union-attr]
    print(mails.counts().ready)  # type: ignore[attr-defined]
