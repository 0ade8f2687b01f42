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
# # Four decompositions of a network into shared and personal parts
#
# In personalized federated learning every client has its own model, and a server averages a part of these models. Four
# algorithms define this shared part differently:
#
# - FedFac shares some hidden *units*.
# - Factorized-FL shares a *factor* of every weight matrix: u of W = u vᵀ + μ (α), or u, v and μ (β).
# - FedDecomp shares σ of W = σ + BA; BA, of low rank, is personal.
# - FedCP shares all but the last layer, and a *policy* that divides every sample's features between a global and a
#   personal last layer.
#
# Each paper claims that the personal part holds what is particular to a client. Here clients belong to four known
# groups, so the claim can be tested: does the personal part identify the groups?
#
# **At the end you will know** how to extract the personal part of eight algorithms from their runs, how to compare such
# parts by factor analysis, rank and clusters of clients, and which claims these data support.

# %%
import sys

import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from tqdm import tqdm

import fedstat as fs
from fedstat import plot
from fedstat.data import load, partition, to_float
from fedstat.fl import algorithms, client_weights, nets

sns.set_theme(style="ticks")
SEEDS = range(4)

# %% [markdown]
# ## 1. Clients whose groups are known
#
# Sixteen clients form four groups of four. Each group has different classes of scikit-learn's 8 × 8 digits. A client
# has 70 to 110 training images and 18 to 28 test images. The algorithms do not know the groups. Each seed has a new
# partition of the images and new initial parameters.


# %%
def clients(seed):
    digits = to_float(load("digits"))
    groups = {"0 to 2": "012", "3, 4": "34", "5 to 7": "567", "8, 9": "89"}
    fed = partition.domains(digits, groups=groups, by="y", clients_per_domain=4, seed=seed)
    # domains() numbers classes within each group; here all clients number them alike, so that an output can be shared
    fed = fed.assign(y=("sample", fed["y_true"].values, digits["y"].attrs)).drop_vars("y_true")
    return partition.train_test(fed, seed=seed)


plot.partition(clients(0), ax=plt.subplots(figsize=(3.6, 4))[1])
plt.show()

# %% [markdown]
# ## 2. The algorithms, and their shared parts
#
# All algorithms train one network: 64 inputs, 40 hidden units (layer `fc1`), 10 outputs (`fc2`). Settings are the
# defaults except the layers Λ, the proportion κ of the eigenvalue sum and the threshold τ of FedFac, and the rank of
# FedDecomp: a tenth of 40 and of 10, so BA has rank 4 in `fc1` and 1 in `fc2`. Nothing was tuned. Local, FedAvg and
# FedPer are for comparison.

# %%
METHODS = {
    "local": {},
    "fedavg": {},
    "fedper": {},
    "fedfac-dynamic": {"layers": ["fc1"], "kappa": 0.75, "tau": 0.5},
    "factorized-fl-alpha": {},
    "factorized-fl-beta": {},
    "feddecomp": {"rank_linear": 0.1},
    "fedcp": {},
}
titles = {name: algorithms.about(name).title or name for name in METHODS}
about = {titles[m]: algorithms.about(m)._asdict() for m in METHODS}
pd.DataFrame(about).T[["shared", "personal"]].style.set_properties(**{"text-align": "left"})


# %%
def train(method, seed):
    return fs.fl.train(
        clients(seed), nets.mlp([64, 40, 10]), algorithms.named(method, **METHODS[method]), rounds=15, local_epochs=3,
        batch_size=10, lr=0.1, seed=seed, threads=1, checkpoints=[1], evaluate_every=5,
        probe="parameters", progress=False,
    )  # fmt: skip


jobs = [(method, seed) for seed in SEEDS for method in METHODS]
runs = {job: train(*job) for job in tqdm(jobs, unit="run", ncols=72, file=sys.stdout)}
group = runs["local", 0]["clients/domain"]

# %% [markdown]
# ## 3. Accuracy
#
# Mean over clients after round 15, on each client's test images, and differences from training alone, paired by seed.

# %%
rows = []
for (method, seed), run in runs.items():
    accuracy = float(run["metrics/accuracy"].isel(round=-1).mean())
    rows.append({"method": titles[method], "seed": seed, "accuracy": accuracy})
