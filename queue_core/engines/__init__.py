"""Hold the storage engines and, beside each, every SQL statement it runs.

Boundary: SQL appears nowhere else in the project. Engines do not know each other.
"""
