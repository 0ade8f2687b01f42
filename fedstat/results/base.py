"""The base class of all results: prints, tables, figures and exports; results of several layers."""

from __future__ import annotations

import html
import math
import textwrap
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results import tables
from fedstat.results.exports import Headings, Tables, printed
from fedstat.stats import LEAST_FOR_PRECISION

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


DEPENDENCE = "dependence"
"""Entry of a result's origin: sentences on clients that are not independent."""
_FOUND = (
    "groups are clusters that fedstat.client_clusters found: if in these weights, groups differ by construction, which "
    "intervals and p values do not take into account"
)
NOT_INDEPENDENT = "Clients not independent"
"""Title of cautions on copies, means, and groups of clients."""
TERMINAL = 80
"""Columns of a print, which is wrapped."""


@dataclass(frozen=True)
class Caution:
    """Limit of a result: a reader needs it before relying on the numbers.

    Attributes
    ----------
    title : str
        Kind of limit, in equal words for all results.
    text : str
        Place and size.
    severe : bool
        True if numbers are missing or wrong, not only less certain.
    """

    title: str
    text: str
    severe: bool = False

    def __str__(self) -> str:
        return f"{'Warning' if self.severe else 'Caution'}: {self.text}"

    @property
    def sentence(self) -> str:
        """The text with a full stop."""
        return self.text if self.text.endswith((".", "!", "?")) else f"{self.text}."


def caution_of_few(n: int, noun: str) -> list[Caution]:
    r"""Return a caution if intervals rest on fewer than 5 replicates, seeds or clients.

    Examples
    --------
    >>> print(*caution_of_few(3, "replicate"), *caution_of_few(1, "client"), *caution_of_few(5, "client"), sep="\n")
    Caution: 3 replicates: standard errors and intervals rest on 2 degrees of freedom
    Caution: 1 client: there is no standard error and no interval
    """
    if n >= LEAST_FOR_PRECISION:
        return []
    rest = f"standard errors and intervals rest on {tables.count(n - 1, 'degree')} of freedom"
    none = "there is no standard error and no interval"
    title = f"Few {noun}s" if n > 1 else f"One {noun}"
    return [Caution(title, f"{tables.count(n, noun)}: {rest if n > 1 else none}")]


