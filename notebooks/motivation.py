# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Are there two kinds of hidden units?
#
# FedFac begins with an example (Wang, Tang and Li, section 1, Figs. 1 and 2). Each of 100 clients trains an MLP with
# 200 hidden units alone, from common initial parameters; in one case clients have random samples of MNIST, in the other
# one digit each. The paper computes the entropy of each unit's outputs over clients. In the first case (IID) most
# entropies are near or below zero; in the second the paper sees two peaks, near zero and near two.
#
# **At the end you will know** whether these hidden units are of two kinds, how certain that is, which choices change
# the answer, and whether units of high communality (the proportion of a unit's variance that the factors of a factor
# analysis explain) are those with similar outputs in all clients.
#
# The notebook reads a study that `make figures-motivation` has stored, of MNIST (with `DATA_DIR=FOLDER`) or of the
# digits. Without a finished one, it makes the study here, with scikit-learn's small 8 × 8 digits and 100 units. The
# caption of Fig. 1 names the study. The text below describes MNIST; numbers of the digits differ.

# %%
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import fedstat
from fedstat import motivation, plot
from fedstat.plot import papers

paths = [p for name in ("mnist", "digits") if (p := Path(f"../runs/motivation-{name}.zarr")).exists()]
finished = [study for study in map(fedstat.open_run, paths) if "ended" in study.attrs]
run = finished[0] if finished else motivation.study(data="digits", hidden=100, replicates=50)

# %% [markdown]
# ## Fig. 1: outputs of every unit in every client
#
# The output of a unit is its mean activation.

# %%
papers.fig1(run)
plt.show()

# %% [markdown]
# With random samples, outputs of a unit are similar in all clients. With one digit per client, clients of one digit are
# similar and digits differ: a unit is either active or exactly zero in nearly all clients of a digit. The 2-means
# clusters mostly separate one digit, the one with the largest outputs.

# %% [markdown]
# ## Fig. 2: entropies, their peaks, their standard errors

# %%
table = motivation.summary(run, outputs=("own",)).drop(columns="outputs").set_index("case")
table.drop(columns=["modes", "modes_se"]).T.round(3)

# %%
for case, row in table.iterrows():
    where = (f"{m:.2f} ± {s:.2f}" for m, s in zip(row["modes"], row["modes_se"], strict=True))
    print(case, "peaks at", ", ".join(where), "nats")
plot.entropies(run["dispersion"].to_dataset().sel(outputs="own"))
plt.show()

# %% [markdown]
# `p_one_peak` is Silverman's test (H0: the entropies have one peak), `p_one_normal` the bootstrap test of one normal
# distribution against a mixture of two; `bic_gain` is positive if the mixture fits better. Standard errors of the
# median and of peaks refer to other clients with these units.
#
# On MNIST with pixels in [0, 1] the entropies of one-digit clients have two peaks, as in the paper. But the peaks are
# lower than the paper's, the second has seven of the 200 units, and there is only one peak with standardized pixels
# (`--mean 0.1307 --sd 0.3081`), which the paper leaves open. Outputs of the seven units reach 8 to 10, and also differ
# between clients of one digit. Units with large outputs in most clients, the paper's common ones, do not occur: none is
# active in 80 of the 100 clients.
#
# The entropies do not measure the distance of outputs. The SD of outputs of one-digit clients is about five times as
# large (`spread`), but half of the outputs are exact zeros (`zero_share`), which have no density and are treated
# separately. The others form ten narrow groups, one per digit. The third neighbor of a client is in its group of ten,
# so the estimate measures variation *within* a digit. It increases with k:

# %%
rows = []
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # digits: some units have equal outputs in a few clients
    for case in run["outputs"].to_dataset()["case"].values:
        outputs = run["outputs/mean_output"].sel(case=case, outputs="own")
        for k in (1, 3, 10, 20, 30):
            h = fedstat.knn_entropy(outputs, k=k, ties="atoms")["entropy"]
            rows.append({"case": case, "k": k, "median entropy": float(h.median()), "without": int(h.isnull().sum())})
pd.DataFrame(rows).pivot(index="k", columns="case").round(2)

# %% [markdown]
# ## Do units with concentrated outputs have high communality?
#
# FedFac shares the units of high communality. If these were the units with concentrated outputs, entropy and
# communality would be negatively correlated. Intervals refer to other clients (half-samples) with these 200 units.

# %%
related = motivation.correlations(run).query("outputs == 'own'")
related["rank correlation"] = [
    f"{r.spearman:+.2f} [{r.low:+.2f}, {r.high:+.2f}]" + ("" if r.converged else " *") for r in related.itertuples()
]
related.pivot(index=["case", "on"], columns="method", values="rank correlation")[["pa", "pc", "leverage"]]

# %%
figure, axes = plt.subplots(2, 3, figsize=(11, 7), sharey=True, layout="constrained")
for row, case in zip(axes, ("iid", "one-class"), strict=True):
    for ax, method in zip(row, ("pa", "pc", "leverage"), strict=True):
        papers.relation(run, case=case, method=method, ax=ax)
plt.show()

# %% [markdown]
# `*`: principal axis did not converge in 50 iterations at κ = 0.75 (κ is the proportion of the eigenvalue sum that the
# factors must reach). These numbers, and their half-samples, use communalities after 50 iterations; MINRES, or fewer
# factors, has a well-posed solution.
#
# **Conclusion.** On MNIST the correlation depends on the method, and on whether weights or updates are analyzed. With
# one digit per client, the case of interest, it is weak: from −0.13 to 0.06, all CIs within −0.19 and 0.12. With random
# samples, updates of units with concentrated outputs have the higher communality; on the weights, the methods
# contradict each other, because all clients have common random initial parameters, which dominate the correlation
# matrix. Entropy of outputs and communality of weights measure different properties.
