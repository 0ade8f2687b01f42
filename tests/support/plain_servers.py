"""FedAMP, FedFomo and Clustered-FL written out: one torch module per client, and the server's rule client by client."""

from __future__ import annotations

import itertools
import math

import numpy as np
import plain_loop
import torch
import trainer
from algorithm_jobs import SETTINGS
from torch import nn

from fedstat._utils import streams
from fedstat.fl.cohort import by_size


def module(job):
    """An MLP of the job's sizes."""
    weights = [shape for name, shape in job.net.shapes.items() if name.endswith("weight")]
    return plain_loop.module([weights[0][1], *(shape[0] for shape in weights)])


def vector(model):
    return torch.cat([p.flatten() for p in model.values()]).double()


def trained(job, make_optimizer, model, number, client, penalty=None):
    return plain_loop.trained(job, module(job), model, client, make_optimizer, "batches", number, 0, penalty=penalty)


def begun(job):
    start = job.net.init(streams.generator(job.seed, "start"))
    return [{name: p.clone() for name, p in start.items()} for _ in range(job.clients)]


def loss_of(job, model, x, y):
    return nn.functional.cross_entropy(plain_loop.loaded(module(job), model)(x), y).item()


def accuracies(job, models):
    return plain_loop.scores(job, lambda: module(job), models)


def near(cloud, strength):
    return lambda now, _: strength / 2 * sum((now[n] - cloud[n]).square().sum() for n in now)


def fedamp(job, make_optimizer, rounds, *, lam=1.0, alpha=1.0, sigma=1.0, attention="distance", self_weight=0.1):
    """Huang et al. (2021), Algorithm 1, equations (5) to (8)."""
    own, cloud = begun(job), begun(job)
    for number in range(rounds):
        active = [int(c) for c in trainer.active(job, number)]
        for c in active:
            own[c] = trained(job, make_optimizer, own[c], number, c, near(cloud[c], lam / alpha))
        vectors = {c: vector(own[c]) for c in active}
        for i in active:
            w, xi = vectors[i], {}
            for j in active:
                v = vectors[j]
                if attention == "distance":
                    xi[j] = alpha * math.exp(-float((w - v) @ (w - v)) / sigma) / sigma
                else:
                    xi[j] = math.exp(sigma * float(w @ v / w.norm() / v.norm()))
            others = sum(xi[j] for j in active if j != i)
            if attention == "cosine":
                xi = {j: x * (1 - self_weight) / others for j, x in xi.items() if j != i}
            elif others > 1:
                xi = {j: x / others for j, x in xi.items()}
            xi[i] = 1 - sum(x for j, x in xi.items() if j != i)
            cloud[i] = plain_loop.mean([own[j] for j in active], [xi[j] for j in active])
    return own, accuracies(job, own)


def fedfomo(job, make_optimizer, rounds, *, downloads=4, epsilon=0.3, decay=0.05, seen=None):
    """Zhang et al. (2021), §3, with a double loop over clients and the models that they download.

    ``seen`` collects (round, client, the others' numbers).
    """
    own, affinity = begun(job), np.zeros((job.clients, job.clients))
    for number in range(rounds):
        active = [int(c) for c in by_size(job.train, trainer.active(job, number))]
        after = {c: trained(job, make_optimizer, own[c], number, c) for c in active}
        new = {}
        for i in active:
            rng, m = streams.generator(job.seed, "downloads", number, i), min(downloads, len(active) - 1)
            others = [active[k] for k in rng.permutation([k for k in range(len(active)) if active[k] != i])]
            random = sum(rng.random(m) < max(0, epsilon - decay * number))
            rest = sorted(others[random:], key=lambda j: -affinity[i, j])
            models = [i, *others[:random], *rest[: m - random]]
            if seen is not None:
                seen.append((number, i, sorted(models[1:])))
            x, y = plain_loop.samples(job.validation, i)
            weights, before = {}, loss_of(job, own[i], x, y)
            for n in models:
                far = (vector(after[n]) - vector(own[i])).norm().item()
                weights[n] = (before - loss_of(job, after[n], x, y)) / far if far else 0.0
            positive = {n: max(w, 0) for n, w in weights.items()}
            total = sum(positive.values())
            new[i] = (
                plain_loop.mean([after[n] for n in models], [positive[n] / total for n in models])
                if total
                else after[i]
            )
            for n, w in weights.items():
                affinity[i, n] += w if n != i else 0
        own = [new.get(c, own[c]) for c in range(job.clients)]
    return own, accuracies(job, own)


