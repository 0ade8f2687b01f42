"""Users' modules of more than one file of tests, and data for them."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from torch import nn
from torch.nn import functional


class Uses(nn.Module):
    """A module with attributes, whose forward pass is a function of it and its input."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def federation(kind="series", *, clients=5, n_test=3):
    """Clients of 6 to 11 training samples: series (5, 8), images (1, 8, 8) or words (5,); classes or the next word."""
    rng = np.random.default_rng(0)
    sizes = [n for c in range(clients) for n in ((6, 7, 8, 10, 11)[c % 5], n_test)]
    client, split = np.repeat(np.repeat(np.arange(clients), 2), sizes), np.repeat(["train", "test"] * clients, sizes)
    y = rng.integers(0, 11 if kind == "words" else 3, len(client))
    shape = {"series": (5, 8), "images": (1, 8, 8), "words": (5,)}[kind]
    if kind == "words":
        x = rng.integers(0, 11, (len(y), *shape))
    else:
        x = rng.normal(size=(len(y), *shape)) + y.reshape(-1, *(1,) * len(shape)) / 2
    dims = ("sample", *[f"axis{i}" for i in range(len(shape))])
    coords = {"client": ("sample", client), "split": ("sample", split.astype(object))}
    return xr.Dataset({"x": (dims, x), "y": ("sample", y)}, coords)


def of_client(data, client, subset):
    """Inputs, real or words, and labels of one client."""
    one = data.isel(sample=np.flatnonzero((data["client"] == client) & (data["split"] == subset)))
    x = torch.from_numpy(one.x.values)
    return x.float() if x.is_floating_point() else x, torch.from_numpy(one.y.values)


def tied_words():
    module = Uses(lambda m, x: m.out(m.body(m.norm(m.words(x).mean(1))).tanh()), words=nn.Embedding(11, 6),
                  body=nn.Linear(6, 6), norm=nn.LayerNorm(6), out=nn.Linear(6, 11))  # fmt: skip
    module.out.weight = module.words.weight
    return module


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, positions, two encoder layers with dropout, and a head."""

    def __init__(self):
        super().__init__()
        self.patches, self.cls_token = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8) / 10)
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x):
        h = self.patches(x).flatten(2).mT
        return self.head(self.encoder(torch.cat([self.cls_token.expand(len(h), -1, -1), h], 1) + self.pos_embed)[:, 0])


class Causal(nn.Module):
    """A block of a language model: attention to earlier tokens and two dense layers, normalized first."""

    def __init__(self):
        super().__init__()
        self.first, self.qkv, self.mix = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.second, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, h):
        q, k, v = self.qkv(self.first(h)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, self.mask, 0.1 if self.training else 0.0)
        h = h + self.mix(attended.transpose(1, 2).flatten(2))
        return h + self.down(functional.gelu(self.up(self.second(h))))


class GPT(nn.Module):
    """Two causal blocks; the head's weight is the words' embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks, self.norm = nn.ModuleList([Causal(), Causal()]), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))
