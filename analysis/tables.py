"""Tables of the papers: ``python analysis/tables.py PAPER TABLE``, such as ``fedfac table2``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from _tables import Row, command, of_accuracy, of_leakage, of_timing
from factorized_fl import table1 as factorized_table1
from feddecomp import table6 as feddecomp_table6
from fedfac import table2, table3, table8, tuning

from fedstat import _cli

TABLES: dict[str, dict[str, Row]] = {
    "fedfac": {
        "table2": Row(
            "FedFac Table 2: test accuracy of all methods, paired with FedFac, and the mixed model",
            {"": table2.accuracy, "-mixed": table2.interaction},
        ),
        "table3": Row("FedFac Table 3: accuracy of clients that took no part in training", {"": table3.unseen_clients}),
        "table4": Row(
            "FedFac Table 4: tuning Λ of FedFac on validation data", {"": partial(tuning.tuning, name="table4")}, "tune"
        ),
        "table5": Row(
            "FedFac Table 5: tuning τ of FedFac on validation data", {"": partial(tuning.tuning, name="table5")}, "tune"
        ),
        "table6": Row(
            "FedFac Table 6: tuning κ of FedFac on validation data", {"": partial(tuning.tuning, name="table6")}, "tune"
        ),
        "table7": of_timing(
            "FedFac Table 7: time of a round relative to FedAvg",
            name="table7",
            reference="fedavg",
            said=["FedFac static trains and analyses once before round 1, which is not counted"],
        ),
        "table8": Row(
            "FedFac Table 8: (A) ablation of both parts, (B) factor analysis against random splits",
            {"a": table8.ablation, "b": table8.random_split},
        ),
    },
    "factorized_fl": {
        "table1": Row(
            "Factorized-FL Table 1: test accuracy where clients number their classes alike or not, and what is sent.",
            {"": factorized_table1.compared, "-communication": factorized_table1.sent},
        ),
        "ablations": of_accuracy(
            "factorized_fl",
            "ablations",
            "Factorized-FL Fig. 7 (g) to (k): without parts, other matching, ranks, thresholds and sparsity.",
            reference="factorized-fl-beta",
        ),
        "variants": of_accuracy(
            "factorized_fl",
            "variants",
            "Factorized-FL: the text against the published code.",
            reference="factorized-fl-beta",
        ),
    },
    "feddecomp": {
        "table1": of_accuracy(
            "feddecomp",
            "table1",
            "FedDecomp Table 1: test accuracy under Dirichlet label shift.",
            reference="feddecomp",
        ),
        "table2": of_accuracy(
            "feddecomp",
            "table2",
            "FedDecomp Table 2: rank of the personal part, dense and convolutional layers.",
            reference="feddecomp, rank_linear=0.6, rank_conv=0.6",
        ),
        "table3": of_accuracy(
            "feddecomp",
            "table3",
            "FedDecomp Table 3: personal and shared part trained in turn, or together.",
            reference="feddecomp",
        ),
        "table4": of_accuracy(
            "feddecomp",
            "table4",
            "FedDecomp Table 4: low rank added to methods without a personal part.",
            reference="fedavg",
        ),
        "table5": of_accuracy(
            "feddecomp",
            "table5",
            "FedDecomp Table 5: roles exchanged, the low-rank part shared.",
            reference="feddecomp",
        ),
        "table6": Row(
            "FedDecomp Table 6: how far both parts move when the shared one starts from other clients' training.",
            {"": feddecomp_table6.build},
        ),
        "table7": of_leakage("feddecomp", "table7", "FedDecomp Table 7: images recovered from what is sent."),
        "table8": of_accuracy(
            "feddecomp", "table8", "FedDecomp Table 8: partial participation.", reference="feddecomp"
        ),
        "table9": of_accuracy("feddecomp", "table9", "FedDecomp Table 9: text.", reference="feddecomp"),
        "variants": of_accuracy(
            "feddecomp", "variants", "FedDecomp: the text against the published code.", reference="feddecomp"
        ),
    },
    "fedcp": {
        "table1": of_accuracy(
            "fedcp",
            "table1",
            "FedCP Table 1: without parts of the policy, of the alignment and of the heads.",
            reference="fedcp",
        ),
        "table2": of_accuracy(
            "fedcp",
            "table2",
            "FedCP Table 2: test accuracy in the pathological and the practical setting.",
            reference="fedcp",
        ),
        "table3": of_timing("FedCP Table 3: time of a round relative to FedAvg.", name="table3", reference="fedavg"),
        "table4": of_accuracy(
            "fedcp", "table4", "FedCP Table 4: heterogeneity and number of clients.", reference="fedcp"
        ),
        "table6": of_accuracy("fedcp", "table6", "FedCP Table 6: local epochs.", reference="fedcp"),
        "table7": of_accuracy("fedcp", "table7", "FedCP Table 7: clients that drop out.", reference="fedcp"),
        "table8": of_accuracy(
            "fedcp", "table8", "FedCP Table 8: weight λ of the alignment.", reference="fedcp, lam=5.0"
        ),
        "table9": of_leakage("fedcp", "table9", "FedCP Table 9: images recovered from what is sent."),
        "table10": of_accuracy("fedcp", "table10", "FedCP Table 10: designs of the policy network.", reference="fedcp"),
        "variants": of_accuracy("fedcp", "variants", "FedCP: the text against the published code.", reference="fedcp"),
    },
}
"""Tables by paper and name. Names of studies are those of ``simulations/PAPER.toml``."""


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    paper, name = (*argv[:2], "", "")[:2]
    if paper in TABLES and name == "--names":
        print(*TABLES[paper])
        return 0
    if paper in TABLES and name in TABLES[paper]:
        return command(paper, TABLES[paper][name], argv[2:], f"tables.py {paper} {name}")
    cli = _cli.Parser(
        description=(__doc__ or "").partition(":")[0],
        epilog=listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("paper", choices=TABLES)
    cli.add_argument(
        "table", choices=TABLES.get(paper, ()), help="one of those below; its own options: PAPER TABLE --help"
    )
    cli.parse_args(argv)
    return 0


def listed() -> str:
    """The tables, by paper."""
    return "\n".join(
        f"{paper + ' ' + name:<26}{row.title}" for paper, rows in TABLES.items() for name, row in rows.items()
    )


if __name__ == "__main__":
    sys.exit(main())
