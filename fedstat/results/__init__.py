"""Results that print themselves, turn into tables and never change."""

from fedstat.results.base import LayerResults
from fedstat.results.between_clients import ClientClustersResult, EntropyResult
from fedstat.results.factor import ConvergenceWarning, FactorResult, Rotation
from fedstat.results.group_icc import GroupIccResult
from fedstat.results.icc import IccResult
from fedstat.results.jackknife import JackknifeResult
from fedstat.results.leakage import LeakageResult
from fedstat.results.ranks import ComparisonResult, EffectiveRankResult
from fedstat.results.split import AgreementWarning, SplitMapResult, SplitResult
from fedstat.results.stored_split import StoredSplitResult
from fedstat.results.uncertainty import BootstrapResult, NFactorsResult, PermutationResult, SensitivityResult
from fedstat.results.variance_components import ComponentsResult, personal_from
from fedstat.stats.split import Absolute

__all__ = [
    "Absolute",
    "AgreementWarning",
    "BootstrapResult",
    "ClientClustersResult",
    "ComparisonResult",
    "ComponentsResult",
    "ConvergenceWarning",
    "EffectiveRankResult",
    "EntropyResult",
    "FactorResult",
    "GroupIccResult",
    "IccResult",
    "JackknifeResult",
    "LayerResults",
    "LeakageResult",
    "NFactorsResult",
    "PermutationResult",
    "Rotation",
    "SensitivityResult",
    "SplitMapResult",
    "SplitResult",
    "StoredSplitResult",
    "personal_from",
]


def __dir__() -> list[str]:
    return __all__
