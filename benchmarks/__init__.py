"""Ours and its peers on the same work: see RESULTS.md for figures, ``python -m benchmarks --help`` for how to get them."""
