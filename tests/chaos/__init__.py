"""Real processes on a real store, and everything that goes wrong: ``python -m tests.chaos --seed 1 --seconds 600``."""
