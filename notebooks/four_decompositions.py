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
# # Four ways to divide a network into shared and own
#
# In personalised federated learning every client has a model of its own, and a server averages a part of these models.
# FedFac shares some hidden *units*; Factorized-FL shares a *factor* of every weight matrix, u of W = u vᵀ + μ (α), or
# all of these (β); FedDecomp shares σ of W = σ + BA and keeps BA, of low rank; FedCP shares all but the last layer, and
# a *policy* that divides every sample's features between a global and an own last layer. Each claims that its own part
# holds what is particular to a client. Here clients come in four groups that we know, so that the claim can be tested:
# does the own part tell who is like whom?
#
# **At the end you will know** how to take the own part of eight methods out of their runs, how to compare such parts by
# factor analysis, rank and clusters of clients, and which of the claims these data bear and which they leave open.

# %%
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt

import fedstat as fs
from fedstat.data import load, partition, to_float
from fedstat.fl import algorithms, client_weights, nets
from fedstat.plot import client_plots as plot

sns.set_theme(style="ticks")
SEEDS = range(4)

# %% [markdown]
# ## 1. Clients whose groups are known
#
# Sixteen clients in four groups of four; a group's clients hold the same classes of scikit-learn's 8 × 8 digits, and no
# other group holds these. A client has 70 to 110 training images and 18 to 28 test images. The methods are not told the
# groups. Each seed divides the images anew and starts another network.


# %%
def clients(seed):
    digits = to_float(load("digits"))
    groups = {"0 to 2": "012", "3, 4": "34", "5 to 7": "567", "8, 9": "89"}
    fed = partition.domains(digits, groups=groups, by="y", clients_per_domain=4, seed=seed)
    # domains() numbers classes within each group; here all clients number them alike, so that an output can be shared
    fed = fed.assign(y=("sample", fed["y_true"].values, digits["y"].attrs)).drop_vars("y_true")
    return partition.train_test(fed, seed=seed)


fs.plot.partition(clients(0), ax=plt.subplots(figsize=(3.6, 4))[1])
plt.show()

# %% [markdown]
# ## 2. The methods, and what each calls shared
#
# One network for all, 64 inputs, 40 hidden units (layer `fc1`), 10 outputs (`fc2`); settings are the defaults except
# Λ, κ and τ of FedFac and the rank of FedDecomp: a tenth of 40 and of 10, so that BA has rank 4 in `fc1` and 1 in
# `fc2`. Nothing was tuned. Local, FedAvg and FedPer are for comparison.

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
        probe=["trained-weights", "parameters"],
    )  # fmt: skip


runs = {(m, seed): train(m, seed) for seed in SEEDS for m in METHODS}
group = runs["local", 0]["clients/domain"]

# %% [markdown]
# ## 3. Accuracy
#
# The mean over clients after round 15, on each client's own test images; differences from training alone, paired
# within seeds.

# %%
rows = []
for (method, seed), run in runs.items():
    accuracy = float(run["metrics/accuracy"].isel(round=-1).mean())
    rows.append({"method": titles[method], "seed": seed, "accuracy": accuracy})
fs.compare(pd.DataFrame(rows), reference=titles["local"])

# %% [markdown]
# ## 4. Factor analysis of each part
#
# Averaging makes shared weights equal in all clients, so that these are analysed as clients trained them, *before* the
# server averaged: σ_i of FedDecomp, beside the whole W = σ + BA that clients predict with; FedFac's W; β's u, with one
# value for each input. Inputs (pixels) that are 0 in every image leave u as it started, equal in all clients; they are
# left out. With κ = 0.75 the number of factors is the number of leading eigenvalues that hold 75 % of their sum.

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
# ## 5. How many directions has the own part?
#
# The effective rank of a client's own part, mean over clients and seeds. Of FedDecomp and Factorized-FL the part is
# W − σ = BA and W − μ = u vᵀ, and its rank is at most 4 and 1 by construction; of the others it is W less the mean over
# clients. NaN: nothing is the client's own.