class Result(Tables):
    """Base class of all results.

    A result is frozen. For every result

    - ``repr`` prints the findings and then the cautions; ``summary()`` is the full report;
    - ``cautions()`` name limits that a reader needs before relying on the numbers;
    - ``tidy()`` is a table with one row per term: a unit, a method, a rule, or a run and round;
    - ``glance()`` is one row for the result;
    - ``to_dict()`` holds these two tables as plain values;
    - ``to_latex()`` and ``to_markdown()`` are the table of a paper: what the print shows of each term;
    - notebooks show the print and both ends of this table;
    - ``save(path)`` writes the result, and :func:`fedstat.load` reads it;
    - ``plot()`` draws the main figure.

    Some results also have ``augment()``, which adds columns to ``tidy``, or joins it with data of the user. A class
    defines ``_lines`` or ``__repr__``, ``tidy``, ``glance`` and the name of its figure.
    """

    # Name of the function in fedstat.plot that draws this result. Plot knows results, not the other way round;
    # matplotlib and seaborn, a second to import, are loaded by the first figure only.
    _figure: ClassVar[str]
    # Headings of the printed table, and their columns of ``_by_row``, which are its first. "CI" is given the level.
    _headings: ClassVar[Headings]
    # Lines of the print that are the caption of a table.
    _captioned: ClassVar[tuple[int, ...]] = (0,)
    # Column of ``tidy`` by which notebooks sort, from high to low; by default as it comes.
    _by: ClassVar[str | None] = None

    def __repr__(self) -> str:
        head, *lines = self._lines()
        weights = [] if self.source is None else [f"Weights {self.source}"]
        return "\n".join(map(wrapped, [head, *weights, *lines, *map(str, self.cautions())]))

    def _lines(self) -> list[str]:
        """Return the lines of the print, which ``repr`` wraps to 80 columns; classes may override ``repr`` instead."""
        raise NotImplementedError

    def cautions(self) -> list[Caution]:
        """Return limits that a reader needs before relying on the numbers; of most results, how clients depend."""
        origin = self.origin or {}
        cautions = [Caution(NOT_INDEPENDENT, text) for text in origin.get(DEPENDENCE, [])]
        if origin.get("arguments", {}).get("groups") == "ClientClustersResult":
            cautions.append(Caution("Groups found in weights", _FOUND, severe=True))
        return cautions

    @abstractmethod
    def glance(self) -> pd.DataFrame:
        """Return one row for the result."""

    def summary(self) -> str:
        """Return the full report as text; by default that of ``repr``."""
        return repr(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the row of ``glance`` and the columns of ``tidy`` as plain values for JSON (NaN and inf as None)."""
        return {
            "glance": {k: _plain(v) for k, v in self.glance().iloc[0].items()},
            "tidy": {str(k): [_plain(x) for x in v] for k, v in self.tidy().items()},
        }

    @property
    def origin(self) -> dict[str, Any] | None:
        """Origin of the result: ``verb``, ``arguments`` and ``input``, the checksum of its input; None if not known.

        Arguments are described by plain values. The checksum covers the values, dtype and shape of the analyzed array.
        It is None for data that are not in memory as a whole, on a GPU, or no array. A result that was derived from
        another result, such as ``fit.split()``, has no origin.
        """
        origin: dict[str, Any] | None = self.__dict__.get("_origin")
        return origin

    @property
    def source(self) -> str | None:
        """Weights of a run that were analyzed: stage, round, clients and baseline; None for other weights."""
        origin = self.origin or getattr(getattr(self, "fit", None), "origin", None) or {}
        return origin.get("weights")

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the result to a zarr store or a JSON file, from which :func:`fedstat.load` reads an equal result.

        The file also holds the tidy table, versions, time, the verb with its arguments, and a checksum of the input.
        Tensors are saved as NumPy arrays.

        Parameters
        ----------
        path : str or Path
            Path that ends in ``.zarr`` or ``.json``.
        overwrite : bool
            Replace a file of an earlier ``save``; it stays until the new file is complete.

        Raises
        ------
        FileExistsError
            If the path exists and may not be replaced.
        ValueError
            If the path ends in another suffix.
        TypeError
            If the result holds an object that cannot be saved, such as a categorical column; the message names the
            field.
        """
        from fedstat.store.results import save

        save(self, path, overwrite=overwrite)

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the main figure of the result by a function of ``fedstat.plot``.

        ``communality`` draws splits and permutation tests; ``forest`` draws agreement, components of variance,
        bootstraps, comparisons, ranks and eigenvalues; ``scree`` draws factor analyses and numbers of factors. For
        other results, the function has the name of the result.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Axes to draw on; by default those of a new figure.
        **options
            Options of that function.

        Returns
        -------
        matplotlib Axes
        """
        from fedstat import plot

        axes: Axes = getattr(plot, self._figure)(self, ax=ax, **options)
        return axes

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        """Return the table that notebooks show, and the column by which it is sorted, from high to low."""
        return self.tidy(), self._by

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        headings = {heading.replace("CI", self._ci): source for heading, source in self._headings.items()}
        return printed(self._by_row()[0], headings, 3 if digits is None else digits)

    @property
    def _ci(self) -> str:
        """Heading of intervals, with their level."""
        return f"{100 * getattr(self, 'level', 0.95):g}% CI"

    def _list_units(self, head: str, values: NDArray[np.float64], rows: int, by: str = "") -> str:
        """Return the table of the units with the highest values, for a summary."""
        cut = "" if rows >= len(values) else f" (the {rows} highest of {len(values)}{by})"
        return f"{head}{cut}\n{aligned(self._printed().iloc[np.argsort(-values, kind='stable')[:rows]])}"

    def _caption(self) -> list[str]:
        lines = self._lines()
        return [lines[i] for i in self._captioned]

    def _repr_html_(self) -> str:
        table, by = self._by_row()
        return tables.print_html(repr(self)) + tables.folded_html(self._printed(), table, by=by)


class UnitStatistics(Protocol):
    """Analysis that gives each unit of a layer one statistic, from which a split follows.

    :class:`~fedstat.results.FactorResult`, :class:`~fedstat.results.IccResult` and
    :class:`~fedstat.results.ComponentsResult` do.
    """

    statistic_name: ClassVar[str]

    @property
    def units(self) -> NDArray[Any]:
        """Names of the units; array (unit,)."""

    @property
    def method(self) -> str:
        """Statistical method."""

    @property
    def n_clients(self) -> int | None:
        """Number of clients; None if the weights have no clients."""

    @property
    def statistic(self) -> NDArray[np.float64]:
        """Communality, ICC2 or reliability of each unit; array (unit,)."""

    @property
    def agreement(self) -> NDArray[np.float64] | None:
        """ICC2 of each unit, array (unit,); None without clients."""

    @property
    def constant(self) -> NDArray[np.bool_]:
        """True for units without variance; bool array (unit,)."""

    @property
    def untrained(self) -> NDArray[np.bool_]:
        """True for constant units that no client changed since the baseline; bool array (unit,)."""

    def by_unit(self) -> pd.DataFrame:
        """Return one row per unit, named in the column ``term``."""

    def glance(self) -> pd.DataFrame:
        """Return one row for the analysis."""

    def cautions(self) -> list[Caution]:
        """Return limits that a reader needs before relying on the numbers."""

    def _lines(self) -> list[str]:
        """Return the lines of the print on the analysis."""

    def _details(self) -> str:
        """Return the text that a summary adds to the print."""

    def _caption(self) -> list[str]:
        """Return the sentences of a caption."""


def wrapped(text: str) -> str:
    """Wrap a line of print to 80 columns; continuation lines are indented by two more.

    Examples
    --------
    >>> print(wrapped("  Sign-flip test over clients, H0: deviations of clients are symmetric about 0: p = 0.02"))
      Sign-flip test over clients, H0: deviations of clients are symmetric about 0:
        p = 0.02
    """
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, TERMINAL, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listing(head: str, items: Iterable[str]) -> str:
    """Return ``head`` and as many items as fit one line of a print."""
    text = head
    for item in items:
        if len(text) + len(item) + 6 > TERMINAL:
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
    n_left = len(width) - n_right
    sides = [(str.ljust if i < n_left else str.rjust) for i in range(len(width))]
    return [indent + "  ".join(f(c, w) for f, c, w in zip(sides, row, width, strict=True)).rstrip() for row in rows]


def aligned(block: pd.DataFrame, *, n_left: int = 1, indent: str = "") -> str:
    """Align a table of texts, the first columns on the left, the others on the right."""
    cells = [list(map(str, block.columns)), *block.astype(str).to_numpy().tolist()]
    return "\n".join(columns(cells, n_right=block.shape[1] - n_left, indent=indent))


def extremes(values: NDArray[np.float64], names: Sequence[Any] | NDArray[Any], most: int = 8) -> list[str]:
    """Return the lines of a print that name the highest and the lowest values, without missing ones.

    Examples
    --------
    >>> extremes(np.array([0.5, np.nan, 0.7]), ["a", "b", "c"])
    ['  highest: c (0.70), a (0.50)', '  lowest:  a (0.50), c (0.70)']
    """
    order = np.argsort(-values, kind="stable")[: int((~np.isnan(values)).sum())]
    named = [f"{names[j]} ({tables.coefficient(values[j])})" for j in order]
    return [listing("  highest:", named[:most]), listing("  lowest: ", named[: -most - 1 : -1])]


def count_constant(constant: NDArray[np.bool_], untrained: NDArray[np.bool_]) -> str:
    """Count the units without variance; those that no client changed are not trained.

    Examples
    --------
    >>> count_constant(np.array([True, True, False]), np.array([True, False, False]))
    '1 constant, 1 not trained'
    >>> count_constant(np.array([True, False]), np.array([True, False])), count_constant(np.array([False]), [False])
    ('1 not trained', '0 constant')
    """
    numbers = {"constant": int((constant & ~np.asarray(untrained)).sum()), "not trained": int(np.sum(untrained))}
    return ", ".join(f"{n} {name}" for name, n in numbers.items() if n) or "0 constant"


def describe_constant(
    units: NDArray[Any], constant: NDArray[np.bool_], untrained: NDArray[np.bool_] | None = None
) -> list[str]:
    """Return the lines of a print that name the units without variance, and those that no client changed."""
    untrained = np.zeros(len(units), bool) if untrained is None else untrained
    kinds = {"constant": constant & ~untrained, "not trained": untrained}
    return [listing(f"  {name}:", map(str, units[of])) for name, of in kinds.items() if of.any()]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


R = TypeVar("R", bound=Result)


@dataclass(frozen=True, eq=False, repr=False)
class LayerResults(Tables, Mapping[str, R]):
    """Results by layer, as the verbs return them for runs, files and state_dicts: a mapping that prints itself.

    Attributes
    ----------
    results : dict from layer to result
        In the order of the network.
    skipped_layers : dict from layer to reason
        Layers that are skipped unless named, because their units are not hidden units: embeddings, the output layer.
    modules : dict from layer to str
        Class and shape of layers whose name is an index, such as "Conv2d 16×1×5×5", where the torch module is known.

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
    modules: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> R:
        if layer in self.results:
            return self.results[layer]
        if layer in self.skipped_layers:
            hint = f"It was skipped ({self.skipped_layers[layer]}). Set layer={layer!r}."
        else:
            near = check.did_you_mean(layer, self.results, cutoff=0.6)
            hint = f"There are {', '.join(self.results)}.{near}"
        raise KeyError(f"no result of layer {layer!r}. {hint}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def _ipython_key_completions_(self) -> list[str]:
        """Return the layers, which IPython and Jupyter offer after ``result["``."""
        return list(self.results)

    def __getattr__(self, name: str) -> NoReturn:
        first = next(iter(self.__dict__.get("results", {})), "fc1")
        raise AttributeError(f"results by layer have no {name!r}: choose a layer first, as in result[{first!r}].{name}")

    def tidy(self) -> pd.DataFrame:
        """Return the tables of all layers in one, the column ``layer`` first."""
        return self._join([result.tidy() for result in self.values()])

    def glance(self) -> pd.DataFrame:
        """Return one row per layer, the column ``layer`` first."""
        return self._join([result.glance() for result in self.values()])

    def summary(self) -> str:
        """Return the full report of every layer after its name."""
        return self._text([result.summary() for result in self.values()])

    def cautions(self) -> list[Caution]:
        """Return the cautions of all layers, with the layers' names."""
        return [
            replace(caution, text=f"layer {layer}: {caution.text}")
            for layer, result in self.items()
            for caution in result.cautions()
        ]

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the results of all layers to a zarr store or a JSON file; see :meth:`SplitResult.save`."""
        from fedstat.store.results import save

        save(self, path, overwrite=overwrite)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return ``to_dict()`` of each layer's result."""
        return {layer: result.to_dict() for layer, result in self.items()}

    def _join(self, layer_tables: list[pd.DataFrame]) -> pd.DataFrame:
        for layer, table in zip(self, layer_tables, strict=True):
            table.insert(0, "layer", layer)
        parts = [table.dropna(axis=1, how="all") for table in layer_tables]  # all columns come back below
        columns = list(dict.fromkeys(column for table in layer_tables for column in table))
        return pd.concat(parts, ignore_index=True).reindex(columns=columns)

    def _texts(self, columns: Sequence[str] | None, digits: int | None) -> pd.DataFrame:
        names = [columns] if isinstance(columns, str) else columns
        return super()._texts(None if names is None else [*dict.fromkeys(["layer", *names])], digits)

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        return self._join([result._printed(digits) for result in self.values()]).fillna(tables.NONE)

    def _caption(self) -> list[str]:
        captions = {layer: result._caption() for layer, result in self.items()}
        first = next(iter(captions.values()), [])
        common = [text for text in first if all(text in caption for caption in captions.values())]
        by_layer = {layer: [text for text in caption if text not in common] for layer, caption in captions.items()}
        return [*(f"{layer}: {'; '.join(texts)}" for layer, texts in by_layer.items() if texts), *common]

    def _head(self, layer: str) -> str:
        """Return the name of a layer, and class and shape where its name is an index."""
        return f"{layer} · {self.modules[layer]}" if layer in self.modules else layer

    def _text(self, texts: list[str]) -> str:
        parts = [f"{self._head(layer)}: {text}" for layer, text in zip(self, texts, strict=True)]
        return "\n".join(parts + ([describe_skipped(self.skipped_layers)] if self.skipped_layers else []))

    def __repr__(self) -> str:
        return self._text([repr(result) for result in self.values()])

    def _repr_html_(self) -> str:
        parts = [f"<h4>{html.escape(self._head(layer))}</h4>{result._repr_html_()}" for layer, result in self.items()]
        return "".join(parts) + (
            f"<p>{html.escape(describe_skipped(self.skipped_layers))}</p>" if self.skipped_layers else ""
        )


def describe_skipped(skipped_layers: Mapping[str, str], option: str = "layer='*'") -> str:
    """Name the layers that were skipped, and the option that includes them."""
    layers = ", ".join(f"{layer} ({why})" for layer, why in skipped_layers.items())
    return f"Skipped: {layers}; {option} includes {'it' if len(skipped_layers) == 1 else 'them'}"
