"""Run background jobs in worker processes that an operator can see into.

The process tree, all forked by one single-threaded supervisor:

    herdsman run        forks, waits, restarts; no database handle, no handler code, no HTTP
    ├─ keeper           all upkeep of the database: leases, due jobs, dead workers, retention
    ├─ web              /metrics, /livez, /readyz and the dashboard
    └─ worker pool/N    claims jobs in batches and runs handlers, each in its own process group

Two halves that do not know each other meet here. `queue_core` stores jobs and never forks.
The process keeping (`supervise`, `child`, `policy`, `slots`) keeps processes alive and never
touches a queue. `worker` and `keeper` join the two, `web` shows both, and `cli` wires
everything by passing functions in.

What each process is doing stands in a slot of a shared mapping that outlives the process:
after a SIGKILL the supervisor still knows which job died, so that job alone is charged and
everything else the worker had claimed goes back at once.

Signals to the supervisor: TERM drains, QUIT cancels the running jobs and stops, HUP reloads,
USR1 reopens logs, USR2 prints the state and the stacks of all, TTIN and TTOU add and remove a
worker. Exit codes: 0 clean, 1 failed check or job, 2 usage, 69 database unavailable, 70 gave
up, 73 another supervisor holds this database, 75 jobs were killed at the deadline,
78 configuration.

This package imports nothing here, so that `herdsman --help` stays quick and a child of one
role does not carry the modules of another.
"""
