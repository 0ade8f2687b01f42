"""Results of the checks of both theorems, and their prints."""

from __future__ import annotations

import html
import math
import textwrap
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from fedstat._utils.lazy import pd, xr
from fedstat.ntk.gram import largest_informative_clients, least_width, theorem_lr
from fedstat.results.base import TERMINAL, Caution, Result, caution_of_few, wrapped
from fedstat.results.exports import Headings, columns_of
from fedstat.results.tables import cell, count, print_html
from fedstat.stats import resampling

# Below this fraction of the first loss, the rest is rounding.
_FLOOR = 1e-24
# A loss above its bound by no more than this fraction is within it.
_ROUNDING = 1e-9


@dataclass(frozen=True, repr=False)
class ExtremeEigenvalues(Result):
    """Smallest and largest eigenvalue of a kernel; it unpacks to both.

    Attributes
    ----------
    lambda_min, lambda_max : float
    error_min, error_max : float
        An eigenvalue lies within this of the value, rounding included.
    resolution : float
        What float64 resolves in a matrix of this size and norm.
    blocks : int
        Number of diagonal blocks: the clients for H^p, 1 for H^s.
    """

    lambda_min: float
    lambda_max: float
    error_min: float
    error_max: float
    resolution: float
    blocks: int = 1
    _figure: ClassVar[str] = "forest"
    _headings: ClassVar[Headings] = {"eigenvalue": "term", "estimate": "estimate", "error": "error"}

    def __iter__(self) -> Iterator[float]:
        return iter((self.lambda_min, self.lambda_max))

    @property
    def resolved(self) -> bool:
        """True if float64 can tell λ_min from 0."""
        return self.positive or self.lambda_min < -self.error_min

    @property
    def positive(self) -> bool:
        """True if λ_min is above 0 by more than rounding, as that of a kernel must be for a rate."""
        return self.lambda_min > self.resolution

    @property
    def usable(self) -> float:
        """λ_min if it is positive, else 0."""
        return self.lambda_min if self.positive else 0.0

    @property
    def condition(self) -> float:
        """γ = λ_max / λ_min; infinite if λ_min is not positive."""
        return self.lambda_max / self.lambda_min if self.positive else math.inf

    def tidy(self) -> pd.DataFrame:
        """Return one row per eigenvalue: term (lambda_min, lambda_max), estimate, error (bound of its error)."""
        return pd.DataFrame(
            {"term": ["lambda_min", "lambda_max"], "estimate": list(self), "error": [self.error_min, self.error_max]}
        )

    def glance(self) -> pd.DataFrame:
        """Return one row: both eigenvalues, condition, resolved, resolution, blocks."""
        names = ("lambda_min", "lambda_max", "condition", "resolved", "resolution", "blocks")
        return pd.DataFrame([{name: getattr(self, name) for name in names}])

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        return _significant(self.tidy(), self._headings, digits)

    def _lines(self) -> list[str]:
        kernel = "a kernel" if self.blocks == 1 else f"a kernel of {self.blocks} blocks"
        low, high = f"{self.lambda_min:.4g} (± {self.error_min:.1g})", f"{self.lambda_max:.4g} (± {self.error_max:.1g})"
        end = f"condition {self.condition:.4g}" if self.positive else f"below {self.resolution:.1g}: not resolved"
        end = "negative: no kernel" if self.resolved and not self.positive else end
        return [f"Eigenvalues of {kernel}", f"  least   {low}, {end}", f"  largest {high}"]


