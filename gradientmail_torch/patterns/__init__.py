"""Coordination over a mailbox alone: no server, no leader, no torch."""
