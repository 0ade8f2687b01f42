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
# # From weights to a conclusion
#
# Thirty clients each have a layer of 60 hidden units. Which units are shared, which personal, and how certain is that?
# The weights are those of model (8) of the FedFac paper, in which half of the units are shared, so the truth is known.
# Nothing is trained here; weights trained by any library enter by `read_weights`.
#
# FedFac shares units of high *communality* ν: the proportion of a unit's variance that the factors of a factor analysis
# explain. κ is the proportion of the eigenvalue sum that the factors must reach; it sets their number. *Agreement*
# (ICC) is the proportion of the variance of a unit's weights that is common to all clients.
#
# **At the end you will know** how to split a layer, how certain the split is, which analysis choices change it (κ, the
# method, convergence), and how communality differs from agreement between clients.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import fedstat as fs
from fedstat import plot
from fedstat.results import AgreementWarning, ConvergenceWarning
from fedstat.sim import generate
from fedstat.stats import split as splitting

# %% [markdown]
# ## 1. Weights from anywhere
#
# A client is a `state_dict`: a `.pt`, `.safetensors` or `.npz` file, or a mapping already in memory.

# %%
truth = generate(clients=30, d=60, m=60, p=0.5, alpha=0.4, n_train=10, n_test=1, seed=0)
states = [{"hidden.weight": torch.as_tensor(w), "hidden.bias": torch.zeros(60)} for w in truth["w"].values]
weights = fs.read_weights(states)["hidden"]["w"]
weights.sizes

# %% [markdown]
# ## 2. How many factors?
#
# The paper takes the smallest number of factors that reach the proportion κ of the eigenvalue sum. Classical rules give
# other numbers, here from 1 to 38.

# %%
z = fs.layer_matrix(weights)
advice = fs.n_factors(z, kappa=0.85)
advice

# %%
plot.scree(advice)
plt.show()

# %% [markdown]
# ## 3. The split
#
# We split at κ = 0.75 and τ = 0.5: units at or above the median of ν are shared. Some communalities exceed 1 (Heywood
# cases), which no factor model can have. The communalities then depend on the number of iterations; section 5 tests
# whether the split does.

# %%
result = fs.split(weights, kappa=0.75, tau=0.5, max_iter=2000)
result

# %%
print(result.fit.summary(rows=6, factors=4))

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4))
plot.communality(result, ax=axes[0])
plot.loadings(result, ax=axes[1], units=40)
figure.tight_layout()

# %% [markdown]
# ## 4. How certain is the split?
#
# Clients are the sampling units, so the bootstrap draws clients with replacement. Its CIs refer to samples of 30
# clients.

# %%
sure = fs.bootstrap(weights, kappa=0.75, tau=0.5, method="pc", n_boot=200, seed=1)
sure

# %%
plot.communality(sure)
plt.show()
# %% [markdown]
# Do communalities differ between units by more than chance? The permutation test has H0: units are exchangeable within
# clients. It permutes the units of each client.

# %%
fs.permutation_test(weights, kappa=0.75, method="pc", n_permutations=199, seed=1)

# %% [markdown]
# ## 5. Does the split depend on analysis choices?
#
# We change one choice at a time. A low adjusted Rand index (1: identical, 0: chance) means that this choice changes the
# split; it says nothing of sampling error. Here a small and a very large κ change the split, random initial values
# change a few units, and the method changes none. τ sets the number of shared units.

# %%
fs.sensitivity(weights, kappa=0.75, n_starts=3).tidy().drop(columns="prop_unchanged").round(2)

# %% [markdown]
# ## 6. Against the truth
#
# The shared units of model (8) are known. The area under the ROC curve (AUC) is 1 if every shared unit has a higher ν
# than every personal unit, and 0 if the order is reversed.

# %%
shared = truth["unit_shared"].values
rows = []
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)
    warnings.simplefilter("ignore", AgreementWarning)
    for kappa in (0.2, 0.5, 0.75, 0.85, 0.95):
        for name in ("pa", "pa from smc", "minres", "pc", "leverage"):
            method, _, init = name.partition(" from ")
            fit = fs.split(weights, kappa=kappa, method=method, init=init or "pc").fit
            rows.append({
                "kappa": kappa, "estimator": name, "factors": fit.n_factors, "converged": fit.converged,
                "heywood": int(fit.heywood.sum()), "auc": float(splitting.auc(fit.communality, shared)),
            })  # fmt: skip
pd.DataFrame(rows).pivot(index="kappa", columns="estimator", values="auc").round(2)

# %% [markdown]
# The methods fail in opposite ranges of κ. Report a split with κ, the method, its convergence, and the adjusted Rand
# index over bootstrap samples of clients.

# %%
estimated = fs.split(weights, kappa=0.75, method="pc")
pd.crosstab(pd.Series(estimated.group, name="split"), pd.Series(np.where(shared, "shared", "personal"), name="truth"))

# %% [markdown]
# ## 7. Do clients agree?
#
# ν measures how well *other units* predict a unit. Agreement measures whether *clients* have equal weights, and needs
# no κ.

# %%
agreement = fs.icc(weights)
agreement

# %% [markdown]
# The true weights of a shared unit are equal in all clients, so their agreement is 1 by construction. Training adds
# noise. Up to which noise does each statistic separate shared from personal units?


# %%
def icc2(w):
    table = fs.icc(w).tidy()
    return table.loc[table["type"] == "ICC2", "icc"].to_numpy()


rng, rows = np.random.default_rng(0), []
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)
    warnings.simplefilter("ignore", AgreementWarning)
    for noise in (0, 0.1, 0.3, 1, 3):
        blurred = weights + noise * rng.normal(size=weights.shape)
        row = {f"ν, κ = {k:g}": fs.split(blurred, kappa=k).fit.communality for k in (0.5, 0.75, 0.95)}
        row["ICC2"] = icc2(blurred)
        auc = {name: float(splitting.auc(x, shared)) for name, x in row.items()}
        rows.append({"sd of noise": noise, **auc, "median ICC2 of shared": np.median(row["ICC2"][shared])})
pd.DataFrame(rows).set_index("sd of noise").round(2)

# %% [markdown]
# Agreement needs no analysis choice. It separates all units up to noise larger than the weights (SD 1), and most units
# at SD 3. ν does so at none of these three κ for noise of SD 0.3, and at two of them for SD 1. Agreement compares units
# at the same position in all clients. Clients that have hardly left common initial parameters agree for that reason
# alone: `fs.icc(run)` subtracts the last common values of a run, and `fs.icc(weights, baseline=...)` those of weights
# from elsewhere.
