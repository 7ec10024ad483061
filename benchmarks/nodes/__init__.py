"""The node programs: one process of each method, run in the environment of its own."""