def bipartition(similarity):
    """The two parts whose largest similarity across is smallest, among all there are."""
    n, best = len(similarity), None
    for size in range(1, n // 2 + 1):
        for part in itertools.combinations(range(n), size):
            rest = [k for k in range(n) if k not in part]
            across = max(similarity[i][k] for i in part for k in rest)
            if best is None or across < best[0]:
                best = across, list(part)
    return best


def clustered(job, make_optimizer, rounds, *, eps1=0.4, eps2=1.6, gamma=0.0, max_clusters=None, history=None):
    """Sattler et al. (2019), Algorithms 1 to 3, the best bipartition by trying all."""
    clusters, models = [list(range(job.clients))], [begun(job)[0]]
    for number in range(rounds):
        active = {int(c) for c in trainer.active(job, number)}
        after, before = {}, list(models)
        for k, members in enumerate(clusters):
            after |= {c: trained(job, make_optimizer, models[k], number, c) for c in members if c in active}
        parents = list(range(len(clusters)))
        for k, members in enumerate(list(clusters)):
            here = [c for c in members if c in active]
            rank = [int(c) for c in by_size(job.train, np.array(here, int))].index
            if not here:
                continue
            update = {c: vector(after[c]) - vector(before[k]) for c in here}
            n = [float(job.train.sizes[c]) for c in here]
            mean = sum(w / sum(n) * update[c] for w, c in zip(n, here, strict=True)).norm()
            largest = max(u.norm() for u in update.values())
            if mean < eps1 and largest > eps2 and len(here) > 1 and len(clusters) < (max_clusters or job.clients):
                unit = [update[c] / update[c].norm() for c in here]
                cosine = [[float(a @ b) for b in unit] for a in unit]
                across, part = bipartition(cosine)
                if math.sqrt((1 - across) / 2) > gamma:
                    rest = [i for i in range(len(here)) if i not in part]
                    few, many = sorted((part, rest), key=lambda some: sum(n[i] for i in some))
                    if sum(n[i] for i in few) == sum(n[i] for i in many) and here.index(min(here, key=rank)) in few:
                        few = many
                    leave = {here[i] for i in few}
                    clusters[k] = [c for c in members if c not in leave]
                    clusters.append(sorted(leave))
                    parents.append(k)
        models = []
        for k, members in enumerate(clusters):
            here = [c for c in members if c in active]
            n = [float(job.train.sizes[c]) for c in here]
            old = before[parents[k]]
            mean = plain_loop.mean([after[c] for c in here], [w / sum(n) for w in n]) if here else old
            models.append({name: old[name] + job.server_lr * (mean[name] - old[name]) for name in old})
        if history is not None:
            history.append([list(members) for members in clusters])
    own = [next(m for m, members in zip(models, clusters, strict=True) if c in members) for c in range(job.clients)]
    return own, accuracies(job, own)


PLAIN = {
    "clustered-fl": lambda j, opt, rounds: clustered(j, opt, rounds, **SETTINGS["clustered-fl"]),
    "fedamp": lambda j, opt, rounds: fedamp(j, opt, rounds, **SETTINGS["fedamp"]),
    "fedfomo": lambda j, opt, rounds: fedfomo(j, opt, rounds, **SETTINGS["fedfomo"]),
}