fs.compare(pd.DataFrame(rows), reference=titles["local"])

# %% [markdown]
# ## 4. Factor analysis of each part
#
# Shared weights are equal in all clients after averaging, so we analyze them as clients trained them, *before*
# averaging: σ_i of FedDecomp, and W = σ + BA, with which clients predict; FedFac's W; β's u, with one value per input.
# Inputs (pixels) that are 0 in every image leave u at its initial value, equal in all clients; they are left out. With
# κ = 0.75 the factors reach 75% of the eigenvalue sum. ν is the communality: the proportion of a unit's variance that
# the factors explain.

# %%
rows = []
for seed in SEEDS:
    fac, dec, beta = (runs[m, seed] for m in ("fedfac-dynamic", "feddecomp", "factorized-fl-beta"))
    u = client_weights(beta, "fc1", "u", stage="trained").isel(u_column=0)
    u = u.rename(u_row="unit")[:, (u.std("client") > 1e-6).to_numpy()]
    matrices = {
        "FedFac: W": fs.layer_matrix(client_weights(fac, "fc1", stage="trained")),
        "FedDecomp: σ before averaging": fs.layer_matrix(client_weights(dec, "fc1", "weight", stage="trained")),
        "FedDecomp: W": fs.layer_matrix(client_weights(dec, "fc1", stage="trained")),
        "Factorized-FL β: u": u,
    }
    for name, z in matrices.items():
        fit = fs.fa(z, kappa=0.75, method="pc")
        low, middle, high = pd.Series(fit.communality).quantile([0.25, 0.5, 0.75])
        rows.append({"part": name, "rows": z.shape[0], "columns": z.shape[1], "factors": fit.n_factors,
                     "quartile 1 of ν": low, "median ν": middle, "quartile 3 of ν": high})  # fmt: skip
pd.DataFrame(rows).groupby("part", sort=False).mean().round(2)

# %% [markdown]
# ## 5. On which units do clients agree?
#
# `icc` of a run analyzes changes: the weights before averaging, minus the last values that the clients had in common.
# Shared units changed in round 15 alone, personal units over several rounds; the two are estimated apart.

# %%
agreement = fs.icc(runs["fedfac-dynamic", 0])
agreement

# %%
plot.forest(agreement)
plt.show()

# %% [markdown]
# Agreement of hidden layers and their parts, means over seeds. `agreeing`: the number of units with one direction of
# most clients.

# %%
rows = []
for method in ("local", "fedavg", "fedper", "fedfac-dynamic"):
    for seed in SEEDS:
        for part, found in fs.icc(runs[method, seed]).items():
            one = found.glance().iloc[0]
            rows.append({"method": titles[method], "part": part, "units": one["n_units"], "ICC2": one["layer_icc"],
                         "p of the layer": one["layer_p_value"], "agreeing": one["n_one_direction"]})  # fmt: skip
pd.DataFrame(rows).groupby(["method", "part"], sort=False).mean().round(2)

# %% [markdown]
# ## 6. How many directions does the personal part have?
#
# The table shows the effective rank of a client's personal part, mean over clients and seeds. For FedDecomp and
# Factorized-FL the part is W − σ = BA and W − μ = u vᵀ, with rank at most 4 and 1 by construction; for the others it is
# W minus the mean over clients. NaN: no entry is personal.

# %%
baseline = {"feddecomp": "weight", "factorized-fl-alpha": "mu", "factorized-fl-beta": "mu"}
rows = []
for (method, seed), run in runs.items():
    rank = fs.effective_rank(run, baseline=baseline.get(method, "mean")).tidy()
    rows.append(rank.assign(method=titles[method], part="W − " + baseline.get(method, "mean"), seed=seed))
ranks = pd.concat(rows).query("term in ['fc1', 'fc2']")
ranks.groupby(["method", "part", "term", "checkpoint"], sort=False)["estimate"].mean().unstack(
    ["term", "checkpoint"]
).round(2)

