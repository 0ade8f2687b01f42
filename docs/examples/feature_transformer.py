"""A transformer for tables as an example: every feature is a token, and a class token collects what they say.

Gorishniy, Rubachev, Khrulkov and Babenko (2021), "Revisiting deep learning models for tabular data", NeurIPS,
arXiv:2106.11959, §3.3. python -m fedstat.fl --data own.csv --net feature_transformer.py:feature_transformer
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FeatureTransformer(nn.Module):
    """Tokens x_j w_j + b_j of the features and a class token, attention between them, and a linear head."""

    def __init__(self, features: int, outputs: int, dimension: int, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, dimension) / dimension**0.5)
        self.bias = nn.Parameter(torch.zeros(features, dimension))
        self.class_token = nn.Parameter(torch.zeros(1, 1, dimension))
        layer = nn.TransformerEncoderLayer(dimension, 2, 2 * dimension, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dimension, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (sample, output) for features (sample, feature)."""
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])


def feature_transformer(sample: Sequence[int], outputs: int, *, dimension: int = 8, layers: int = 1) -> nn.Module:
    """A small transformer for a row of a table."""
    return FeatureTransformer(sample[0], outputs, dimension, layers)
