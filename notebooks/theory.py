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
# # The theorems of FedSplit, compared with training
#
# FedFac §3.3 proves two bounds for network (4), two layers with personal and shared units. With local steps the loss
# decreases by the factor $1-\tfrac{1}{2}(\rho_1\lambda^s+\rho_2\lambda^p)$ per round (Theorem 1), and the test loss is
# bounded by a term in $y^\top(H^{s\infty}+H^{p\infty})^{-1}y$ (Theorem 2). $\lambda^s$ and $\lambda^p$ are the smallest
# eigenvalues of the kernels $H^{s\infty}$ of shared and $H^{p\infty}$ of personal units; $\rho_1$ and $\rho_2$ depend
# on learning rates, local steps and clients. We compute both bounds for handwritten digits, one class per client.
#
# **At the end you will know** how far both bounds are from the observed losses, where they are vacuous, and how much
# faster FedSplit trains than FedAvg if both have a kernel of equal trace.

# %%
import seaborn as sns
from matplotlib import pyplot as plt

import fedstat.ntk
from fedstat import plot
from fedstat.ntk.descent import digits

sns.set_theme(style="ticks")
data = digits(clients=10, n=20, n_test=50)
train = data.isel(sample=data["split"].values == "train")

# %% [markdown]
# ## Kernels and eigenvalues
#
# $H^{p\infty}$ is the block diagonal of $H^{s\infty}$, so its smallest eigenvalue cannot be smaller. Assumption 1
# requires that no two images are parallel; `violations` names those that are.

# %%
print("violations:", fedstat.ntk.violations(train) or "none")
for name, client in (("H^s", None), ("H^p", "client")):
    e = fedstat.ntk.extreme_eigenvalues(fedstat.ntk.kernel(train, client))
    print(f"{name}: λ_min = {e.lambda_min:.5f} ± {e.error_min:.0e}, λ_max = {e.lambda_max:.3f}, γ = {e.condition:.0f}")

# %% [markdown]
# ## Theorem 1
#
# `rounds_ratio` is the rounds that the bound needs, divided by the observed rounds; `limit` is the rate of an
# infinitely wide network. `fedavg-matched` shares all units of network (4), so its kernel has the trace of FedSplit's:
# their difference is the effect of the split.

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
# We divide a fixed number of samples N among more and more clients C. Labels are ±1 and the loss is at most 1, so a
# bound of 1 or more is vacuous. By its own statement, the theorem is vacuous unless $8C^2/(1+1/C) < N$.

# %%
iid = digits(clients=10, n=30, n_test=20, partition="iid")
general = fedstat.ntk.generalization(iid, clients=[1, 2, 5, 10], width=128, rounds=100, replicates=2)
general

# %%
plot.generalization(general, ax=plt.subplots(figsize=(5.5, 4), layout="constrained")[1])
plt.show()