# %% [markdown]
# ## 7. Which clients are similar?
#
# We cluster clients into four clusters by the vectors below, minus their mean over clients. The adjusted Rand index is
# 1 if the clusters are the groups, and 0 on average by chance. p permutes group membership over clients (H0: membership
# is unrelated to the vectors). Output layers are left out: the output of a class that a client lacks decreases, so
# these layers show a client's *classes* under any algorithm. (The policy of FedCP sees the client's output layer, and
# BA of `fc1` is trained through it.) The comparison is the weights that clients train under FedAvg, where no entry is
# personal.


# %%
def vectors(seed):
    run = {m: runs[m, seed] for m in METHODS}
    alpha, beta, dec = run["factorized-fl-alpha"], run["factorized-fl-beta"], run["feddecomp"]
    return {
        "FedFac: personal units": client_weights(run["fedfac-dynamic"], "fc1"),
        "Factorized-FL α: v": client_weights(alpha, "fc1", "v"),
        "Factorized-FL β: v, uploaded": client_weights(beta, "fc1", "v", stage="trained"),
        "Factorized-FL β: u, uploaded": client_weights(beta, "fc1", "u", stage="trained"),
        "FedDecomp: BA": client_weights(dec, "fc1").astype(float) - client_weights(dec, "fc1", "weight"),
        "FedDecomp: σ, uploaded": client_weights(dec, "fc1", "weight", stage="trained"),
        "FedCP: policy": client_weights(run["fedcp"], "client", "share"),
        "Local: W": client_weights(run["local"], "fc1"),
        "FedAvg: W, uploaded": client_weights(run["fedavg"], "fc1", stage="trained"),
    }


alike = {
    (name, seed): fs.client_clusters(v, n_clusters=4, groups=group, baseline="mean")
    for seed in SEEDS
    for name, v in vectors(seed).items()
}
table = pd.concat(clusters.glance().assign(vector=name, seed=seed) for (name, seed), clusters in alike.items())
table.pivot(index="vector", columns="seed", values=["ari", "p_value"]).reindex(vectors(0)).round(4)

# %% [markdown]
# The prints of two vectors, first seed. The interval refers to other clients.

# %%
print(alike["Factorized-FL α: v", 0], alike["FedDecomp: BA", 0], sep="\n\n")

# %%
shown = ["FedFac: personal units", "Factorized-FL α: v", "FedDecomp: BA", "FedCP: policy"]
figure, axes = plt.subplots(2, 2, figsize=(11, 11), layout="constrained")
for ax, name in zip(axes.flat, shown, strict=True):
    plot.client_similarity(alike[name, 0], vmax=1, ax=ax)
    ax.set_title(name, pad=28)
plt.show()

# %% [markdown]
# Does the uploaded part identify the groups less well than under FedAvg? Adjusted Rand indices, paired by seed:

# %%
uploaded = [name for name in vectors(0) if name.endswith("uploaded")]
fs.compare(table[table["vector"].isin(uploaded)], reference=uploaded[-1], value="ari", method="vector")

# %% [markdown]
# Over the four seeds: mean and minimum of the adjusted Rand index (ARI), the lowest and the highest limit of its CIs,
# the contrast (mean similarity within minus between groups), and the mean ARI with clusters of random halves of the
# clients.

# %%
by = table.groupby("vector", sort=False)
limits = by.agg({"conf_low": "min", "conf_high": "max"}).itertuples(index=False)
columns = {
    "mean ARI": by["ari"].mean().round(2),
    "minimum": by["ari"].min().round(2),
    "limits of CIs": [f"[{low:.2f}, {high:.2f}]" for low, high in limits],
    "largest p": by["p_value"].max(),
    "contrast": by["contrast"].mean().round(2),
    "largest p, contrast": by["contrast_p_value"].max(),
    "ARI, halves": by["subsample_ari"].mean().round(2),
}
pd.DataFrame(columns)

# %% [markdown]
# ## 8. Measures of the algorithms over rounds
#
# Factorized-FL mixes clients by the similarity of v. Nearly all of v is its common initial value, so similarities are
# close to 1, and a client's mixture is nearly the mean over all clients. FedCP's ratio is the proportion of features
# that its policy gives to the personal output layer.

