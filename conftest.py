"""What pytest leaves out where an optional extra is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["fedstat/flower/*"]
