"""A log for TensorBoard: ``tensorboard --logdir FOLDER/tensorboard`` shows the runs of a folder, one line each."""

from __future__ import annotations

from typing import Any

from fedstat.fl.logs.base import Source
from fedstat.fl.round_metrics import RoundEnd


class TensorBoardLog:
    """Folder ``tensorboard/NAME`` beside ``NAME.zarr``: scalars by round, and settings as hyperparameters.

    The log of a resumed run continues: TensorBoard hides what an earlier process wrote of rounds that are repeated.
    """

    def __init__(self, source: Source) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = source.folder / "tensorboard" / source.name
        self._writer = SummaryWriter(str(folder), purge_step=source.n_done + 1)
        file_writer: Any = self._writer.file_writer
        for summary in hparams(source.flat_settings(), dict.fromkeys(source.names, 0.0)):
            file_writer.add_summary(summary)

    def write(self, end: RoundEnd) -> None:
        """Add the scalars of a round."""
        for name, value in end.metrics.items():
            self._writer.add_scalar(name, value, end.round)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()
