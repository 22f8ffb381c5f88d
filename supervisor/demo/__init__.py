"""Show the whole thing at work on real files: the parts of `herdsman demo`.

    files.py    which files are worked on, and whether each output is right
    job.py      the handler that runs in the workers
    service.py  the supervisor as a process of its own, and what can be seen of it

Boundary: a user of the product like any other; nothing in the product needs it.
"""
