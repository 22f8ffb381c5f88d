"""Start the command line for `python -m supervisor`.

Boundary: nothing but the call.
"""

from supervisor.cli import main

if __name__ == "__main__":
    main()
