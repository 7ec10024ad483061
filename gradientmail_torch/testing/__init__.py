"""For tests of this package and of yours: a mailbox contract, faults, clocks, a simulated cluster, an S3 server.

``gradientmail_torch.testing.contract`` holds the contract suite; it alone needs pytest.
"""

from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Crash
from gradientmail_torch.testing.proxy import Fault, FaultProxy
from gradientmail_torch.testing.s3_server import S3Server
from gradientmail_torch.testing.simulation import Conditions, Process, SimulatedCluster, SimulationError

__all__ = ["Conditions", "Crash", "Fault", "FaultProxy", "ManualClock", "Process", "S3Server", "SimulatedCluster", "SimulationError"]
