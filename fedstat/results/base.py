"""The base class of all results: prints, tables, figures and exports; results of several layers."""

from __future__ import annotations

import html
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, lazy
from fedstat._utils.lazy import pd
from fedstat.results import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH = 100
TERMINAL = 80
"""Columns of a print that is wrapped, not cut."""


@dataclass(frozen=True)
class Caution:
    """Something to know before the numbers are relied on.

    Attributes
    ----------
    title : str
        What it is, the same words for every result.
    text : str
        Where, and how much.
    grave : bool
        Whether numbers are missing or wrong by it, not only less certain.
    """

    title: str
    text: str
    grave: bool = False

    def __str__(self) -> str:
        return f"{'Warning' if self.grave else 'Caution'}: {self.text}"


_FEW = 5


def few(n: int, noun: str) -> list[Caution]:
    r"""Caution on intervals over so few replicates or clients; none from 5 on.

    Examples
    --------
    >>> print(*few(3, "replicate"), *few(1, "client"), *few(5, "client"), sep="\n")
    Caution: 3 replicates: standard errors and intervals rest on 2 degrees of freedom
    Caution: 1 client: there is no standard error and no interval
    """
    if n >= _FEW:
        return []
    rest = f"standard errors and intervals rest on {tables.count(n - 1, 'degree')} of freedom"
    none = "there is no standard error and no interval"
    title = f"Few {noun}s" if n > 1 else f"One {noun}"
    return [Caution(title, f"{tables.count(n, noun)}: {rest if n > 1 else none}")]


