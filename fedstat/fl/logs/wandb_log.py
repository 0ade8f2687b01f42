"""A log for Weights & Biases, as the variables WANDB_... of the user's environment say."""

from __future__ import annotations

import os

from fedstat.fl.logs.base import PROJECT, Source
from fedstat.fl.round_metrics import RoundEnd

_LONGEST_NAME = 128


class WandbLog:
    """Run of Weights & Biases: its id is that of the stored run, its files are in ``wandb`` beside the store.

    The project is WANDB_PROJECT, else "fedstat". A resumed run continues; rounds that Weights & Biases has are skipped.
    """

    def __init__(self, source: Source) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", str(source.folder)),
            id=source.identity,
            name=source.name[:_LONGEST_NAME],
            config=source.flat_settings(),
            resume="allow",
            reinit="create_new",  # beside runs of the user's own, and of other threads
            settings=wandb.Settings(console="off"),
        )

    def write(self, end: RoundEnd) -> None:
        """Add a round."""
        if end.round >= self._run.starting_step:
            self._run.log(dict(end.metrics), step=end.round)

    def close(self, *, failed: bool) -> None:
        """Send what remains, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))
