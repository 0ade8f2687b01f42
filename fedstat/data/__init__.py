"""Data sets, published or of users, read from their files, and partitions among clients.

A data set is sample-major: x (sample, ...), y (sample) and the coordinate split (sample). A partition adds the
coordinate client (sample) and does not copy x.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat.data import _fetch, ag_news, arrays, cifar, leaf, mnist, partition, svhn, tiny_imagenet
from fedstat.data._files import SPLITS, Source, Split, folder, open_folder, save_folder
from fedstat.data.arrays import to_float
from fedstat.data.folders import from_folder
from fedstat.data.huggingface import from_huggingface
from fedstat.data.tables import from_table

__all__ = [
    "SOURCES",
    "from_folder",
    "from_huggingface",
    "from_table",
    "load",
    "open_folder",
    "partition",
    "save_folder",
    "to_float",
]

_LOADERS: tuple[tuple[dict[str, Source], Callable[..., xr.Dataset]], ...] = (
    (mnist.DIGITS, mnist.load_digits), (mnist.SOURCES, mnist.load_mnist), (cifar.SOURCES, cifar.load_cifar),
    (svhn.SOURCES, svhn.load_svhn), (tiny_imagenet.SOURCES, tiny_imagenet.load_tiny_imagenet),
    (leaf.SOURCES, leaf.load_leaf), (leaf.SHAKESPEARE, leaf.load_shakespeare), (ag_news.SOURCES, ag_news.load_ag_news),
)  # fmt: skip
SOURCES: dict[str, Source] = {name: source for sources, _ in _LOADERS for name, source in sources.items()}
"""Data sets by name: their files, sizes and addresses."""


def __dir__() -> list[str]:
    return __all__


@check.named_options(ag_news.load_ag_news, arrays.load)
def load(
    name: str = "digits",
    data_dir: str | os.PathLike[str] | None = None,
    *,
    split: Split | None = None,
    fetch: bool = False,
    **options: Any,
) -> xr.Dataset:
    """Read a published data set from its downloaded files, or your own from a file of arrays or a table.

    Parameters
    ----------
    name : str
        One of ``fedstat.data.SOURCES``: "digits" needs no files; "mnist", "fashion", "emnist-balanced" (and -byclass,
        -bymerge, -digits, -letters, -mnist), "cifar-10", "cifar-100", "svhn", "tiny-imagenet", "femnist",
        "shakespeare-leaf", "shakespeare" (the raw text), "ag-news". Or the path of your own file of arrays, "own.npz",
        or table, "own.csv".
    data_dir : path, optional
        Folder that holds the files, or a folder of the data set. By default, the environment variable FEDSTAT_DATA,
        else ``fedstat_data`` in the home directory.
    split : {"train", "test"}, optional
        Subset to read; by default, both.
    fetch : bool
        True downloads missing files first, as ``python -m fedstat data fetch NAME`` does. By default, nothing is
        downloaded.
    **options
        ``vocabulary`` of "ag-news". ``task`` of your own files: "classification" or "regression"; by default, real
        numbers in y are targets of a regression, and integers and texts are classes. ``y``, ``client`` of a table:
        names of its columns; by default "y", and "client" if there is such a column.

    Returns
    -------
    xarray.Dataset
        x (sample, ...): images uint8 (sample, channel, row, column), texts as numbers; y (sample) int64, whose
        ``attrs["names"]`` are the classes; coordinates split (sample) "train" | "test", and, if the data set has
        writers or roles, ``user``.

    Raises
    ------
    FileNotFoundError
        If a file is missing; names the file, the folders searched, and the command that downloads it.
    ConnectionError
        With ``fetch``, if a download fails; the next call continues it.
    ValueError
        If a file is corrupt or truncated; names the file and the byte or line. If the declared or unzipped content of
        a file would take more than 4 GiB; the environment variable FEDSTAT_MAX_BYTES sets another limit.

    Warns
    -----
    UserWarning
        If a subset does not have the published number of rows.

    Examples
    --------
    >>> load("digits").x.sizes
    Frozen({'sample': 1797, 'channel': 1, 'row': 8, 'column': 8})
    """
    if arrays.is_arrays(name):
        check.require_default("fetch", fetch, False, "with a file of your own")
        return arrays.load(name, split, **options)
    check.choice("name", name, list(SOURCES))
    if split is not None:
        check.choice("split", split, SPLITS)
    root = folder(data_dir)
    if fetch:
        _fetch.fetch(SOURCES[name], root)
    load_one = next(loader for sources, loader in _LOADERS if name in sources)
    try:
        return load_one(name, root, split, **options)
    except FileNotFoundError as error:
        source = SOURCES[name]
        after = f" {source.after}" if fetch else ""
        raise FileNotFoundError(
            f"{error}, or download them ({source.home}): python -m fedstat data fetch {name}.{after}"
        ) from None