@dataclass(frozen=True, eq=False, repr=False)
class _Result(Result):
    """A Dataset with a printed form.

    Attributes
    ----------
    data : Dataset
    """

    data: xr.Dataset
    _title: ClassVar[str] = ""

    _diverged: ClassVar[str] = ""

    @abstractmethod
    def summary(self) -> str:
        """Return the text by which a reader can check the theorem."""

    def cautions(self) -> list[Caution]:
        """Return cautions on runs that diverged and on few replicates."""
        x = self.glance().iloc[0]
        text = f"{x['n_diverged']:.0f} of {x['n_runs']:.0f} {self._diverged}"
        diverged = [Caution("Diverged", text, severe=True)] if x["n_diverged"] else []
        return [*diverged, *caution_of_few(self.data.sizes.get("replicate", 1), "replicate")]

    @abstractmethod
    def by_setting(self) -> pd.DataFrame:
        """Return one row per setting of the check."""

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.by_setting(), None

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        return _significant(self.by_setting(), self._headings, digits)

    def _caption(self) -> list[str]:
        replicates = count(self.data.sizes.get("replicate", 1), "replicate")
        return ["; ".join(text.strip() for text in self._lines()), f"SE: over {replicates}"]

    def _repr_html_(self) -> str:
        return f"<h4>{html.escape(self._title)}</h4>{print_html(self.summary())}"

    def to_datatree(self) -> xr.DataTree:
        """Return root attributes and the data, ready for ``to_zarr``."""
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs={"result": type(self).__name__}), "/ntk": self.data})

    @classmethod
    def from_datatree(cls, tree: xr.DataTree) -> Self:
        """Read a result from the tree of :meth:`to_datatree`.

        Raises
        ------
        ValueError
            If the store holds another result.
        """
        kind = tree.attrs.get("result")
        if kind != cls.__name__:
            raise ValueError(f"the store must hold a {cls.__name__}, but holds {kind!r}. Choose another path.")
        return cls(tree["ntk"].to_dataset().load())


def _significant(table: pd.DataFrame, headings: Headings, digits: int | None) -> pd.DataFrame:
    """Print columns of a table to significant digits, 4 by default."""

    def form(value: Any) -> str:
        is_finite = isinstance(value, float) and math.isfinite(value)
        return f"{value:.{4 if digits is None else digits}g}" if is_finite else cell(value)

    return table[columns_of(headings)].map(form).set_axis([*headings], axis=1)


