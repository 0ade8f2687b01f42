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
# # What the theory of FedSplit says, and what training does
#
# FedFac §3.3 makes two claims about network (4), two layers with personal and shared units: with local steps it
# converges linearly at $1-\tfrac12(\rho_1\lambda^s+\rho_2\lambda^p)$ per round (Theorem 1), and its test loss is
# bounded by a term in $y^\top(H^{s\infty}+H^{p\infty})^{-1}y$ (Theorem 2). Both are statements about numbers that can
# be computed. Here they are, on handwritten digits, one class per client.
#
# **At the end you will know** how far both bounds are from what happens, where they say nothing, and how much faster
# FedSplit trains than FedAvg once both have a kernel of the same size.

# %%
import seaborn as sns
from matplotlib import pyplot as plt

import fedstat.ntk
from fedstat.ntk.descent import digits
from fedstat.plot import fedfac as plot

sns.set_theme(style="ticks")
data = digits(clients=10, n=20, n_test=50)
train = data.isel(sample=data["split"].values == "train")

# %% [markdown]
# ## Kernels and eigenvalues
#
# $H^{p\infty}$ is the block diagonal of $H^{s\infty}$, so its smallest eigenvalue cannot be smaller. Assumption 1 asks
# that no two images be parallel; a violation would be named.

# %%
print("violations:", fedstat.ntk.violations(train) or "none")
for name, client in (("H^s", None), ("H^p", "client")):
    e = fedstat.ntk.extreme_eigenvalues(fedstat.ntk.kernel(train, client))
    print(f"{name}: λ_min = {e.lambda_min:.5f} ± {e.error_min:.0e}, λ_max = {e.lambda_max:.3f}, γ = {e.condition:.0f}")

# %% [markdown]
# ## Theorem 1
#
# `rounds_ratio` is rounds that the bound needs over rounds observed; `limit` is the rate of an infinitely
# wide network. `fedavg-matched` shares all units of network (4), so that its kernel has the trace of FedSplit's: the
# difference between the two is what the split itself buys.

# %%
result = fedstat.ntk.convergence(data, widths=[64, 256], rounds=60, replicates=3)
result

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
plot.convergence(result, ax=axes[0])
plot.freezing(result, ax=axes[1])
plt.show()

# %% [markdown]
# ## Theorem 2
#
# The number of samples is kept and cut into more and more clients. Labels are ±1, so a bound of 1 or more says nothing:
# the loss is never larger. The statement itself implies that it says something only where $8C^2/(1+1/C) < N$.

# %%
iid = digits(clients=10, n=30, n_test=20, partition="iid")
general = fedstat.ntk.generalization(iid, clients=[1, 2, 5, 10], width=128, rounds=100, replicates=2)
general

# %%
plot.generalization(general, ax=plt.subplots(figsize=(5.5, 4), layout="constrained")[1])
plt.show()