# %%
plot.similarity_over_rounds(runs["factorized-fl-alpha", 0]["measures/similarity"], rounds=[1, 5, 15])
plt.show()

# %%
mixing = {
    titles[m]: pd.Series({
        "least similarity": float(runs[m, 0]["measures/similarity"][-1].min()),
        "weight of the client itself": float(runs[m, 0]["mixing/weight"][-1].to_numpy().diagonal().mean()),
    })
    for m in ("factorized-fl-alpha", "factorized-fl-beta")
}  # fmt: skip
pd.DataFrame(mixing).T.round(3)

# %%
plot.client_lines(runs["fedcp", 0]["measures/personalisation"], ax=plt.subplots(figsize=(6, 4))[1])
plt.show()
policy = client_weights(runs["fedcp", 0], "client", "share")
print(
    f"SD over clients {float(policy.std('client').mean()):.4f}, over features {float(policy.mean('client').std()):.4f}"
)

# %% [markdown]
# The lines of the clients coincide: the policies hardly differ in size. Minus their common mean, they differ clearly in
# direction.
#
# ## 9. Conclusions
#
# Four seeds, sixteen clients, a network of 40 hidden units, 15 rounds, settings not tuned, 366 test images in total.
#
# **Accuracy.** FedAvg is less accurate than training alone, by 20 points, 95% CI [11, 29]. The personalized algorithms
# are inconclusive: the intervals of FedPer, FedFac and Factorized-FL α reach from 0.8 to 2.0 points below to 0.3 to 0.9
# above training alone; those of Factorized-FL β, FedDecomp and FedCP are 7 to 20 points wide. A client alone reaches
# 99%, so there is little to gain. These data do not show which algorithm is best.
#
# **Factor analysis.** σ before averaging needs as many factors as FedFac's weights (17 and 16 of 40), W = σ + BA with
# BA of rank 4 only 5 or 6: the personal part dominates FedDecomp's weights. The values of ν say little here: with
# principal components their mean is at least κ by construction, and u has fewer rows (clients) than columns, so few
# factors explain it.
#
# **Agreement.** The change in round 15 has little in common: ICC2 of the layer is 0.03 under FedAvg, where no unit has
# one direction in any seed, 0.08 under FedPer, and 0.07 on the shared units of FedFac. Near convergence the changes of
# the clients cancel, so this does not show that clients need other weights. Under FedPer, where each client has its own
# output layer, most clients deviate in one direction on 27 of 40 units. Personal units and weights under Local (0.21
# and 0.22) changed over up to 15 rounds, with initial parameters in common: these values are not comparable with the
# others.
#
# **Size of the personal part.** The bounds of 4 and 1 hold, and FedDecomp uses 2.6 of 4 directions. Personal units of
# FedFac and weights under Local use 6 and 9 of 40. These are different quantities, W − σ and W minus its mean, and do
# not rank the algorithms.
#
# **Similar clients.** FedFac's personal units, BA and FedCP's policy identify the groups without error in every seed
# (index 1, p = 0.0001, the smallest possible with 9999 permutations). v of Factorized-FL identifies them in part: more
# than by chance in all seeds, with intervals of single runs that include 0. But the weights uploaded under FedAvg,
# where no entry is personal, identify them, too. An index of 1 thus shows that a part *holds* the groups, not that the
# algorithm *put* them there: clients with different classes differ in everything they train. The decisive question is
# whether the shared part no longer holds them. The uploaded σ identifies the groups less well than FedAvg's uploads, by
# 0.72, 95% CI [0.23, 1.20] over seeds (p = 0.02), as expected if BA holds what is particular to a group; but σ is also
# trained for two epochs of three, after BA. β's u is inconclusive (p = 0.21); for its v, p = 0.04, but the simultaneous
# CI includes 0.
#
# **Inconclusive.** Whether BA, personal units or policies identify groups best: all indices are 1, so this needs a
# harder task. Whether Factorized-FL's matching helps: at the default ε = 1, τ = 0 its mixtures are almost the mean over
# all clients (weight of the client itself 0.064; 1/16 is 0.0625), although v minus its mean holds information on the
# groups. Whether any of this holds for larger networks, convolutions, partial participation, or groups that differ in
# labels and not in images.