# %%
baseline = {"feddecomp": "weight", "factorized-fl-alpha": "mu", "factorized-fl-beta": "mu"}
rows = []
for (method, seed), run in runs.items():
    found = fs.effective_rank(run, baseline=baseline.get(method, "mean")).tidy()
    rows.append(found.assign(method=titles[method], part="W − " + baseline.get(method, "mean"), seed=seed))
ranks = pd.concat(rows).query("term in ['fc1', 'fc2']")
ranks.groupby(["method", "part", "term", "checkpoint"], sort=False)["estimate"].mean().unstack(
    ["term", "checkpoint"]
).round(2)

# %% [markdown]
# ## 6. Who is like whom?
#
# Clients are clustered by the vectors below, less their mean over clients, into four clusters. The adjusted Rand index
# is 1 if these are the groups, and 0 on average by chance; p is from permuting the groups' labels over clients.
# Output layers are left out: an output that a client never needs sinks, so that they show a client's *classes* and
# would prove nothing about the methods. (The policy of FedCP sees the client's output layer, and BA of `fc1` is trained
# through it.) The weights that clients trained under FedAvg, where nothing is their own, are the comparison.


# %%
def vectors(seed):
    run = {m: runs[m, seed] for m in METHODS}
    alpha, beta, dec = run["factorized-fl-alpha"], run["factorized-fl-beta"], run["feddecomp"]
    return {
        "FedFac: own units": client_weights(run["fedfac-dynamic"], "fc1"),
        "Factorized-FL α: v": client_weights(alpha, "fc1", "v"),
        "Factorized-FL β: v, as sent": client_weights(beta, "fc1", "v", stage="trained"),
        "Factorized-FL β: u, as sent": client_weights(beta, "fc1", "u", stage="trained"),
        "FedDecomp: BA": client_weights(dec, "fc1").astype(float) - client_weights(dec, "fc1", "weight"),
        "FedDecomp: σ, as sent": client_weights(dec, "fc1", "weight", stage="trained"),
        "FedCP: policy": client_weights(run["fedcp"], "client", "share"),
        "Local: W": client_weights(run["local"], "fc1"),
        "FedAvg: W, as sent": client_weights(run["fedavg"], "fc1", stage="trained"),
    }


alike = {
    (name, seed): fs.client_clusters(v, n_clusters=4, groups=group, baseline="mean")
    for seed in SEEDS
    for name, v in vectors(seed).items()
}
table = pd.concat(found.glance().assign(vector=name, seed=seed) for (name, seed), found in alike.items())
table.pivot(index="vector", columns="seed", values=["ari", "p_value"]).reindex(vectors(0)).round(4)

# %% [markdown]
# Two of these in full, from the first seed. The interval says how far the index depends on which clients took part.

# %%
print(alike["Factorized-FL α: v", 0], alike["FedDecomp: BA", 0], sep="\n\n")

# %%
shown = ["FedFac: own units", "Factorized-FL α: v", "FedDecomp: BA", "FedCP: policy"]
figure, axes = plt.subplots(2, 2, figsize=(11, 11), layout="constrained")
for ax, name in zip(axes.flat, shown, strict=True):
    plot.client_similarity(alike[name, 0], ax=ax)
    ax.set_title(name, pad=28)
plt.show()

# %% [markdown]
# Does the part that is sent hold less of the groups than under FedAvg? Indices, paired within seeds:

# %%
sent = ["Factorized-FL β: u, as sent", "Factorized-FL β: v, as sent", "FedDecomp: σ, as sent", "FedAvg: W, as sent"]
fs.compare(table[table["vector"].isin(sent)], reference=sent[-1], value="ari", method="vector")

# %% [markdown]
# Across seeds: index and contrast (mean similarity within groups minus between), mean and smallest of the four, the
# widest interval, and how well clusters are found again without half of the clients.