class ConvergenceResult(_Result):
    """Theorem 1 against parallel gradient descent.

    Attributes
    ----------
    data : Dataset
        Dims (method, width, replicate, round). ``loss`` is ‖y − h(t)‖²; ``loss_limit`` the loss at infinite width,
        from equal initial values; ``flipped`` the fraction of activation patterns that differ from the first; ``kept``
        the proportion of units whose group did not change in the round; ``drift_shared``, ``drift_personal``
        ‖H(t, G−1) − H(0)‖_F (NaN between the rounds where it is computed); ``gap_shared``, ``gap_personal``
        ‖H(0) − H∞‖_F; ``contraction`` the factor per round in the theorem; ``diverged_at`` a round or −1.
        Constants are attributes.
    """

    _title = "Theorem 1: convergence of FedSplit"
    _diverged = "runs diverged (see diverged_at); they have no rate, and means and comparisons are missing"
    _figure = "convergence"
    _headings: ClassVar[Headings] = {
        "method": "method", "width": "width", "bound": "bound", "rate": "rate", "SE": "std_error",
        "loss/bound": "max_loss_over_bound", "holds": "holds", "diverged": "diverged",
    }  # fmt: skip

    def bound(self) -> xr.DataArray:
        """Return Theorem 1's bound on ‖y − h(t)‖² for every run: contraction^t ‖y − h(0)‖²; NaN without a bound."""
        q, loss = self.data["contraction"], self.data["loss"]
        bound = (q ** self.data["round"] * loss.isel(round=0)).where((q >= 0) & (q < 1))
        return bound.transpose(*loss.dims)

    def rates(self) -> pd.DataFrame:
        """Return one row per run: observed factor per round, worst round, and largest ratio of loss to bound.

        Columns: method, width, replicate, rate (geometric mean of loss(t+1)/loss(t) until the loss reaches rounding
        error; missing where the run diverged), worst (largest loss(t+1)/loss(t)), limit (rate at infinite width),
        max_loss_over_bound (largest loss(t)/bound(t), t ≥ 1), holds (bool: that ratio is at most 1, and the run did not
        diverge; missing without a bound), diverged_at.
        """
        loss, limit = (self._settled(self.data[name]) for name in ("loss", "loss_limit"))
        step = (loss / loss.shift(round=1)).isel(round=slice(1, None))
        bound, ended = self.bound(), self.data["diverged_at"] < 0
        table = xr.Dataset(
            {
                "rate": self._rate(loss).where(ended),
                "worst": step.max("round"),
                "limit": self._rate(limit),
                "max_loss_over_bound": (loss / bound).isel(round=slice(1, None)).max("round"),
                "diverged_at": self.data["diverged_at"],
                "bounded": bound.isel(round=0).notnull(),
                "run": self.data["loss"].isel(round=0).notnull(),
            }
        ).to_dataframe()
        table = table[table.pop("run")].reset_index()
        holds = (table["max_loss_over_bound"] <= 1 + _ROUNDING) & (table["diverged_at"] < 0)
        table["holds"] = holds.astype(object).where(table["bounded"], None)
        return table[
            ["method", "width", "replicate", "rate", "worst", "limit", "max_loss_over_bound", "holds", "diverged_at"]
        ]

    @staticmethod
    def _settled(loss: xr.DataArray) -> xr.DataArray:
        above = loss > _FLOOR * loss.isel(round=0)
        return loss.where(above.cumprod("round") > 0)

    @staticmethod
    def _rate(loss: xr.DataArray) -> xr.DataArray:
        last = (loss.notnull().sum("round") - 1).clip(min=0)
        return (loss.isel(round=last) / loss.isel(round=0)) ** (1 / last.where(last > 0))

    def tidy(self) -> pd.DataFrame:
        """Return one row per run and round: loss, bound, loss_limit, flipped, kept, drift_shared, drift_personal."""
        data = self.data[["loss"]].assign(bound=self.bound())
        names = ["loss_limit", "flipped", "kept", "drift_shared", "drift_personal"]
        return data.assign(self.data[names]).to_dataframe().reset_index()

    def glance(self) -> pd.DataFrame:
        """Return one row: sizes, λ^s and λ^p (0 if not resolved), ρ1, ρ2; counts of runs."""
        a, rates = self.data.attrs, self.rates()
        names = ("clients", "n", "features", "rounds", "local_steps", "lr", "lambda_s", "lambda_p", "rho1", "rho2")
        row = {name: a[name] for name in names}
        row |= {name: 0.0 for name in ("lambda_s", "lambda_p") if not a[f"{name}_resolved"]}
        row |= {"n_runs": len(rates), "n_bounded": int(rates["holds"].notna().sum())}
        row |= {"n_held": int(rates["holds"].eq(True).sum()), "n_diverged": int((rates["diverged_at"] >= 0).sum())}
        return pd.DataFrame([row])

    def by_setting(self) -> pd.DataFrame:
        """Return one row per method and width.

        Columns: replicates, bound (theorem's factor per round), rate (observed, mean over replicates; missing where one
        diverged), std_error, worst, limit, max_loss_over_bound (largest loss/bound), diverged (runs), rounds_ratio
        (ln rate / ln bound: rounds that the bound needs, over observed rounds), holds (bool: in all replicates; missing
        without a bound), flipped (largest), gap_shared and drift_shared (largest), relative to ‖H^s∞‖_F, gap_personal
        and drift_personal, relative to ‖H^p∞‖_F.
        """
        rates = self.rates()
        group = rates.assign(holds=rates["holds"].eq(True)).groupby(["method", "width"], sort=False)
        table = group.agg(
            replicates=("rate", "size"), worst=("worst", "max"), limit=("limit", "mean"),
            max_loss_over_bound=("max_loss_over_bound", "max"),
            diverged=("diverged_at", lambda d: int((d >= 0).sum())),
            holds=("holds", "all"),
        )  # fmt: skip
        means = {key: resampling.mean(rates) for key, rates in group["rate"]}
        table.insert(1, "rate", [means[key].mean for key in table.index])
        table.insert(2, "std_error", [means[key].std_error for key in table.index])
        bounds = self.data["contraction"].to_series()
        bounds = bounds.where((bounds >= 0) & (bounds < 1))
        table.insert(1, "bound", bounds.reindex(table.index.get_level_values("method")).to_numpy())
        table["holds"] = table["holds"].astype(object).where(table["bound"].notna(), None)
        slower = np.log(table["rate"].where(table["rate"] < 1))
        table.insert(len(table.columns) - 1, "rounds_ratio", slower / np.log(table["bound"]))
        table["flipped"] = self._over_replicates(self.data["flipped"].max("round"), table.index)
        for part in ("shared", "personal"):
            norm = self.data[f"h_{part}_norm"]
            table[f"gap_{part}"] = self._over_replicates(self.data[f"gap_{part}"] / norm, table.index)
            largest = self.data[f"drift_{part}"].max("round") / norm
            table[f"drift_{part}"] = self._over_replicates(largest, table.index)
        return table.reset_index()

    @staticmethod
    def _over_replicates(values: xr.DataArray, index: pd.Index) -> np.ndarray:
        return values.mean("replicate").to_series().reindex(index).to_numpy()

    def faster(self, *, reference: str = "fedavg", level: float = 0.95) -> pd.DataFrame:
        """Compare rates with a reference method, paired over replicates, which share draws of signs and shared weights.

        Parameters
        ----------
        reference : str
            Method to compare the others with.
        level : float
            Confidence level of the t interval.

        Returns
        -------
        DataFrame
            Per method and width, unadjusted for their number: ``n`` pairs of runs, and ``missing``, pairs with a run
            that diverged; ``estimate`` =
            mean of ln rate(reference) − ln rate(method), positive if the method is faster; ``std_error``,
            ``statistic``, ``p_value``, ``conf_low``, ``conf_high``; ``speedup`` = ratio of the mean ln rates, the
            rounds of the reference that one round is worth, if the loss falls under both. Without a pair, estimates are
            missing; if all differences are equal, there is no interval.
        """
        log = np.log(self.rates().set_index(["method", "width", "replicate"])["rate"])
        if reference not in log.index.get_level_values("method"):
            raise ValueError(f"reference must be one of the methods run, but got {reference!r}")
        base = log.xs(reference, level="method")
        rows = []
        for (method, width), values in log.groupby(["method", "width"], sort=False):
            if method == reference or width not in base.index.get_level_values("width"):
                continue
            other = base.xs(width, level="width")
            gap = other - values.droplevel(["method", "width"])
            difference = resampling.mean(gap, level=level)
            rates = values.mean(skipna=False), other.mean(skipna=False)
            rows.append(
                {
                    "term": f"{method} vs {reference}", "width": width,
                    "n": difference.n, "missing": int(gap.isna().sum()),
                    "estimate": difference.mean, "std_error": difference.std_error, "statistic": difference.statistic,
                    "p_value": difference.p_value, "conf_low": difference.low, "conf_high": difference.high,
                    "speedup": float(rates[0] / rates[1]) if max(rates) < 0 else math.nan,
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        n = {noun: int(x[column]) for noun, column in {"client": "clients", "run": "n_runs", "round": "rounds"}.items()}
        size = f"{count(n['client'], 'client')}, {count(n['run'], 'run')} of {count(n['round'], 'round')}"
        holds = f"the bound holds in {x['n_held']:.0f} of {x['n_bounded']:.0f} runs with a bound"
        return [f"{self._title}, {size}", f"  {holds}; {x['n_diverged']:.0f} diverged"]

    def summary(self) -> str:
        """Return assumption, constants, bound, observed rates and conclusions as text."""
        a, table = self.data.attrs, self.by_setting()
        size = f"{a['n']}" if a["n"] == a["n_min"] else f"{a['n_min']} to {a['n']}"
        facts = {
            "data": f"{a['clients']} clients x {size} samples, {a['features']} features, N = {a['samples']}",
            "descent": f"{count(a['rounds'], 'round')}, G = {a['local_steps']}, lr = {a['lr']:.3g} ({a['lr_rule']}), "
            f"server_lr = {a['server_lr']:.3g}, reduction = {a['reduction']!r}",
            "assumption 1": _assumption(a),
            "constants": f"{_constant(a, 's')}; {_constant(a, 'p')}; ρ1 = {a['rho1']:.4g}, ρ2 = {a['rho2']:.4g}",
            "conditions": _conditions(a, table),
        }
        keys, rates = ["method", "width"], ["bound", "rate", "std_error", "worst", "limit", "flipped"]
        holds = ["max_loss_over_bound", "rounds_ratio", "holds", "diverged"]
        kernels = ["gap_shared", "drift_shared", "gap_personal", "drift_personal"]
        lines = [
            "Theorem 1 (FedFac §3.3)",
            "  ‖y − h(t)‖² <= (1 − ½(ρ1 λ^s + ρ2 λ^p))^t ‖y − h(0)‖²",
            *(_fact(name, text) for name, text in facts.items()),
            "",
            "Factor of ‖y − h(t)‖² per round; flipped: fraction of changed activations",
            _table(table, keys + rates),
            "",
            "Loss and bound",
            _table(table, keys + holds),
            "",
            "Kernels (relative to ‖H∞‖_F)",
            _table(table, keys + kernels),
            "",
        ]
        if "fedavg" in self.data["method"].values and len(self.data["method"]) > 1:
            columns = ["width", "n", "missing", "estimate", "conf_low", "conf_high", "p_value", "speedup"]
            lines.append("Difference from FedAvg: ln rate(FedAvg) − ln rate (> 0: faster), unadjusted")
            for term, rows in self.faster().groupby("term", sort=False):
                lines += [str(term), _table(rows, columns)]
            lines.append("")
        conclusions = [*_conclusions(self, table), *map(str, self.cautions())]
        return "\n".join([*lines, *map(wrapped, conclusions)])


class GeneralizationResult(_Result):
    """Theorem 2 against the test loss.

    Attributes
    ----------
    data : Dataset
        Dim setting (one per number of clients and samples), with coordinates ``clients`` and ``n``: ``complexity``,
        ``confidence``, ``bound`` = their sum, ``lambda_min`` of H^s∞ + H^p∞, ``test_limit`` and ``train_limit`` of the
        infinitely wide network trained to the end, ``zero`` the test loss of predicting 0; with further dim replicate
        ``test`` and ``train`` of the trained network of finite width, NaN where its training diverged. A
        ``lambda_min`` that is not resolved is 0. Where λ^s is not above 0, bound and limit are NaN.
    """

    _title = "Theorem 2: generalization of FedSplit"
    _diverged = "networks diverged; they have no loss, and their settings have no mean and no conclusion"
    _figure = "generalization"
    _headings: ClassVar[Headings] = {
        "clients": "clients", "n": "n", "complexity": "complexity", "confidence": "confidence", "bound": "bound",
        "test loss": "test", "SE": "std_error", "holds": "holds", "vacuous": "vacuous",
    }  # fmt: skip

    def glance(self) -> pd.DataFrame:
        """Return one row: counts of settings, valid and vacuous bounds, and runs; range of bound and loss."""
        table = self.by_setting()
        row: dict[str, Any] = {
            "n_settings": len(table),
            "n_held": int(table["holds"].eq(True).sum()),
            "n_vacuous": int(table["vacuous"].sum()),
            "n_runs": int(table["replicates"].sum()),
            "n_diverged": int(table["diverged"].sum()),
        }
        for name in ("bound", "test"):
            row |= {f"{name}_min": float(table[name].min()), f"{name}_max": float(table[name].max())}
        return pd.DataFrame([row])

    def by_setting(self) -> pd.DataFrame:
        """Return one row per setting.

        Columns: clients, n, lambda_min, complexity, confidence, bound, test_limit, zero; test (mean over replicates;
        missing where one diverged) and its std_error, train; replicates; diverged (replicates); holds (bool: the bound
        is above the test loss of every replicate; missing without a bound, or where a replicate diverged and no other
        exceeds it), vacuous (bool: the bound is not below 1, the largest value of the loss).
        """
        d = self.data
        names = ["clients", "n", "lambda_min", "complexity", "confidence", "bound", "test_limit", "zero"]
        table = d[names].to_dataframe()
        tests = [resampling.mean(values) for values in d["test"].transpose("setting", "replicate").to_numpy()]
        table["test"], table["std_error"] = [t.mean for t in tests], [t.std_error for t in tests]
        table["train"] = d["train"].mean("replicate", skipna=False).to_series()
        table["replicates"], table["diverged"] = d.sizes["replicate"], d["test"].isnull().sum("replicate").to_series()
        above = (d["test"] > d["bound"]).any("replicate").to_series()
        is_known = above | (table["bound"].notna() & (table["diverged"] == 0))
        table["holds"] = (~above).astype(object).where(is_known, None)
        table["vacuous"] = ~(d["bound"] < 1).to_series()
        return table.reset_index(drop=True)

    def tidy(self) -> pd.DataFrame:
        """Return one row per setting and replicate."""
        return self.data.to_dataframe().reset_index()

    def _lines(self) -> list[str]:
        return [self._title, *self._conclusions()]

    def _conclusions(self) -> list[str]:
        table, n_unbounded = self.by_setting(), int(self.data["bound"].isnull().sum())
        n_holds, n_vacuous = int(table["holds"].eq(True).sum()), int((table["bound"] >= 1).sum())
        vacuous = f", but is vacuous (>= 1) in {n_vacuous}" if n_vacuous else ""
        lines = [f"Theorem 2: the bound holds in {n_holds} of {count(len(table), 'setting')}{vacuous}"]
        if n_unbounded:
            lines.append(f"No bound in {count(n_unbounded, 'setting')}: λ^s is not above 0")
        return lines

    def summary(self) -> str:
        """Return bound and test loss of every setting, and the conclusions, as text."""
        table, a = self.by_setting(), self.data.attrs
        facts = {
            "loss": f"min(|h − y|, 1), between 0 and 1; δ = {a['delta']:.3g}, c = {a['constant']:.3g} (the paper gives "
            "the order only)",
            "network": f"width {a['width']}, {count(a['rounds'], 'round')}, initial values "
            f"{a['init_scale']:.3g}·N(0, I)",
        }
        keys = ["clients", "n"]
        lines = [
            "Theorem 2 (FedFac §3.3)",
            "  E loss <= 2 √((C/n) yᵀ(H^s + H^p)⁻¹y) + c √(log(N/(λδ)) / (2N))",
            *(_fact(name, text) for name, text in facts.items()),
            "",
            _table(table, [*keys, "complexity", "confidence", "bound", "vacuous"]),
            "",
            _table(table, [*keys, "test", "std_error", "train", "diverged", "test_limit", "zero"]),
            "",
        ]
        conclusions = self._conclusions()
        if a["labels"] == "signs":
            most = {int(n): largest_informative_clients(int(n)) for n in sorted(set(table["clients"] * table["n"]))}
            text = ", ".join(f"N = {n}: C <= {c}" for n, c in most.items())
            conclusions.append(f"For labels ±1 the bound can be below 1 only where 8C²/(1 + 1/C) < N ({text})")
        return "\n".join([*lines, *map(wrapped, [*conclusions, *map(str, self.cautions())])])


_DELTA = 0.05
"""Probability with which Theorem 1 may fail, at which its width is printed."""


def _fact(name: str, text: str) -> str:
    """Return a line that begins with a name; what is wrapped is indented below the text."""
    indent = " " * 13
    lines = textwrap.wrap(text, TERMINAL - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"{name:<13}" + f"\n{indent}".join(lines)


def _assumption(a: dict[str, float]) -> str:
    broken = [f"{a[f'samples_{k}']} {k}" for k in ("long", "zero", "parallel") if a[f"samples_{k}"]]
    if broken:
        return "VIOLATED: " + ", ".join(broken)
    return "holds: ‖x‖ <= 1, no two samples parallel"


def _constant(a: dict[str, float], kernel: str) -> str:
    """Return λ and γ of the kernel "s" (H^s) or "p" (H^p); a λ that float64 cannot tell from 0 is 0."""
    low, high = a[f"lambda_{kernel}"], a[f"lambda_{kernel}_max"]
    if not a[f"lambda_{kernel}_resolved"]:
        error = a[f"lambda_{kernel}_error"]
        return f"λ^{kernel} = 0 (not resolved: {low:.1g} ± {error:.1g}), γ^{kernel} infinite"
    return f"λ^{kernel} = {low:.4g} (± {a[f'lambda_{kernel}_error']:.1g}), γ^{kernel} = {high / low:.4g}"


def _is_resolved(a: dict[str, float]) -> bool:
    return bool(a["lambda_s_resolved"] and a["lambda_p_resolved"])


def _conditions(a: dict[str, Any], table: pd.DataFrame) -> str:
    if not _is_resolved(a):
        return "not met: λ_min is not resolved and counts as 0"
    s, p, n = a["lambda_s"], a["lambda_p"], a["samples"]
    gammas = a["lambda_s_max"] / s, a["lambda_p_max"] / p
    lr = theorem_lr(s, gammas[0], p, gammas[1], local_steps=a["local_steps"], n=n) * a["divisor"]
    return (
        f"with constants 1 and δ = {_DELTA:g} the theorem asks for m2 >= {least_width(s, n=n, delta=_DELTA):.1e} and "
        f"lr <= {lr:.1g}; here m2 <= {table['width'].max()} and lr = {a['lr']:.1g}"
    )


def _conclusions(result: ConvergenceResult, table: pd.DataFrame) -> list[str]:
    lines, rates = [], result.rates()
    for method, rows in table.groupby("method", sort=False):
        if rows["bound"].isna().all():
            lines.append(f"{method}: no bound, {_why_unbounded(str(method), result.data.attrs)}")
            continue
        n, n_holds = int(rows["replicates"].sum()), int(rates.query("method == @method")["holds"].eq(True).sum())
        if n_holds == n:
            ratio = f"needs {_span(rows['rounds_ratio'])} times the observed rounds"
            lines.append(f"{method}: the bound holds in {n} of {count(n, 'run')} and {ratio}")
        else:
            n_diverged = int(rows["diverged"].sum())
            lines.append(
                f"{method}: the bound does NOT hold in {n - n_holds} of {count(n, 'run')}"
                + (f" ({n_diverged} diverged)" if n_diverged else "")
            )
    if {"fedavg", "fedsplit"} <= set(table["method"]):
        lines += _faster(result.faster().query("term == 'fedsplit vs fedavg'"))
    return lines


def _why_unbounded(method: str, a: dict[str, float]) -> str:
    if method == "dynamic":
        return "because the theorem is for splits that do not change"
    if not _is_resolved(a) or a["samples_parallel"] or a["samples_zero"]:
        return "because λ^s is not above 0"
    return "because the steps are too large: 1 − ½(ρ1 λ^s + ρ2 λ^p) is not between 0 and 1"


def _faster(table: pd.DataFrame) -> list[str]:
    """Compare FedSplit with FedAvg by the intervals of the widths."""
    low, high = table["conf_low"], table["conf_high"]
    conclusions = {"faster": low > 0, "slower": high < 0, "inconclusive": (low <= 0) & (high >= 0), "no CI": low.isna()}
    counts = {name: int(is_so.sum()) for name, is_so in conclusions.items() if is_so.any()}
    first, *remaining = counts.items()
    text = ", ".join([f"{first[0]} at {count(first[1], 'width')}", *(f"{name} at {n}" for name, n in remaining)])
    lines = [f"FedSplit vs FedAvg (paired t, {'unadjusted 95% CIs' if len(table) > 1 else '95% CI'}): {text}"]
    speedups = table.loc[(low > 0) | (high < 0), "speedup"].dropna()
    if len(speedups):
        lines.append(f"Where they differ, one round of FedSplit is worth {_span(speedups)} rounds of FedAvg")
    return lines


def _span(values: pd.Series) -> str:
    ends = dict.fromkeys(f"{v:.3g}" for v in (values.min(), values.max()))
    return " to ".join(ends)


def _table(table: pd.DataFrame, columns: list[str]) -> str:
    return table[columns].to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-")
