"""Printed form of the theory's results: a table that reads like a theorem check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedstat._later import pd
from fedstat.stats.ntk import largest_informative_clients, least_width, theorem_lr

if TYPE_CHECKING:
    from fedstat.ntk.results import ConvergenceResult, GeneralizationResult

_DELTA = 0.05
"""Probability with which Theorem 1 may fail, at which its width is printed."""


def convergence_report(result: ConvergenceResult) -> str:
    """Theorem 1: assumption, constants, bound, observed, verdict."""
    a = result.data.attrs
    each = result.by_setting()
    rates = ["method", "width", "bound", "rate", "std_error", "worst", "limit", "fill", "looseness", "held", "diverged"]
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
        _table(each, rates),
        "",
        "Kernels (relative to ‖H∞‖_F) and activation patterns",
        _table(each, ["method", "width", "flipped", "gap_shared", "drift_shared", "gap_personal", "drift_personal"]),
    ]
    if "fedavg" in result.data["method"].values and len(result.data["method"]) > 1:
        lines += ["", "Against FedAvg (estimate = ln rate(FedAvg) − ln rate; > 0: faster)"]
        columns = ["term", "width", "n", "missing", "estimate", "conf_low", "conf_high", "p_value", "speedup"]
        lines.append(_table(result.faster(), columns))
    return "\n".join([*lines, "", *_verdicts(result, each)])


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
    if each["diverged"].any():
        lines.append(
            f"{int(each['diverged'].sum())} of {int(each['replicates'].sum())} runs diverged (diverged_at says when): "
            "they have no rate, and no mean or comparison is made with them"
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


def generalization_report(result: GeneralizationResult) -> str:
    """Theorem 2: bound, observed, where it is vacuous."""
    each, a = result.by_setting(), result.data.attrs
    columns = [
        "clients", "n", "complexity", "confidence", "bound", "test", "std_error", "train", "diverged", "test_limit",
        "zero", "vacuous",
    ]  # fmt: skip
    lines = [
        "Theorem 2 (FedFac §3.3): E loss <= 2 √((C/n) yᵀ(H^s + H^p)⁻¹y) + c √(log(N/(λδ)) / (2N))",
        (
            f"loss min(|h − y|, 1); δ = {a['delta']:.3g}, c = {a['constant']:.3g} (the paper gives the order only); "
            f"width {a['width']}, {a['rounds']} rounds, start {a['init_scale']:.3g}·N(0, I)"
        ),
        "",
        _table(each, columns),
        "",
        (
            f"verdict      bound held in {int(each['held'].eq(True).sum())} of {len(each)} settings; it says something "
            f"(< 1) in {int((~each['vacuous']).sum())} of {len(each)}"
        ),
    ]
    if none := int(each["bound"].isna().sum()):
        lines.append(f"             no bound in {none}: λ^s is not above 0, and the theorem says nothing")
    if lost := each["diverged"].sum():
        lines.append(
            f"             {lost} of {each['replicates'].sum()} networks diverged: they have no loss, and a setting "
            "without theirs has no mean and no verdict"
        )
    if a["labels"] == "signs":
        most = {int(n): largest_informative_clients(int(n)) for n in sorted(set(each["clients"] * each["n"]))}
        text = ", ".join(f"N = {n}: C <= {c}" for n, c in most.items())
        lines.append(f"             for labels ±1 it can say something only where 8C²/(1 + 1/C) < N ({text})")
    return "\n".join(lines)


def _table(table: pd.DataFrame, columns: list[str]) -> str:
    return table[columns].to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-")
