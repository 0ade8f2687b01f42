"""Training on separate clients: fedstat's methods as a Flower ServerApp and ClientApps."""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fedstat.flower needs Flower, which is not installed: pip install -c constraints.txt 'fedstat[flower]'"
    ) from error

from fedstat.flower.apps import Strategy, client_app, server_app
from fedstat.flower.plan import Plan
from fedstat.flower.secure import SecureGrid, error_bound

__all__ = ["Plan", "SecureGrid", "Strategy", "client_app", "error_bound", "server_app"]


def __dir__() -> list[str]:
    return __all__
