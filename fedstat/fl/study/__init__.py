"""Studies: runs by name, grids of them, tuning, and the tables that they end in.

``experiment`` and ``grid`` make runs; ``summary`` reads them back in one row each; ``tables``, ``ablations`` and
``decomposition`` are what a study says, and ``show`` how it is shown.
"""
