"""Results that print themselves, turn into tables and never change."""

from fedstat.results.choices import SplitMapResult
from fedstat.results.clusters import ClientClustersResult
from fedstat.results.comparison import ComparisonResult
from fedstat.results.components import ComponentsResult
from fedstat.results.entropy import EntropyResult
from fedstat.results.factor import ConvergenceWarning, FactorResult, Rotation
from fedstat.results.icc import IccResult
from fedstat.results.layers import ByLayer
from fedstat.results.leakage import LeakageResult
from fedstat.results.ranks import EffectiveRankResult
from fedstat.results.split import AgreementWarning, SplitResult
from fedstat.results.uncertainty import BootstrapResult, NFactorsResult, PermutationResult, StabilityResult
from fedstat.results.verdicts import personal_from
from fedstat.stats.split import Absolute, Tau

__all__ = [
    "Absolute",
    "AgreementWarning",
    "BootstrapResult",
    "ByLayer",
    "ClientClustersResult",
    "ComparisonResult",
    "ComponentsResult",
    "ConvergenceWarning",
    "EffectiveRankResult",
    "EntropyResult",
    "FactorResult",
    "IccResult",
    "LeakageResult",
    "NFactorsResult",
    "PermutationResult",
    "Rotation",
    "SplitMapResult",
    "SplitResult",
    "StabilityResult",
    "Tau",
    "personal_from",
]