class Result(ABC):
    """What all results have in common.

    A result is frozen, and its fields hold what was found. For every result

    - ``repr`` says what was found, in at most 100 columns, then its cautions; ``summary()`` is the full report;
    - ``cautions()`` say what to know before its numbers are relied on;
    - ``tidy()`` is a table with one row per term: a unit, a method, a rule, or a run and round;
    - ``glance()`` is one row for the whole;
    - ``to_dict()`` holds these two tables as plain values; ``to_latex()`` and ``to_markdown()`` are the first of them;
      notebooks show the report and both ends of the table;
    - ``plot()`` is the figure that a reader wants first.

    Some results also have ``augment()``, which says more about each unit or row than ``tidy``, or puts it beside data
    of one's own. A class defines ``__repr__``, ``tidy``, ``glance`` and the name of its figure; the rest follows.
    """

    # Name of the function in fedstat.plot that draws this result. Plot knows results, not the other way round;
    # matplotlib and seaborn, a second to import, are loaded by the first figure only.
    _figure: ClassVar[str]

    def __repr__(self) -> str:
        return "\n".join(map(wrapped, [*self._lines(), *map(str, self.cautions())]))

    def _lines(self) -> list[str]:
        """What was found, in lines that are wrapped to 80 columns; or a class has a ``repr`` of its own."""
        raise NotImplementedError

    def cautions(self) -> list[Caution]:
        """Return what to know before the numbers are relied on; mostly nothing."""
        return []

    @abstractmethod
    def tidy(self) -> pd.DataFrame:
        """One row per term."""

    @abstractmethod
    def glance(self) -> pd.DataFrame:
        """One row for the whole result."""

    def summary(self) -> str:
        """Full report as text; that of ``repr`` where there is nothing to add."""
        return repr(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, ready for JSON (NaN and inf as None): glance's row, tidy's columns."""
        return {
            "glance": {k: _plain(v) for k, v in self.glance().iloc[0].items()},
            "tidy": {str(k): [_plain(x) for x in v] for k, v in self.tidy().items()},
        }

    def to_latex(
        self,
        *,
        columns: Sequence[str] | None = None,
        digits: int = 3,
        caption: str | None = None,
        label: str | None = None,
    ) -> str:
        r"""Return the tidy table as LaTeX with the rules of booktabs, special characters escaped.

        Parameters
        ----------
        columns : sequence of str, optional
            Columns of :meth:`tidy` to show, in this order; all by default.
        digits : int
            Decimal places.
        caption, label : str, optional
            With either, the tabular stands in a table environment. A caption may hold LaTeX such as ``$\nu$``; its %,
            & and # are escaped.
        """
        return tables.latex(tables.chosen(self.tidy(), columns), digits=digits, caption=caption, label=label)

    def to_markdown(self, *, columns: Sequence[str] | None = None, digits: int = 3) -> str:
        """Return the tidy table as a Markdown pipe table, special characters and HTML escaped.

        Parameters
        ----------
        columns : sequence of str, optional
            Columns of :meth:`tidy` to show, in this order; all by default.
        digits : int
            Decimal places.
        """
        return tables.markdown(tables.chosen(self.tidy(), columns), digits=digits)

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the figure that a reader wants first: a function of ``fedstat.plot``.

        Of a split and a permutation test it is ``communality``; of agreement, components of variance, a bootstrap, a
        comparison, ranks and eigenvalues ``forest``; of a factor analysis and numbers of factors ``scree``; of others
        the function of their name.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default the axes of a new figure.
        **options
            Of that function.

        Returns
        -------
        matplotlib Axes
        """
        axes: Axes = getattr(lazy.figures(), self._figure)(self, ax=ax, **options)
        return axes

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        """Table that notebooks show, and the column that orders it from high to low."""
        return self.tidy(), None

    def _repr_html_(self) -> str:
        table, by = self._by_row()
        return f"<pre>{html.escape(repr(self))}</pre>{tables.ends_html(table, by=by)}"


class UnitStatistics(Protocol):
    """An analysis that gives each unit of a layer one statistic, from which a split can be made.

    :class:`~fedstat.results.FactorResult`, :class:`~fedstat.results.IccResult` and
    :class:`~fedstat.results.ComponentsResult` do.
    """

    statistic_name: ClassVar[str]

    @property
    def units(self) -> NDArray[Any]:
        """Names of the units; array (unit,)."""

    @property
    def method(self) -> str:
        """The estimator."""

    @property
    def n_clients(self) -> int | None:
        """Number of clients; None where weights were analysed without them."""

    @property
    def statistic(self) -> NDArray[np.float64]:
        """Communality, ICC2 or personal share of each unit; array (unit,)."""

    @property
    def agreement(self) -> NDArray[np.float64] | None:
        """ICC2 of each unit, array (unit,), where there are clients."""

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Units without variance; bool array (unit,)."""

    def by_unit(self) -> pd.DataFrame:
        """One row per unit, named in the column ``term``."""

    def glance(self) -> pd.DataFrame:
        """One row for the whole analysis."""

    def cautions(self) -> list[Caution]:
        """What to know before the numbers are relied on."""

    def _lines(self) -> list[str]:
        """Return the print's lines on the analysis."""

    def _details(self) -> str:
        """Return what a summary adds to the print."""


def line(text: str) -> str:
    """Cut a line of print to 100 columns, visibly."""
    return text if len(text) <= WIDTH else text[: WIDTH - 4] + " ..."


def wrapped(text: str) -> str:
    """Wrap a line of print to 80 columns; the lines that follow are indented by two more.

    Examples
    --------
    >>> print(wrapped("  Sign-flip test over clients, H0: no agreement beyond the profile of all units: p = 0.02"))
      Sign-flip test over clients, H0: no agreement beyond the profile of all units:
        p = 0.02
    """
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, TERMINAL, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listing(head: str, items: Iterable[str], width: int = WIDTH) -> str:
    """``head`` and as many items as fit the width."""
    text = head
    for item in items:
        if len(text) + len(item) + 6 > width:
            return text + " ..."
        text += (" " if text == head else ", ") + item
    return text


def columns(rows: Sequence[Sequence[str]], *, n_right: int = 0, indent: str = "  ") -> list[str]:
    """Align the cells of rows, the last ``n_right`` of each on the right.

    Examples
    --------
    >>> columns([("method", "n"), ("a", "12")], n_right=1)
    ['  method   n', '  a       12']
    """
    width = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    left = len(width) - n_right
    sides = [(str.ljust if i < left else str.rjust) for i in range(len(width))]
    return [indent + "  ".join(f(c, w) for f, c, w in zip(sides, row, width, strict=True)).rstrip() for row in rows]


def aligned(block: pd.DataFrame) -> str:
    """Columns as wide as their widest cell; the first is left-aligned."""
    cells = [list(map(str, block.columns)), *block.astype(str).to_numpy().tolist()]
    return "\n".join(columns(cells, n_right=block.shape[1] - 1, indent=""))


def extremes(values: NDArray[np.float64], names: Sequence[Any] | NDArray[Any], most: int = 8) -> list[str]:
    """Lines of a print that name the highest and the lowest values; those that are missing are left out.

    Examples
    --------
    >>> extremes(np.array([0.5, np.nan, 0.7]), ["a", "b", "c"])
    ['  highest: c (0.70), a (0.50)', '  lowest:  a (0.50), c (0.70)']
    """
    order = np.argsort(-values, kind="stable")[: int((~np.isnan(values)).sum())]
    named = [f"{names[j]} ({tables.coefficient(values[j])})" for j in order]
    return [
        listing("  highest:", named[:most], TERMINAL),
        listing("  lowest: ", named[: -most - 1 : -1], TERMINAL),
    ]


def constant(units: NDArray[Any], dead: NDArray[np.bool_]) -> list[str]:
    """Line of a print that names the units without variance, if there are any."""
    return [listing("  constant:", map(str, units[dead]), TERMINAL)] if dead.any() else []


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


R = TypeVar("R", bound=Result)


@dataclass(frozen=True, eq=False, repr=False)
class LayerResults(Mapping[str, R]):
    """A result for each layer, as the verbs return it for runs, files and state_dicts: a mapping that prints itself.

    Attributes
    ----------
    results : dict from layer to result
        In the order of the network.
    skipped_layers : dict from layer to reason
        Layers that were not asked for by name and whose units are not hidden units: embeddings, the output layer.

    Examples
    --------
    >>> import fedstat
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> shapes = {"fc1.weight": (6, 9), "fc2.weight": (5, 6), "head.weight": (2, 5)}
    >>> clients = {name: {key: rng.normal(size=n) for key, n in shapes.items()} for name in ("ann", "bea", "cem")}
    >>> found = fedstat.split(clients, method="icc")
    >>> list(found), found.skipped_layers
    (['fc1', 'fc2'], {'head': 'output layer, by its name'})
    >>> found["fc1"].shared.sum()
    np.int64(3)
    """

    results: dict[str, R]
    skipped_layers: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> R:
        if layer in self.results:
            return self.results[layer]
        if layer in self.skipped_layers:
            way_out = f"It was left out ({self.skipped_layers[layer]}): name it by layer={layer!r}."
        else:
            near = check.did_you_mean(layer, self.results, cutoff=0.6)
            way_out = f"There are {', '.join(self.results)}.{near}"
        raise KeyError(f"no result of layer {layer!r}. {way_out}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getattr__(self, name: str) -> NoReturn:
        first = next(iter(self.__dict__.get("results", {})), "fc1")
        raise AttributeError(f"results by layer have no {name!r}: choose a layer first, as in result[{first!r}].{name}")

    def tidy(self) -> pd.DataFrame:
        """Tables of the layers one below the other, the column ``layer`` first."""
        return self._table("tidy")

    def glance(self) -> pd.DataFrame:
        """One row a layer, the column ``layer`` first."""
        return self._table("glance")

    def summary(self) -> str:
        """Full report of every layer, each below its name."""
        return self._text([one.summary() for one in self.values()])

    def cautions(self) -> list[Caution]:
        """Cautions of all layers, each with the name of its layer."""
        return [
            replace(caution, text=f"layer {layer}: {caution.text}")
            for layer, one in self.items()
            for caution in one.cautions()
        ]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """``to_dict()`` of each layer's result."""
        return {layer: one.to_dict() for layer, one in self.items()}

    def _table(self, kind: str) -> pd.DataFrame:
        each = [getattr(one, kind)() for one in self.values()]
        for layer, table in zip(self, each, strict=True):
            table.insert(0, "layer", layer)
        known = [table.dropna(axis=1, how="all") for table in each]  # all columns come back below
        columns = list(dict.fromkeys(column for table in each for column in table))
        return pd.concat(known, ignore_index=True).reindex(columns=columns)

    def _text(self, each: list[str]) -> str:
        parts = [f"{layer}: {text}" for layer, text in zip(self, each, strict=True)]
        return "\n".join(parts + ([describe_skipped(self.skipped_layers)] if self.skipped_layers else []))

    def __repr__(self) -> str:
        return self._text([repr(one) for one in self.values()])

    def _repr_html_(self) -> str:
        parts = [f"<h4>{html.escape(layer)}</h4>{one._repr_html_()}" for layer, one in self.items()]
        return "".join(parts) + (
            f"<p>{html.escape(describe_skipped(self.skipped_layers))}</p>" if self.skipped_layers else ""
        )


def describe_skipped(skipped_layers: Mapping[str, str], way_in: str = "layer='*'") -> str:
    """One line on the layers that were left out, and how they come in."""
    named = ", ".join(f"{layer} ({why})" for layer, why in skipped_layers.items())
    return f"Left out: {named}. {way_in} takes all layers."
