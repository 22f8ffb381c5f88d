"""Take the jobs of other queues into a herdsman database: pending, in flight, dead and keyed.

Each source is a module of its own that reads and never writes; `carry` stores what it yields.
"""
