"""Data sets of Hugging Face, by their own description of columns; the package ``datasets`` itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, guard, labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.data._images import MODES, to_array
from fedstat.data._samples import SUBSETS, build_samples, move_channels
from fedstat.data.targets import Task

_ROWS = 1000  # rows that are Python objects at a time


@check.named_options()
def from_huggingface(
    dataset: Any, *, x: str | Sequence[str], y: str | Sequence[str], client: str | None = None, task: Task | None = None
) -> xr.Dataset:
    """Build a data set from one of Hugging Face's, in memory.

    Parameters
    ----------
    dataset : datasets.Dataset, datasets.DatasetDict or mapping
        As ``datasets.load_dataset`` returns it; a mapping has the keys "train", "test" or "validation".
    x : str or sequence of str
        Column of images, or of numbers in sequences of one length: floats are features, integers tokens. Several
        columns of numbers are features.
    y : str or sequence of str
        Column of the classes or targets; several columns are several targets of a regression.
    client : str, optional
        Column of the client of each row; labels stay as they are.
    task : {"classification", "regression"}, optional
        By default, real numbers in ``y`` are targets of a regression, and integers and texts are classes.

    Returns
    -------
    xarray.Dataset
        As :func:`fedstat.data.load` returns it: images are uint8 (sample, channel, row, column); the names of a
        ``ClassLabel`` are ``y.attrs["names"]``; split is the key of the mapping, or else "train".

    Raises
    ------
    ValueError
        If a column is missing, lacks a value, or holds texts (as x) or rows of different size; if a key is another.

    Examples
    --------
    >>> from datasets import Dataset
    >>> rows = Dataset.from_dict({"dose": [0.5, 1.5, 2.0], "ill": ["no", "yes", "yes"]})
    >>> from_huggingface(rows, x=["dose"], y="ill").y.values.tolist()
    [0, 1, 1]
    """
    parts = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    if not parts:
        raise ValueError("dataset must hold at least one of 'train', 'test' and 'validation', but is empty.")
    for key, part in parts.items():
        if key not in SUBSETS:
            raise ValueError(
                f"keys of dataset must be 'train', 'test' or 'validation', but got {str(key)!r:.200}. Choose among "
                "them: from_huggingface({'train': dataset['train'], 'test': dataset[...]}, ...)."
            )
        _require_rows(part)
    values = [_read_x(part, x) for part in parts.values()]
    if len({v.shape[1:] for v in values}) > 1:
        shapes = (f"{v.shape[1:]} ({key})" for key, v in zip(parts, values, strict=True))
        raise ValueError(
            f"x must have one shape in all subsets, but has {few(shapes)}. Resize or pad it in dataset.map."
        )
    targets = None if isinstance(y, str) else [str(name) for name in y]
    columns = [y] if isinstance(y, str) else [*y]
    if both := {*([x] if isinstance(x, str) else x)} & {*columns, client}:
        name = min(map(str, both))
        raise ValueError(f"x must hold features only, but {name!r} is a column of y or client, too. Remove it.")
    names = None if targets else _class_names(columns[0], parts)
    target = np.concatenate([_read_y(part, columns, targets is not None) for part in parts.values()])
    if names and (wrong := np.flatnonzero(target < 0)).size:
        raise ValueError(f"y must have a class for each sample, but it is -1 for {few(wrong)}. Leave these out.")
    sizes = [len(v) for v in values]
    return build_samples(
        "dataset",
        np.concatenate(values),
        target,
        task=task or ("regression" if targets else None),
        names=names,
        client=None if client is None else np.concatenate([_read_client(part, client) for part in parts.values()]),
        split=np.repeat(list(parts), sizes),
        features=None if isinstance(x, str) else [str(name) for name in x],
        targets=targets,
    )


def _require_rows(part: Any) -> None:
    if not hasattr(part, "features") or not hasattr(part, "with_format"):
        raise ValueError(
            f"dataset must be a Dataset or DatasetDict of Hugging Face, but got {check.kind(part)}. For other data, "
            "see fedstat.data.from_table and from_folder."
        )
    if not hasattr(part, "num_rows"):
        raise ValueError("dataset must be in memory or on disk, but is streamed. Load it with streaming=False.")
    if not part.num_rows:
        raise ValueError("dataset must hold samples, but a subset has no rows.")


def _feature(part: Any, role: str, name: str) -> Any:
    """Return the description of a column."""
    if name not in part.features:
        hint = check.did_you_mean(name, part.features)
        raise ValueError(
            f"{role} must be a column of dataset, but got {name!r:.200}; it has {few(part.features, 8)}.{hint}"
        )
    return part.features[name]


def _dtype(feature: Any) -> str:
    """Return the type of the numbers or texts in a column, in sequences or not; "" if it holds other things."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    kind = str(getattr(feature, "dtype", "") or "")
    return "string" if kind in ("large_string", "string_view") else kind


def _read(part: Any, name: str) -> list[Any]:
    """Return a column as Python objects, whatever format the data set has."""
    return list(part.select_columns([name]).with_format(None)[:][name])


