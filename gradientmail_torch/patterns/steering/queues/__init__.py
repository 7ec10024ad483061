"""How requests and results travel between a Thinker and its task servers."""
