"""Results of the checks of both theorems, and their report in words."""

from __future__ import annotations

import html
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from fedstat._utils.lazy import pd, xr
from fedstat.ntk.gram import largest_informative_clients, least_width, theorem_lr
from fedstat.results.base import Caution, Result, few
from fedstat.stats import resampling

# Below this share of the first loss, what is left is rounding.
_FLOOR = 1e-24
# A loss above its bound by this share is within it.
_ROUNDING = 1e-9


@dataclass(frozen=True, repr=False)
class ExtremeEigenvalues(Result):
    """Smallest and largest eigenvalue of a kernel; unpacks to these two.

    Attributes
    ----------
    lambda_min, lambda_max : float
    error_min, error_max : float
        An eigenvalue lies within this of the value, rounding included.
    resolution : float
        What float64 resolves in a matrix of this size and norm.
    blocks : int
        Diagonal blocks looked at: the clients for H^p, 1 for H^s.
    """

    lambda_min: float
    lambda_max: float
    error_min: float
    error_max: float
    resolution: float
    blocks: int = 1
    _figure: ClassVar[str] = "forest"

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
        """One row an eigenvalue: term (lambda_min, lambda_max), estimate, error (it lies within this)."""
        return pd.DataFrame(
            {"term": ["lambda_min", "lambda_max"], "estimate": list(self), "error": [self.error_min, self.error_max]}
        )

    def glance(self) -> pd.DataFrame:
        """One row: both eigenvalues, condition, resolved, resolution, blocks."""
        names = ("lambda_min", "lambda_max", "condition", "resolved", "resolution", "blocks")
        return pd.DataFrame([{name: getattr(self, name) for name in names}])

    def __repr__(self) -> str:
        of = "a kernel" if self.blocks == 1 else f"a kernel of {self.blocks} blocks"
        low, high = f"{self.lambda_min:.4g} (± {self.error_min:.1g})", f"{self.lambda_max:.4g} (± {self.error_max:.1g})"
        end = f"condition {self.condition:.4g}" if self.positive else f"below {self.resolution:.1g}: not resolved"
        end = "negative: no kernel" if self.resolved and not self.positive else end
        return f"Eigenvalues of {of}\n  least   {low}, {end}\n  largest {high}"


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
        """Text a reader can check the theorem by."""

    def cautions(self) -> list[Caution]:
        """Return which runs diverged, and how few replicates there are; mostly nothing."""
        x = self.glance().iloc[0]
        text = f"{x['n_diverged']:.0f} of {x['n_runs']:.0f} {self._diverged}"
        diverged = [Caution("Diverged", text, grave=True)] if x["n_diverged"] else []
        return [*diverged, *few(self.data.sizes.get("replicate", 1), "replicate")]

    @abstractmethod
    def by_setting(self) -> pd.DataFrame:
        """One row per setting that the theorem is checked at."""

    def _repr_html_(self) -> str:
        head = f"<h4>{html.escape(self._title)}</h4>"
        note = f"<pre>{html.escape(self.summary())}</pre>"
        return head + note

    def to_datatree(self) -> xr.DataTree:
        """Root attributes and the data, ready for ``to_zarr``."""
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs={"result": type(self).__name__}), "/ntk": self.data})

    @classmethod
    def from_datatree(cls, tree: xr.DataTree) -> Self:
        """Read back what :meth:`to_datatree` made.

        Raises
        ------
        ValueError
            If the store holds another result.
        """
        kind = tree.attrs.get("result")
        if kind != cls.__name__:
            raise ValueError(f"the store must hold a {cls.__name__}, but got {kind!r}. Remove it to make it anew.")
        return cls(tree["ntk"].to_dataset().load())


