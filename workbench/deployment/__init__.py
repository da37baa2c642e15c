"""N worker processes behind one handle. Importing this touches no device: torch is loaded in the workers only."""

from workbench.deployment.handle import Deployment
from workbench.deployment.records import ForwardResult, LoadProgress, LoadReport, Phase, RankStats
from workbench.deployment.restart import RestartEvent, RestartingDeployment, RestartPolicy
from workbench.deployment.room import check_room
from workbench.deployment.started import StartedRanks, Timeouts
from workbench.deployment.summary import LoadSummary

__all__ = [
    "Deployment",
    "ForwardResult",
    "LoadProgress",
    "LoadReport",
    "LoadSummary",
    "Phase",
    "RankStats",
    "RestartEvent",
    "RestartPolicy",
    "RestartingDeployment",
    "StartedRanks",
    "Timeouts",
    "check_room",
]
