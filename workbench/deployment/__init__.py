"""N worker processes behind one handle. Importing this touches no device: torch is loaded in the workers only."""

from workbench.deployment.handle import Deployment, Timeouts
from workbench.deployment.records import ForwardResult, LoadProgress, LoadReport, RankStats

__all__ = ["Deployment", "ForwardResult", "LoadProgress", "LoadReport", "RankStats", "Timeouts"]