class ConvergenceResult(_Result):
    """Theorem 1 against parallel gradient descent.

    Attributes
    ----------
    data : Dataset
        Dims (method, width, replicate, round). ``loss`` is ‖y − h(t)‖²; ``loss_limit`` what infinite width would do
        from the same start; ``flipped`` the share of activation patterns that differ from the first; ``kept`` the
        share of units that kept their state; ``drift_shared``, ``drift_personal`` ‖H(t, G−1) − H(0)‖_F (NaN
        between the rounds where it is computed); ``gap_shared``, ``gap_personal`` ‖H(0) − H∞‖_F; ``contraction``
        the theorem's factor per round; ``diverged_at`` a round or −1. Constants are attributes.
    """

    _title = "Theorem 1: convergence of FedSplit"
    _diverged = "runs diverged (diverged_at says when): they have no rate, and no mean or comparison is made with them"
    _figure = "convergence"

    def bound(self) -> xr.DataArray:
        """Theorem 1's bound on ‖y − h(t)‖² for every run: contraction^t ‖y − h(0)‖²; NaN where there is none."""
        q, loss = self.data["contraction"], self.data["loss"]
        bound = (q ** self.data["round"] * loss.isel(round=0)).where((q >= 0) & (q < 1))
        return bound.transpose(*loss.dims)

    def rates(self) -> pd.DataFrame:
        """One row per run: observed factor per round, worst round, and how close the loss came to the bound.

        Columns: method, width, replicate, rate (geometric mean of loss(t+1)/loss(t) until the loss reaches rounding
        error; missing where the run diverged), worst (largest loss(t+1)/loss(t)), limit (rate at infinite width), fill
        (largest loss(t)/bound(t), t ≥ 1), held (bool: fill <= 1, and the run did not diverge; missing without a bound),
        diverged_at.
        """
        loss, limit = (self._settled(self.data[name]) for name in ("loss", "loss_limit"))
        step = (loss / loss.shift(round=1)).isel(round=slice(1, None))
        bound, ended = self.bound(), self.data["diverged_at"] < 0
        table = xr.Dataset(
            {
                "rate": self._rate(loss).where(ended),
                "worst": step.max("round"),
                "limit": self._rate(limit),
                "fill": (loss / bound).isel(round=slice(1, None)).max("round"),
                "diverged_at": self.data["diverged_at"],
                "bounded": bound.isel(round=0).notnull(),
                "run": self.data["loss"].isel(round=0).notnull(),
            }
        ).to_dataframe()
        table = table[table.pop("run")].reset_index()
        held = (table["fill"] <= 1 + _ROUNDING) & (table["diverged_at"] < 0)
        table["held"] = held.astype(object).where(table["bounded"], None)
        return table[["method", "width", "replicate", "rate", "worst", "limit", "fill", "held", "diverged_at"]]

    @staticmethod
    def _settled(loss: xr.DataArray) -> xr.DataArray:
        above = loss > _FLOOR * loss.isel(round=0)
        return loss.where(above.cumprod("round") > 0)

    @staticmethod
    def _rate(loss: xr.DataArray) -> xr.DataArray:
        last = (loss.notnull().sum("round") - 1).clip(min=0)
        return (loss.isel(round=last) / loss.isel(round=0)) ** (1 / last.where(last > 0))

    def tidy(self) -> pd.DataFrame:
        """One row per run and round: loss, bound, loss_limit, flipped, drift_shared, drift_personal."""
        names = ["loss", "loss_limit", "flipped", "kept", "drift_shared", "drift_personal"]
        return self.data[names].assign(bound=self.bound()).to_dataframe().reset_index()

    def glance(self) -> pd.DataFrame:
        """One row: sizes, λ^s and λ^p (0 where not resolved), ρ1 and ρ2; runs: all, bounded, within it, diverged."""
        a, rates = self.data.attrs, self.rates()
        names = ("clients", "n", "features", "rounds", "local_steps", "lr", "lambda_s", "lambda_p", "rho1", "rho2")
        row = {name: a[name] for name in names}
        row |= {name: 0.0 for name in ("lambda_s", "lambda_p") if not a[f"{name}_resolved"]}
        row |= {"n_runs": len(rates), "n_bounded": int(rates["held"].notna().sum())}
        row |= {"n_held": int(rates["held"].eq(True).sum()), "n_diverged": int((rates["diverged_at"] >= 0).sum())}
        return pd.DataFrame([row])

    def by_setting(self) -> pd.DataFrame:
        """One row per method and width.

        Columns: replicates, bound (theorem's factor per round), rate (observed, mean over replicates; missing where one
        diverged), std_error, worst, limit, fill (largest loss/bound), diverged (runs), looseness (ln rate / ln bound:
        how many times more rounds the bound asks for than were needed), held (bool: in all replicates; missing without
        a bound), flipped (largest), gap_shared, drift_shared (largest), both relative to ‖H^s∞‖_F, gap_personal,
        drift_personal relative to ‖H^p∞‖_F.
        """
        rates = self.rates()
        group = rates.assign(held=rates["held"].eq(True)).groupby(["method", "width"], sort=False)
        table = group.agg(
            replicates=("rate", "size"), worst=("worst", "max"), limit=("limit", "mean"), fill=("fill", "max"),
            diverged=("diverged_at", lambda d: int((d >= 0).sum())),
            held=("held", "all"),
        )  # fmt: skip
        means = {at: resampling.mean(rates) for at, rates in group["rate"]}
        table.insert(1, "rate", [means[at].mean for at in table.index])
        table.insert(2, "std_error", [means[at].std_error for at in table.index])
        bounds = self.data["contraction"].to_series()
        bounds = bounds.where((bounds >= 0) & (bounds < 1))
        table.insert(1, "bound", bounds.reindex(table.index.get_level_values("method")).to_numpy())
        table["held"] = table["held"].astype(object).where(table["bound"].notna(), None)
        slower = np.log(table["rate"].where(table["rate"] < 1))
        table.insert(len(table.columns) - 1, "looseness", slower / np.log(table["bound"]))
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
        """Is FedSplit faster? Paired over replicates: the same draws of signs and shared weights.

        Parameters
        ----------
        reference : str
            Method to compare the others with.
        level : float
            Confidence level of the t interval.

        Returns
        -------
        DataFrame
            Per method and width: ``n`` pairs of runs, and ``missing``, those of which a run diverged; ``estimate`` =
            mean of ln rate(reference) − ln rate(method), positive if the method is faster; ``std_error``,
            ``statistic``, ``p_value``, ``conf_low``, ``conf_high``; ``speedup`` = ratio of the mean ln rates, how many
            rounds of the reference one round is worth, where the loss falls by both. Where a pair is missing nothing
            is estimated; where all differences are equal there is no interval.
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
            found = resampling.mean(gap, level=level)
            rates = values.mean(skipna=False), other.mean(skipna=False)
            rows.append(
                {
                    "term": f"{method} vs {reference}", "width": width, "n": found.n, "missing": int(gap.isna().sum()),
                    "estimate": found.mean, "std_error": found.std_error, "statistic": found.statistic,
                    "p_value": found.p_value, "conf_low": found.low, "conf_high": found.high,
                    "speedup": float(rates[0] / rates[1]) if max(rates) < 0 else math.nan,
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        held = f"bound held in {x['n_held']:.0f} of {x['n_bounded']:.0f} runs that have one"
        size = f"{x['clients']:.0f} clients, {x['n_runs']:.0f} runs of {x['rounds']:.0f} rounds"
        return [f"{self._title}, {size}", f"  {held}; {x['n_diverged']:.0f} diverged"]

    def summary(self) -> str:
        """Assumption, constants, bound, observation, verdict."""
        a = self.data.attrs
        each = self.by_setting()
        rates = ["bound", "rate", "std_error", "worst", "limit", "fill", "looseness", "held", "diverged"]
        kernels = ["flipped", "gap_shared", "drift_shared", "gap_personal", "drift_personal"]
        size = f"{a['n']}" if a["n"] == a["n_min"] else f"{a['n_min']} to {a['n']}"
        lines = [
            "Theorem 1 (FedFac §3.3): ‖y − h(t)‖² <= (1 − ½(ρ1 λ^s + ρ2 λ^p))^t ‖y − h(0)‖²",
            "",
            f"data         {a['clients']} clients x {size} samples, {a['features']} features, N = {a['samples']}",
            (
                f"descent      {a['rounds']} rounds, G = {a['local_steps']}, lr = {a['lr']:.3g} ({a['lr_rule']}), "
                f"server_lr = {a['server_lr']:.3g}, reduction = {a['reduction']!r}"
            ),
            f"assumption 1 {_assumption(a)}",
            f"constants    {_constant(a, 's')}; {_constant(a, 'p')}",
            f"             ρ1 = {a['rho1']:.4g}, ρ2 = {a['rho2']:.4g}",
            f"conditions   {_conditions(a, each)}",
            "",
            "Factor of ‖y − h(t)‖² per round",
            _table(each, ["method", "width", *rates]),
            "",
            "Kernels (relative to ‖H∞‖_F) and activation patterns",
            _table(each, ["method", "width", *kernels]),
        ]
        if "fedavg" in self.data["method"].values and len(self.data["method"]) > 1:
            lines += ["", "Against FedAvg (estimate = ln rate(FedAvg) − ln rate; > 0: faster)"]
            columns = ["term", "width", "n", "missing", "estimate", "conf_low", "conf_high", "p_value", "speedup"]
            lines.append(_table(self.faster(), columns))
        return "\n".join([*lines, "", *_verdicts(self, each), *map(str, self.cautions())])


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

    _title = "Theorem 2: generalisation of FedSplit"
    _diverged = "networks diverged: they have no loss, and a setting without theirs has no mean and no verdict"
    _figure = "generalization"

    def glance(self) -> pd.DataFrame:
        """One row: settings, those whose bound held or is vacuous; runs, and diverged ones; range of bound and loss."""
        each = self.by_setting()
        row: dict[str, Any] = {
            "n_settings": len(each),
            "n_held": int(each["held"].eq(True).sum()),
            "n_vacuous": int(each["vacuous"].sum()),
            "n_runs": int(each["replicates"].sum()),
            "n_diverged": int(each["diverged"].sum()),
        }
        for name in ("bound", "test"):
            row |= {f"{name}_min": float(each[name].min()), f"{name}_max": float(each[name].max())}
        return pd.DataFrame([row])

    def by_setting(self) -> pd.DataFrame:
        """One row per setting.

        Columns: clients, n, lambda_min, complexity, confidence, bound, test_limit, zero; test (mean over replicates;
        missing where one diverged) and its std_error, train; replicates, and diverged ones; held (bool: the bound is
        above the test loss of every replicate; missing without a bound, or where a replicate diverged and no other
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
        known = above | (table["bound"].notna() & (table["diverged"] == 0))
        table["held"] = (~above).astype(object).where(known, None)
        table["vacuous"] = ~(d["bound"] < 1).to_series()
        return table.reset_index(drop=True)

    def tidy(self) -> pd.DataFrame:
        """One row per setting and replicate."""
        return self.data.to_dataframe().reset_index()

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        said = f"{x['n_settings'] - x['n_vacuous']:.0f}"
        return [
            f"{self._title}, {x['n_settings']:.0f} settings",
            f"  bound held in {x['n_held']:.0f}; it says something (< 1) in {said}",
        ]

    def summary(self) -> str:
        """Bound and observation per setting, and where the bound says nothing."""
        each, a = self.by_setting(), self.data.attrs
        columns = [
            "clients", "n", "complexity", "confidence", "bound", "test", "std_error", "train", "diverged", "test_limit",
            "zero", "vacuous",
        ]  # fmt: skip
        lines = [
            "Theorem 2 (FedFac §3.3): E loss <= 2 √((C/n) yᵀ(H^s + H^p)⁻¹y) + c √(log(N/(λδ)) / (2N))",
            (
                f"loss min(|h − y|, 1); δ = {a['delta']:.3g}, c = {a['constant']:.3g} (the paper gives the order "
                f"only); width {a['width']}, {a['rounds']} rounds, start {a['init_scale']:.3g}·N(0, I)"
            ),
            "",
            _table(each, columns),
            "",
            (
                f"verdict      bound held in {int(each['held'].eq(True).sum())} of {len(each)} settings; it says "
                f"something (< 1) in {int((~each['vacuous']).sum())} of {len(each)}"
            ),
        ]
        if none := int(each["bound"].isna().sum()):
            lines.append(f"             no bound in {none}: λ^s is not above 0, and the theorem says nothing")
        if a["labels"] == "signs":
            most = {int(n): largest_informative_clients(int(n)) for n in sorted(set(each["clients"] * each["n"]))}
            text = ", ".join(f"N = {n}: C <= {c}" for n, c in most.items())
            lines.append(f"             for labels ±1 it can say something only where 8C²/(1 + 1/C) < N ({text})")
        return "\n".join([*lines, *map(str, self.cautions())])


_DELTA = 0.05
"""Probability with which Theorem 1 may fail, at which its width is printed."""


def _assumption(a: dict[str, float]) -> str:
    broken = [f"{a[f'samples_{k}']} {k}" for k in ("long", "zero", "parallel") if a[f"samples_{k}"]]
    if broken:
        return "VIOLATED: " + ", ".join(broken)
    return "holds: ‖x‖ <= 1, no two samples parallel"


def _constant(a: dict[str, float], of: str) -> str:
    """λ and γ of H^s or H^p; a λ that float64 cannot tell from 0 is 0."""
    low, high = a[f"lambda_{of}"], a[f"lambda_{of}_max"]
    if not a[f"lambda_{of}_resolved"]:
        return f"λ^{of} = 0 (not resolved: {low:.1g} ± {a[f'lambda_{of}_error']:.1g}), γ^{of} infinite"
    return f"λ^{of} = {low:.4g} (± {a[f'lambda_{of}_error']:.1g}), γ^{of} = {high / low:.4g}"


def _resolved(a: dict[str, float]) -> bool:
    return bool(a["lambda_s_resolved"] and a["lambda_p_resolved"])


def _conditions(a: dict[str, Any], each: pd.DataFrame) -> str:
    if not _resolved(a):
        return "not met: λ_min is not resolved and counts as 0"
    s, p, n = a["lambda_s"], a["lambda_p"], a["samples"]
    gammas = a["lambda_s_max"] / s, a["lambda_p_max"] / p
    lr = theorem_lr(s, gammas[0], p, gammas[1], local_steps=a["local_steps"], n=n) * a["divisor"]
    return (
        f"with constants 1 and δ = {_DELTA:g} the theorem asks for m2 >= {least_width(s, n=n, delta=_DELTA):.1e} and "
        f"lr <= {lr:.1g}; here m2 <= {each['width'].max()} and lr = {a['lr']:.1g}"
    )


def _verdicts(result: ConvergenceResult, each: pd.DataFrame) -> list[str]:
    lines, rates = [], result.rates()
    for method, rows in each.groupby("method", sort=False):
        if rows["bound"].isna().all():
            lines.append(f"{method}: no bound, {_why_none(str(method), result.data.attrs)}")
            continue
        runs, held = int(rows["replicates"].sum()), int(rates.query("method == @method")["held"].eq(True).sum())
        if held == runs:
            lines.append(
                f"{method}: bound held in all {runs} runs; loose by a factor {_span(rows['looseness'])} in rounds"
            )
        else:
            lost = int(rows["diverged"].sum())
            lines.append(
                f"{method}: bound did NOT hold in {runs - held} of {runs} runs"
                + (f" ({lost} diverged)" if lost else "")
            )
    if {"fedavg", "fedsplit"} <= set(each["method"]):
        lines.append(_faster(result.faster().query("term == 'fedsplit vs fedavg'")))
    return [f"verdict      {line}" for line in lines]


def _why_none(method: str, a: dict[str, float]) -> str:
    if method == "dynamic":
        return "as the theorem is for splits that stay"
    if not _resolved(a) or a["samples_parallel"] or a["samples_zero"]:
        return "as λ^s is not above 0: the theorem says nothing"
    return "as the steps are too large for it: 1 − ½(ρ1 λ^s + ρ2 λ^p) is not between 0 and 1"


def _faster(table: pd.DataFrame) -> str:
    """Comparison of FedSplit with FedAvg: what the intervals say, by width."""
    low, high = table["conf_low"], table["conf_high"]
    found = {"faster": low > 0, "slower": high < 0, "undecided": (low <= 0) & (high >= 0), "no interval": low.isna()}
    said = ", ".join(f"{word} at {n} of {len(table)}" for word, where in found.items() if (n := int(where.sum())))
    worth = table["speedup"].dropna()
    text = f"FedSplit against FedAvg (95 % intervals, by width): {said}"
    return text + (f"; one round is worth {_span(worth)} of FedAvg's" if len(worth) else "")


def _span(values: pd.Series) -> str:
    ends = dict.fromkeys(f"{v:.3g}" for v in (values.min(), values.max()))
    return " to ".join(ends)


def _table(table: pd.DataFrame, columns: list[str]) -> str:
    return table[columns].to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-")