def _read_x(part: Any, x: str | Sequence[str]) -> NDArray[Any]:
    """Return samples as bytes of images, float32 features or integer tokens."""
    if not isinstance(x, str):
        return np.column_stack([_numbers(part, name, ndim=1).astype(np.float32) for name in x])
    feature = _feature(part, "x", x)
    if type(feature).__name__ == "Image":
        return _decode_images(part, x)
    if _dtype(feature) == "string":
        raise ValueError(
            f"x must hold numbers or images, but {x!r} holds texts. Turn them into word numbers of one length first, "
            f"for example rows = dataset.map(lambda row: tokenizer(row[{x!r}], padding='max_length', truncation=True, "
            "max_length=64)), and pass x='input_ids'."
        )
    values = _numbers(part, x)
    if values.ndim == 1:
        raise ValueError(f"x must be a list of columns if each holds one number. Pass x=[{x!r}, ...].")
    return move_channels(values.astype(np.float32) if values.dtype == np.float64 else values)


def _numbers(part: Any, name: str, ndim: int | None = None) -> NDArray[Any]:
    """Return a column of numbers in their type, read block by block."""
    kind = _dtype(_feature(part, "x", name))
    if kind == "bool":
        kind = "float32"
    if not kind.startswith(("int", "uint", "float")):
        raise ValueError(
            f"column {name!r} must hold numbers, but holds {kind or 'other objects'}. Leave it out, or convert it."
        )
    plain, blocks = part.select_columns([name]).with_format(None), []
    for start in range(0, part.num_rows, _ROWS):
        rows = plain[start : start + _ROWS][name]
        try:
            block = np.array(rows, dtype=kind)
        except (TypeError, ValueError) as error:  # None, or sequences of different length
            i = next((i for i, row in enumerate(rows) if row is None), None)
            problem = guard.reason(error) if i is None else f"it is missing for {start + i}"
            raise ValueError(f"column {name!r} must hold numbers in rows of one shape, but: {problem}.") from None
        if block.dtype.kind == "f":
            labels.complete(f"column {name!r}", block, "sample", np.arange(start, start + len(block)))
        guard.size("dataset", block.nbytes // len(block) * part.num_rows, f"column {name!r}")
        blocks.append(block)
    if len({block.shape[1:] for block in blocks}) > 1 or (ndim is not None and blocks[0].ndim != ndim):
        shapes = dict.fromkeys(block.shape[1:] for block in blocks)
        raise ValueError(
            f"column {name!r} must hold rows of one shape, and single numbers in a list, but has {few(shapes)}."
        )
    return np.concatenate(blocks)


def _decode_images(part: Any, name: str) -> NDArray[np.uint8]:
    """Return images of Pillow, of one mode and size, as uint8 (sample, channel, row, column)."""
    plain = part.select_columns([name]).with_format(None)
    first = plain[0][name]
    if first is None or first.mode not in MODES:
        first_mode = "none" if first is None else first.mode
        raise ValueError(
            f"images must have one of the modes {', '.join(MODES)}, but row 0 has {first_mode}. {_convert(name)}"
        )
    size = first.size[::-1]
    guard.size("dataset", part.num_rows * MODES[first.mode] * size[0] * size[1], f"its {part.num_rows:,} images")
    out = np.empty((part.num_rows, MODES[first.mode], *size), dtype=np.uint8)
    for i, pixels in enumerate(out):
        image = plain[i][name]
        if image is None or (image.mode, image.size) != (first.mode, first.size):
            described = "is missing" if image is None else f"is {image.mode} {image.size[1]} × {image.size[0]}"
            raise ValueError(
                f"all images must be {first.mode} {size[0]} × {size[1]}, as in row 0, but row {i} {described}. "
                f"{_convert(name)}"
            )
        pixels[...] = to_array(image, first.mode, size)
    return out


def _convert(name: str) -> str:
    return f"Convert them: dataset.map(lambda row: {{{name!r}: row[{name!r}].convert('RGB').resize((32, 32))}})."


def _class_names(name: str, parts: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a ``ClassLabel``, which must be equal in all subsets; None for other columns."""
    names = [getattr(_feature(part, "y", name), "names", None) for part in parts.values()]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"y must have the same classes in all subsets, but {name!r} has others. Cast it to one ClassLabel."
        )
    return None if names[0] is None else list(names[0])


def _read_y(part: Any, columns: Sequence[str], several: bool) -> NDArray[Any]:
    """Return classes (sample,) or targets (sample, target)."""
    for name in columns:
        _feature(part, "y", name)
    if several:
        return np.column_stack([_numbers(part, name, ndim=1).astype(np.float64) for name in columns])
    rows = _read(part, columns[0])
    if rows and isinstance(next((row for row in rows if row is not None), None), list):
        return _numbers(part, columns[0])
    return labels.complete("y in dataset", rows, "sample")


def _read_client(part: Any, name: str) -> NDArray[Any]:
    feature = _feature(part, "client", name)
    client = labels.complete("client in dataset", _read(part, name), "sample")
    names = getattr(feature, "names", None)
    return client if names is None else np.array(names)[client]
