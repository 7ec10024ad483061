"""For tests of this package and of yours: a mailbox contract, faults, clocks, a simulated cluster, an S3 server."""