# %%
by = table.groupby("vector", sort=False)
columns = {
    "index": by["ari"].mean(),
    "smallest": by["ari"].min(),
    "lowest bound": by["conf_low"].min(),
    "highest bound": by["conf_high"].max(),
    "largest p": by["p_value"].max(),
    "contrast": by["contrast"].mean(),
    "largest p of contrast": by["contrast_p_value"].max(),
    "found again": by["recurs"].mean(),
}
pd.DataFrame(columns).round(4)

# %% [markdown]
# ## 7. The methods' own measures over rounds
#
# Factorized-FL mixes clients by the similarity of v, as it is. Nearly all of v is what clients began with, in common,
# so that similarities are close to 1 and a client's mixture is nearly the mean of all. FedCP's ratio is the share of
# features that its policy sends to the own output layer.

# %%
plot.similarity_over_rounds(runs["factorized-fl-alpha", 0]["measures/similarity"], rounds=[1, 5, 15])
plt.show()

# %%
mixing = {
    titles[m]: pd.Series({
        "least similarity": float(runs[m, 0]["measures/similarity"][-1].min()),
        "own weight in the mixture": float(runs[m, 0]["mixing/weight"][-1].to_numpy().diagonal().mean()),
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
# Clients' lines lie on one another: the policies hardly differ in size, and clearly in direction, once what they have
# in common is taken off.
#
# ## 8. What these numbers bear, and what they do not
#
# Four seeds, sixteen clients, a network of 40 hidden units, 15 rounds, settings not tuned, 366 test images in all.
#
# **Accuracy.** FedAvg is worse than training alone, by 20 points [11, 29]. None of the personalised methods is shown
# to differ from training alone, nor to be as good: the intervals of FedPer, FedFac and Factorized-FL α end within 0.3
# to 0.9 points above it and 0.8 to 2.0 below, those of Factorized-FL β, FedDecomp and FedCP are 9 to 20 points wide.
# The task leaves nothing to gain, since a client alone reaches 99 %. Which method is best cannot be decided here.
#
# **Factor analysis.** σ before averaging needs as many factors as FedFac's weights (17 and 16 of 40), W = σ + BA with
# BA of rank 4 only 5 or 6: what is strong in FedDecomp's weights is its own part. The values of ν themselves say little
# here: with principal components their mean is at least κ by construction, and u has fewer rows (clients) than
# columns, so that a few factors must explain it.
#
# **Size of the own part.** The bounds hold, 4 and 1, and FedDecomp uses 2.6 directions of 4. Own units of FedFac and
# own weights under Local use 6 and 9 of 40. These are different things, W − σ and W less its mean, and do not rank the
# methods.
#
# **Who is like whom.** The groups are found without error in every seed (index 1, p 0.0001, the smallest that 9999
# permutations can give) by FedFac's own units, BA and FedCP's policy. v of Factorized-FL finds them in part: more than
# by chance in all seeds, with intervals of a single run that reach below 0. But so do the weights sent under FedAvg,
# in which nothing is the client's own. An index of 1 thus shows that a part *holds* the groups, not that the method
# *put* them there: clients with different classes differ in whatever they train. The telling number is what the shared
# part has lost. σ as sent finds the groups less well than FedAvg's weights as sent, by 0.72 [0.23, 1.20] over seeds
# (p 0.02), as it should if BA has taken over what is particular to a group; but σ is also trained for two epochs of
# three, after BA. For β's u this is not decided (p 0.21), for its v hardly (p 0.04, and the interval holds 0).
#
# **Not decided.** Whether BA, own units or policies tell groups apart best: all are at 1, and need a harder task.
# Whether Factorized-FL's matching helps: at the default ε = 1, τ = 0 its mixtures are almost the mean of all (own
# weight 0.064, where 1/16 is 0.0625), although v less its mean knows something of the groups. Whether any of it holds
# for larger networks, convolutions, partial participation, or groups that differ in labels and not in images.
