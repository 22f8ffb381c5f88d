"""Offer the command line `herdsman`: parse, call, print."""
def main() -> None:
    """Run it."""
